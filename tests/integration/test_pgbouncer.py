"""Behind PgBouncer in transaction mode; collected where BRIDGE_TEST_PGBOUNCER names the program."""

from __future__ import annotations

import pytest
from celery import Celery

import bridge
from bridge import runtime
from bridge.database import Database
from bridge.errors import DatabaseUnavailable
from bridge.migrating import migrate
from tests.pooler import Pooler
from tests.support import Side, Stack, until


def test_c18_two_thousand_jobs_through_four_server_sessions(app: Celery, stack: Stack, side: Side) -> None:
    """Producer, dispatchers and workers, twenty clients; no prepared statement, LISTEN or setting may be missed."""
    dispatcher = stack.dispatcher()
    workers = [stack.worker(concurrency=4, BRIDGE_DISPATCHER="standalone") for _ in range(2)]
    for _ in range(20):
        bridge.submit_many("quick", [{} for _ in range(100)])
    until(lambda: side.counts() == {"completed": 2000}, seconds=100, what=lambda: f"{side.counts()}\n{workers[0].tail}")
    (row,) = side.rows("SELECT count(*) AS n, count(DISTINCT job_id) AS jobs FROM job_event WHERE kind = 'end'")
    assert (row["n"], row["jobs"]) == (2000, 2000)
    assert dispatcher.log.count("a transaction pooler stands in between: set BRIDGE_LISTEN_URL") == 1
    idle = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%%'"
    until(lambda: not side.rows(idle), seconds=5)


def test_a_direct_address_for_wake_ups(stack: Stack, side: Side, database_url: str) -> None:
    worker = stack.worker(BRIDGE_LISTEN_URL=database_url, BRIDGE_POLL_INTERVAL="1h", BRIDGE_LEASE="10h")
    for _ in range(3):
        job_id = side.insert("plain")
        until(lambda job_id=job_id: side.status(job_id) == "completed", seconds=20, what=lambda: worker.tail)


def test_settings_hold_in_every_block(one: runtime.Bridge, side: Side) -> None:
    ask = (
        "SELECT current_setting('lock_timeout'), current_setting('transaction_isolation'), "
        "current_setting('statement_timeout'), current_setting('TimeZone')"
    )
    side.conn.execute("ALTER DATABASE " + side.conn.info.dbname + " SET default_transaction_isolation TO serializable")
    for _ in range(5):
        with one.database.connection() as conn:
            assert conn.execute(ask).fetchone() == ("5s", "read committed", "30s", "UTC")
    assert one.database.pooled


def test_it_migrates(admin_url: str, database_url: str, pooler: Pooler, side: Side) -> None:
    side.conn.execute("DROP TABLE job CASCADE; DROP TABLE job_event, bridge_dispatcher, bridge_version CASCADE")
    for function in ("bridge_uuidv7()", "bridge_instant(timestamptz)", "bridge_append_only()", "bridge_with_its_job()"):
        side.conn.execute(f"DROP FUNCTION {function} CASCADE")
    side.conn.execute("DROP FUNCTION bridge_wake(text) CASCADE; DROP FUNCTION bridge_inserted() CASCADE")
    assert migrate(Database(pooler.address(database_url))) == "0002"


def test_a_pooler_that_is_gone_is_a_prompt_error(app: Celery, monkeypatch: pytest.MonkeyPatch, pooler: Pooler) -> None:
    bridge.submit("plain", {})
    pooler.popen.kill()
    pooler.popen.wait()
    try:
        with pytest.raises(DatabaseUnavailable):
            bridge.submit("plain", {})
    finally:
        pooler.start()
    bridge.submit("plain", {})
