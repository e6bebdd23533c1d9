"""Migrations: at once from many processes, killed at any moment, on databases that are not ours."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from bridge.database import Database
from bridge.errors import DatabaseUnavailable, SchemaError
from bridge.migrating import check, migrate, script
from tests.support import ROOT, until


@pytest.fixture
def empty(admin_url: str) -> Iterator[str]:
    """A fresh database without tables."""
    name = f"bridge_empty_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(admin_url, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
        yield make_conninfo(admin_url, dbname=name)
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


def start(url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bridge", "migrate"]
    env = {"BRIDGE_DATABASE_URL": url, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def tables(url: str) -> str:
    """Every table, column, constraint, index and function of the bridge, as text."""
    query = """
    SELECT string_agg(line, E'\\n' ORDER BY line) FROM (
        SELECT format('%s.%s %s %s', table_name, column_name, data_type, column_default) AS line
        FROM information_schema.columns WHERE table_schema = current_schema()
        UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = current_schema()
        UNION ALL SELECT conname || pg_get_constraintdef(oid) FROM pg_constraint
            WHERE connamespace = current_schema()::regnamespace
        UNION ALL SELECT proname || prosrc FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
        UNION ALL SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
    ) AS lines
    """
    with psycopg.connect(url) as conn:
        row = conn.execute(query).fetchone()
    assert row is not None
    return row[0]


def test_ten_processes_at_once(empty: str) -> None:
    processes = [start(empty) for _ in range(10)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 10, said
    assert set(said) == {"The database is at schema version 0002.\n"}


@pytest.mark.parametrize("moment", ["connecting", "waiting for the lock", "connected"])
def test_killed_at_any_moment_it_is_whole_or_absent(empty: str, moment: str) -> None:
    with psycopg.connect(empty, autocommit=True) as conn:
        if moment == "waiting for the lock":
            conn.execute("SELECT pg_advisory_lock(7242010931)")
        process = start(empty)
        sessions = "SELECT FROM pg_stat_activity WHERE application_name = 'bridge-migrate'"
        if moment != "connecting":
            until(lambda: conn.execute(sessions).fetchone() is not None or process.poll() is not None)
        process.kill()
        process.communicate()
    assert migrate(Database(empty)) == "0002"
    assert "job_event" in tables(empty)


def test_a_foreign_table_job_is_refused_and_untouched(empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as conn:
        conn.execute("CREATE TABLE job (id int)")
        conn.execute("INSERT INTO job VALUES (7)")
        with pytest.raises(SchemaError, match=r"table 'job' that the bridge did not make.*search_path"):
            migrate(Database(empty))
        assert conn.execute("SELECT * FROM job").fetchall() == [(7,)]
        assert conn.execute("SELECT to_regclass('bridge_version'), to_regclass('job_event')").fetchone() == (None, None)


def test_another_search_path_beside_a_foreign_table(empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as conn:
        conn.execute("CREATE TABLE job (id int)")
        url = make_conninfo(empty, options="-csearch_path=ours,public")
        with pytest.raises(SchemaError, match="did not make"):
            migrate(Database(url))  # the schema does not exist yet, so public would be used
        with pytest.raises(SchemaError, match="names no schema that exists"):
            migrate(Database(make_conninfo(empty, options="-csearch_path=ours")))
        conn.execute("CREATE SCHEMA ours")
        assert migrate(Database(url)) == "0002"
        conn.execute("INSERT INTO ours.job (name) VALUES ('from-elsewhere')")  # the trigger finds its own schema
        with Database(url).connection() as own:
            check(own)
            assert own.execute("SELECT name FROM job").fetchall() == [("from-elsewhere",)]
            own.close()
        assert conn.execute("SELECT count(*) FROM public.job").fetchone() == (0,)


def test_a_newer_schema_is_refused_with_the_sentence_that_helps(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("UPDATE bridge_version SET version_num = '9999'")
        for attempt in (lambda: migrate(Database(database_url)), lambda: check(conn)):
            with pytest.raises(SchemaError, match=r"9999.*newer.*Upgrade celery-bridge"):
                attempt()


def test_an_unmigrated_database_is_refused_where_it_is_used(empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as conn, pytest.raises(SchemaError, match="bridge migrate"):
        check(conn)


def test_the_printed_sql_makes_the_same_tables(empty: str, database_url: str) -> None:
    with psycopg.connect(empty, autocommit=True) as conn:
        conn.execute(script())
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("DROP TABLE received")
    assert tables(empty) == tables(database_url)
    assert migrate(Database(empty)) == "0002", "and it counts as migrated"


def test_migrations_wait_for_each_other(empty: str) -> None:
    done = threading.Event()

    def run() -> None:
        migrate(Database(empty))
        done.set()

    with psycopg.connect(empty, autocommit=True) as conn:
        conn.execute("SELECT pg_advisory_lock(7242010931)")
        thread = threading.Thread(target=run)
        thread.start()
        until(
            lambda: (
                conn.execute("SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchone() is not None
            )
        )
        assert not done.is_set()
        conn.execute("SELECT pg_advisory_unlock(7242010931)")
    thread.join()
    assert done.is_set()


def test_a_bad_address_is_one_sentence_without_the_password() -> None:
    process = start(f"postgresql://someone:{quote('hush')}@127.0.0.1:1/nowhere")
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert said.startswith("Error: PostgreSQL at 127.0.0.1:1, database 'nowhere', cannot be reached")
    assert "hush" not in said
    assert "Traceback" not in said
    with pytest.raises(DatabaseUnavailable):
        migrate(Database("postgresql://someone:hush@127.0.0.1:1/nowhere"))
