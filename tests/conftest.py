"""Real servers, real processes: PostgreSQL and Valkey from wheels, or those that the environment names.

BRIDGE_TEST_DATABASE_URL  a PostgreSQL where databases may be created (a superuser's address)
BRIDGE_TEST_BROKER_URL    a broker that the tests may empty
BRIDGE_TEST_PGBOUNCER     a pgbouncer program: the app and its processes reach PostgreSQL through it (transaction mode)

Each test has a database of its own, cloned from a migrated template.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from celery import Celery
from psycopg.conninfo import make_conninfo

import bridge
import tests.jobs
from bridge import runtime
from bridge.database import Database
from bridge.embedded import Servers
from bridge.migrating import migrate
from tests.pooler import Pooler
from tests.support import Side, Stack, purge

collect_ignore = [] if os.environ.get("BRIDGE_TEST_PGBOUNCER") else ["integration/test_pgbouncer.py"]
if not os.environ.get("BRIDGE_TEST_BROKER_URL", "").startswith("amqp"):
    collect_ignore.append("integration/test_rabbitmq.py")
JOBS = tests.jobs  # imported once for all: it declares the jobs

SIDE_TABLES = """
CREATE TABLE received (
    id bigserial PRIMARY KEY, job_id uuid, context jsonb, params text, at timestamptz DEFAULT clock_timestamp()
);
"""


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers | None]:
    """The embedded servers, unless the environment names both others."""
    if os.environ.get("BRIDGE_TEST_DATABASE_URL") and os.environ.get("BRIDGE_TEST_BROKER_URL"):
        yield None
        return
    with Servers() as started:
        yield started


@pytest.fixture(scope="session")
def admin_url(servers: Servers | None) -> str:
    """A PostgreSQL where databases are created."""
    named = os.environ.get("BRIDGE_TEST_DATABASE_URL")
    if named:
        return named
    assert servers is not None
    return servers.database_url


@pytest.fixture(scope="session")
def template(admin_url: str) -> Iterator[str]:
    """The name of a migrated database that tests are cloned from."""
    name = f"bridge_template_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(admin_url, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
        url = make_conninfo(admin_url, dbname=name)
        migrate(Database(url))
        with psycopg.connect(url) as side:
            side.execute(SIDE_TABLES)
        yield name
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database_url(admin_url: str, template: str) -> Iterator[str]:
    """A fresh, migrated database."""
    name = f"bridge_test_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(admin_url, autocommit=True) as conn:
        clone(conn, name, template)
        yield make_conninfo(admin_url, dbname=name)
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


def clone(conn: psycopg.Connection, name: str, template: str) -> None:
    """Clone the template, by copying its files where the server can: a third of the time."""
    how = "STRATEGY file_copy" if conn.info.server_version >= 150_000 else ""
    conn.execute(f"CREATE DATABASE {name} TEMPLATE {template} {how}")


@pytest.fixture(scope="session")
def pooler(admin_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pooler | None]:
    """PgBouncer in front of PostgreSQL, if the environment asks for it."""
    program = os.environ.get("BRIDGE_TEST_PGBOUNCER")
    if not program:
        yield None
        return
    with Pooler(program, admin_url) as started:
        yield started


@pytest.fixture
def app_url(database_url: str, pooler: Pooler | None) -> str:
    """The database as the app and its processes are told of it."""
    return pooler.address(database_url) if pooler else database_url


@pytest.fixture
def broker_url(servers: Servers | None) -> str:
    """An empty broker."""
    url = broker_of(servers)
    purge(url)
    return url


def broker_of(servers: Servers | None) -> str:
    """The broker of this run."""
    return os.environ.get("BRIDGE_TEST_BROKER_URL") or (servers.broker_url if servers else "")


@pytest.fixture
def conn(database_url: str) -> Iterator[psycopg.Connection]:
    """A connection of the test's own, in autocommit."""
    with psycopg.connect(database_url, autocommit=True) as one:
        yield one


@pytest.fixture
def side(conn: psycopg.Connection) -> Side:
    """What the test's jobs wrote down."""
    return Side(conn)


@pytest.fixture(autouse=True)
def _clean_record() -> Iterator[None]:
    """The record of installed apps is process-wide: each test starts with none, and what modules declared."""
    record = runtime._record
    installed, declared = list(record.installed), dict(record.declared)
    record.installed.clear()
    yield
    for each in record.installed:
        if each.bridge is not None:
            each.bridge.database.close()
            each.bridge.keeper.database.close()
    record.installed[:] = installed
    record.declared.clear()
    record.declared.update(declared)


@pytest.fixture
def app(app_url: str, broker_url: str, monkeypatch: pytest.MonkeyPatch) -> Celery:
    """An installed Celery app in this process, on the test's own servers."""
    monkeypatch.setenv("BRIDGE_DATABASE_URL", app_url)
    monkeypatch.setenv("BRIDGE_BROKER_URL", broker_url)
    return bridge.install(Celery("tests", set_as_current=False))


@pytest.fixture
def one(app: Celery) -> runtime.Bridge:
    """The wired verbs of `app`."""
    return runtime.of(app)


@pytest.fixture
def stack(app_url: str, broker_url: str, tmp_path: Path) -> Iterator[Stack]:
    """Workers and dispatchers as processes, on the test's own servers; all of them end with the test."""
    with Stack(app_url, broker_url, tmp_path) as started:
        yield started


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[Servers, Stack]]:
    """Servers of the test's own, which it may stop."""
    with Servers() as servers:
        migrate(Database(servers.database_url))
        with psycopg.connect(servers.database_url) as conn:
            conn.execute(SIDE_TABLES)
        with Stack(servers.database_url, servers.broker_url, tmp_path) as stack:
            yield servers, stack
