"""Bring a database to the tables that this version needs: numbered SQL, applied by Alembic under a lock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
from alembic.command import upgrade
from alembic.config import Config
from alembic.script import ScriptDirectory
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from bridge.database import Connection, Database, ours, translated
from bridge.errors import SchemaError
from bridge.sql import statement

# Any number that nobody else uses; the lock makes ten processes that migrate at once take turns.
_LOCK = 7_242_010_931

_VERSION_TABLE = """\
CREATE TABLE bridge_version (
    version_num varchar(32) NOT NULL,
    CONSTRAINT bridge_version_pkc PRIMARY KEY (version_num)
);
"""


def migrate(database: Database) -> str:
    """Apply what is missing, in one transaction; returns the version.

    Raises:
        SchemaError: the database holds a table `job` that is not ours, or a newer version than this code.
        DatabaseUnavailable: PostgreSQL cannot be reached.
    """
    config = _config()
    head = ScriptDirectory.from_config(config).get_current_head() or ""
    engine = create_engine("postgresql+psycopg://", creator=database.connect, poolclass=NullPool)
    try:
        with engine.connect().execution_options(isolation_level="READ COMMITTED") as conn, conn.begin():
            conn.execute(text("SET LOCAL lock_timeout = '30s'"))
            conn.execute(text("SET LOCAL statement_timeout = 0"))
            conn.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            raw = conn.connection.driver_connection
            assert isinstance(raw, psycopg.Connection)  # noqa: S101 -- narrows the type of our own creator
            _refuse_foreign(config, raw)
            config.attributes["connection"] = conn
            upgrade(config, "head")
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.Error):
            raise ours(error.orig) from error
        raise
    return head


def script() -> str:
    """All versions as SQL to read, or to run with psql in one transaction, the version table included."""
    parts = [_VERSION_TABLE]
    for each in reversed(_versions(_config())):
        parts += [f"-- Version {each.revision}", Path(each.path).with_suffix(".sql").read_text()]
    parts.append(f"INSERT INTO bridge_version (version_num) VALUES ('{each.revision}');\n")  # noqa: S608 -- ours
    return "\n".join(["BEGIN;\n", *parts, "COMMIT;\n"])


def check(conn: Connection) -> None:
    """Refuse to start on tables that are not those of this version.

    Raises:
        SchemaError: the database is not migrated, or was migrated by another version.
    """
    config = _config()
    _refuse_foreign(config, conn)
    head, found = ScriptDirectory.from_config(config).get_current_head(), _version(conn)
    if found != head:
        raise SchemaError(
            f"The database is at schema version {found or 'none'}, this version of the bridge needs {head}. "
            "Run: python -m bridge migrate"
        )


def _refuse_foreign(config: Config, conn: Connection) -> None:
    found = _one(conn, statement("schema"))
    if found["name"] is None:
        raise SchemaError(
            "The search_path of the database address names no schema that exists: create it, "
            'for example with psql -c "CREATE SCHEMA bridge"'
        )
    version = _version(conn)
    if version is None and found["taken"] is not None:
        raise SchemaError(
            f"The schema {found['name']!r} already holds a table {found['taken']!r} that the bridge did not make; "
            "it was not touched. "
            "Use another database, or another schema by a search_path: "
            "postgresql://…/db?options=-csearch_path%3Dbridge"
        )
    if version is not None and version not in {each.revision for each in _versions(config)}:
        raise SchemaError(
            f"The database is at schema version {version}, which this version of the bridge does not know: "
            "it was migrated by a newer one. Upgrade celery-bridge here."
        )


def _version(conn: Connection) -> str | None:
    return _one(conn, statement("version")).get("version") if _one(conn, statement("schema"))["versioned"] else None


def _one(conn: Connection, query: str) -> dict[str, Any]:
    with translated():
        return conn.cursor(row_factory=dict_row).execute(query).fetchone() or {}


def _versions(config: Config) -> list[Any]:
    return list(ScriptDirectory.from_config(config).walk_revisions())


def _config() -> Config:
    here = Path(__file__).parent
    folder = here / "migrations"  # in the wheel; in a clone it stands beside the package
    config = Config()
    config.set_main_option("script_location", str(folder if folder.is_dir() else here.parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config
