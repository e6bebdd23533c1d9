"""Faults cost time, never a job: dead workers, a stopped database, an emptied broker, long queues."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import psycopg
import pytest

from bridge.embedded import Servers
from tests.support import Side, Stack, broker, depth, purge, stays, until


def test_c07_a_job_longer_than_its_lease_completes(stack: Stack, side: Side) -> None:
    stack.worker(BRIDGE_LEASE="3s")
    job_id = side.insert("naps", params={"seconds": 20})
    until(lambda: side.status(job_id) == "completed", seconds=40)
    assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]


def test_c04_a_worker_killed_between_claim_and_settle_is_found_by_its_lease(stack: Stack, side: Side) -> None:
    doomed = stack.worker(BRIDGE_LEASE="4s")
    job_id = side.insert("naps", params={"seconds": 60})
    until(lambda: side.status(job_id) == "running" and side.received(job_id))
    doomed.kill()
    doomed.popen.wait()
    lease_until: datetime = side.row(job_id)["lease_until"]
    survivor = stack.worker(BRIDGE_LEASE="4s")
    until(lambda: side.status(job_id) == "aborted", what=lambda: survivor.tail)
    (end,) = side.rows("SELECT created_at, actor FROM job_event WHERE job_id = %s AND kind = 'end'", job_id)
    assert end["created_at"] >= lease_until, "not before the lease is over"
    assert end["actor"] == "dispatcher"
    assert side.row(job_id)["error"]["code"] == "orphan"
    assert side.row(job_id)["completed_at"] is None


def test_c04_what_a_killed_worker_had_reserved_runs_elsewhere(stack: Stack, side: Side) -> None:
    doomed = stack.worker("--prefetch-multiplier", "4", BRIDGE_LOST_AFTER="3s", BRIDGE_LEASE="3s")
    ids = [side.insert("naps", params={"seconds": 60 if n < 2 else 0}) for n in range(8)]
    until(lambda: side.counts().get("running") == 2 and side.counts().get("scheduled") == 6)
    until(lambda: depth(stack.broker_url, "test") == 0, what="the rest is reserved")
    doomed.kill()
    doomed.popen.wait()
    survivor = stack.worker(BRIDGE_LOST_AFTER="3s", BRIDGE_LEASE="3s")
    until(lambda: side.counts() == {"completed": 6, "aborted": 2}, seconds=40, what=lambda: survivor.tail)
    assert len(ids) == 8


def test_the_database_stopped_for_two_leases_aborts_nobody(own: tuple[Servers, Stack]) -> None:
    servers, stack = own
    worker = stack.worker(BRIDGE_LEASE="3s")
    with psycopg.connect(servers.database_url, autocommit=True) as conn:
        side = Side(conn)
        long, short = side.insert("naps", params={"seconds": 20}), side.insert("naps", params={"seconds": 3})
        until(lambda: side.counts() == {"running": 2} and len(side.rows("SELECT FROM received")) == 2)
    assert servers.postgres is not None
    servers.postgres.send_signal(signal.SIGQUIT)  # immediate shutdown: as after a crash
    servers.postgres.wait()
    worker.says("does not answer")
    stays(lambda: worker.popen.poll() is None, seconds=7)  # two leases, in which the short job ends too
    servers.start_postgres()
    with psycopg.connect(servers.database_url, autocommit=True) as conn:
        side = Side(conn)
        until(lambda: side.counts() == {"completed": 2}, seconds=40, what=lambda: f"{side.counts()}\n{worker.tail}")
        for job_id in (long, short):
            assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]
            assert len(side.received(job_id)) == 1, "the handler never runs twice for one outcome"
        after = side.insert("plain")
        until(lambda: side.status(after) == "completed", what="dispatch goes on")


def test_c02_an_emptied_broker_loses_no_job(stack: Stack, side: Side) -> None:
    dispatcher = stack.dispatcher(BRIDGE_LOST_AFTER="3s")
    ids = [side.insert("plain") for _ in range(50)]
    until(lambda: depth(stack.broker_url, "test") == 50)
    purge(stack.broker_url)
    stack.worker(BRIDGE_LOST_AFTER="3s", BRIDGE_DISPATCHER="standalone")
    until(lambda: side.counts() == {"completed": 50}, seconds=20, what=lambda: dispatcher.tail)
    for job_id in ids:
        assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]
        assert len(side.received(job_id)) == 1
    assert "50 messages of queue test are lost" in dispatcher.log


@pytest.mark.parametrize("prefetch", ["1", "4"])
def test_a_long_queue_is_never_published_again(stack: Stack, side: Side, prefetch: str) -> None:
    """Two children on a queue that takes three times BRIDGE_LOST_AFTER to drain, its rows of rising priority."""
    worker = stack.worker("--prefetch-multiplier", prefetch, BRIDGE_LOST_AFTER="3s")
    for number in range(40):
        side.insert("naps", params={"seconds": 0.5}, priority=number % 20)
    until(lambda: side.counts() == {"completed": 40}, seconds=60)
    (row,) = side.rows("SELECT max(started_at) - min(created_at) AS took FROM job")
    assert row["took"].total_seconds() > 9, "the queue was long enough to tell"
    assert "are lost" not in worker.log
    assert side.rows("SELECT FROM job WHERE scheduled_at <> date_trunc('milliseconds', created_at)") == []


def test_lost_messages_come_back_beside_a_queue_that_never_empties(stack: Stack, side: Side) -> None:
    """The count of the queue cannot tell them; that later messages were received can."""
    stack.dispatcher(BRIDGE_LOST_AFTER="3s")
    lost = [side.insert("plain", label="lost") for _ in range(5)]
    until(lambda: depth(stack.broker_url, "test") == 5)
    purge(stack.broker_url)
    stack.worker(BRIDGE_LOST_AFTER="3s", BRIDGE_DISPATCHER="standalone")
    feed = """
    INSERT INTO job (name, queue, params) SELECT 'naps', 'test', '{"seconds": 0.05}' FROM generate_series(1, 60 - (
        SELECT count(*) FROM job WHERE status IN ('new', 'scheduled') AND label = ''
    ))
    """

    def back() -> bool:
        side.conn.execute(feed)
        return {side.status(job_id) for job_id in lost} == {"completed"}

    until(back, seconds=40)


def test_a_lost_row_that_somebody_locks_keeps_nobody_else_waiting(stack: Stack, side: Side) -> None:
    dispatcher = stack.dispatcher(BRIDGE_LOST_AFTER="2s")
    lost = [side.insert("plain") for _ in range(5)]
    until(lambda: depth(stack.broker_url, "test") == 5)
    purge(stack.broker_url)
    with psycopg.connect(stack.database_url) as locker:
        locker.execute("SELECT FROM job WHERE id = %s FOR UPDATE", (lost[2],))
        until(lambda: depth(stack.broker_url, "test") == 4, what=lambda: dispatcher.tail)
        flowing = side.insert("plain")
        until(lambda: side.status(flowing) == "scheduled", what=lambda: dispatcher.tail)
    until(lambda: "1 messages of queue test are lost" in dispatcher.log, what=lambda: dispatcher.tail)
    assert "canceling statement" not in dispatcher.log


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_stricter_default_isolation_of_the_server_changes_nothing(stack: Stack, side: Side, level: str) -> None:
    """Claims, settles and sweeps that compete for rows would fail under it, each with "could not serialize"."""
    name = side.conn.info.dbname
    side.conn.execute(f"ALTER DATABASE {name} SET default_transaction_isolation TO '{level}'")
    with psycopg.connect(stack.database_url) as other:
        assert other.execute("SHOW transaction_isolation").fetchone() == (level,)
    workers = [stack.worker(), stack.worker()]
    for _ in range(100):
        side.insert("quick")
    flaky = side.insert("flaky", params={"times": 2})
    until(lambda: side.counts() == {"completed": 101}, what=lambda: side.counts())
    assert [kind for kind, _ in side.events(flaky)] == ["start", "retry", "start", "retry", "start", "end"]
    assert all("serialize" not in worker.log for worker in workers)


def test_a_table_that_somebody_locks_for_longer_than_a_lease_aborts_nobody(
    stack: Stack, side: Side, tmp_path: Path
) -> None:
    worker = stack.worker(BRIDGE_LEASE="3s")
    job_id = side.insert("held", params={"until": str(tmp_path / "go")})
    until(lambda: side.status(job_id) == "running" and side.received(job_id))
    with psycopg.connect(stack.database_url) as locker:
        locker.execute("LOCK TABLE job IN SHARE MODE")  # as CREATE INDEX does: reads go on, renewals wait
        expired = "SELECT FROM job WHERE lease_until < clock_timestamp() - interval '3 seconds'"
        until(lambda: side.rows(expired), what="a lease that was over for a lease")
    (tmp_path / "go").touch()
    until(lambda: side.status(job_id) == "completed", what=lambda: worker.tail)
    assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]


def test_a_row_that_somebody_locks_for_longer_than_its_lease_is_not_aborted(
    stack: Stack, side: Side, tmp_path: Path
) -> None:
    worker = stack.worker(BRIDGE_LEASE="3s")
    job_id, other = (side.insert("held", params={"until": str(tmp_path / "go")}) for _ in range(2))
    until(lambda: side.status(job_id) == "running" and side.received(job_id))
    until(lambda: side.status(other) == "running")
    with psycopg.connect(stack.database_url) as locker:
        locker.execute("SELECT FROM job WHERE id = %s FOR UPDATE", (job_id,))
        expired = "SELECT FROM job WHERE id = %s AND lease_until < clock_timestamp() - interval '3 seconds'"
        until(lambda: side.rows(expired, job_id))
    (tmp_path / "go").touch()
    until(lambda: {side.status(job_id), side.status(other)} == {"completed"}, what=lambda: worker.tail)


def test_a_clock_that_jumps_aborts_nobody(stack: Stack, side: Side) -> None:
    """To the leases, a step of the database's clock and a suspended machine look like this."""
    worker = stack.worker(BRIDGE_LEASE="6s")
    job_id = side.insert("naps", params={"seconds": 9})
    until(lambda: side.status(job_id) == "running" and side.received(job_id))
    side.conn.execute("UPDATE job SET lease_until = lease_until - interval '1 hour'")
    until(lambda: side.status(job_id) == "completed", what=lambda: worker.tail)
    assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]


def test_a_dead_child_is_closed_though_its_row_is_locked_and_the_keepers_session_killed(
    stack: Stack, side: Side
) -> None:
    worker = stack.worker(concurrency=1, BRIDGE_LEASE="60s")
    job_id = side.insert("naps", params={"seconds": 60})
    until(lambda: side.status(job_id) == "running" and side.received(job_id))
    keeper = "FROM pg_stat_activity WHERE application_name = 'bridge-keeper' AND datname = current_database()"
    with psycopg.connect(stack.database_url) as locker:
        locker.execute("SELECT FROM job WHERE id = %s FOR UPDATE", (job_id,))
        (child,) = worker.children()
        os.kill(child, signal.SIGKILL)
        for _ in range(3):  # three times out of patience, and then cut off
            until(lambda: side.rows(f"SELECT {keeper} AND wait_event_type = 'Lock'"), what=lambda: worker.tail)
            until(lambda: not side.rows(f"SELECT {keeper} AND wait_event_type = 'Lock'"))
        side.rows(f"SELECT pg_terminate_backend(pid) {keeper}")
    until(lambda: side.status(job_id) == "aborted", seconds=20, what=lambda: worker.tail)
    assert side.row(job_id)["error"]["code"] == "worker-lost"


def test_c08_a_broker_that_restarts_in_mid_job_costs_nothing(own: tuple[Servers, Stack]) -> None:
    servers, stack = own
    worker = stack.worker(BRIDGE_LOST_AFTER="3s")
    with psycopg.connect(servers.database_url, autocommit=True) as conn:
        side = Side(conn)
        long = side.insert("naps", params={"seconds": 12})
        until(lambda: side.status(long) == "running" and side.received(long))
        for _ in range(2):
            assert servers.valkey is not None
            servers.valkey.kill()
            servers.valkey.wait()
            servers.start_valkey()
            some = [side.insert("plain") for _ in range(5)]
            until(lambda some=some: {side.status(each) for each in some} == {"completed"}, what=lambda: worker.tail)
        until(lambda: side.status(long) == "completed", what=lambda: worker.tail)
        assert side.events(long) == [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]
        assert len(side.received(long)) == 1
    assert worker.end() == 0


def test_a_postgres_that_stood_still_aborts_nobody(own: tuple[Servers, Stack]) -> None:
    """Every process of PostgreSQL is stopped for three leases; the dispatcher's comes back before the keeper's."""
    servers, stack = own
    worker = stack.worker(BRIDGE_LEASE="3s")
    with psycopg.connect(servers.database_url, autocommit=True) as conn:
        side = Side(conn)
        job_id = side.insert("naps", params={"seconds": 18})
        until(lambda: side.status(job_id) == "running" and side.received(job_id))
        sessions = side.rows(
            "SELECT pid, application_name AS name FROM pg_stat_activity WHERE backend_type = 'client backend'"
        )
        keeper = [row["pid"] for row in sessions if row["name"] == "bridge-keeper"]
        others = [row["pid"] for row in sessions if row["name"].startswith("bridge") and row["pid"] not in keeper]
        for pid in (*keeper, *others):
            os.kill(pid, signal.SIGSTOP)
        stays(lambda: worker.popen.poll() is None, seconds=9)
        for pid in others:
            os.kill(pid, signal.SIGCONT)
        stays(lambda: side.status(job_id) == "running", seconds=0.5)
        for pid in keeper:
            os.kill(pid, signal.SIGCONT)
        until(lambda: side.status(job_id) == "completed", what=lambda: f"{side.row(job_id)}\n{worker.tail}")


def test_a_poison_row_of_plain_sql_harms_no_other(stack: Stack, side: Side) -> None:
    """JSON that Python refuses to read, and the last hour of the year 9999, in rows that are over their lease."""
    huge = "9" * 5000
    for column in ("meta", "result", "error"):
        side.conn.execute(
            f"INSERT INTO job (name, queue, status, lease_until, {column}) "
            f"VALUES ('plain', 'test', 'running', now() - interval '1 minute', '{huge}')"
        )
    far = side.insert("plain", status="running", expires_at="9999-12-31T23:59:59Z", lease_until="2020-01-01T00:00:00Z")
    honest = side.insert("plain", status="running", lease_until="2021-01-01T00:00:00Z")
    worker = stack.worker(BRIDGE_LEASE="3s", PGTZ="Europe/Berlin")
    until(lambda: side.counts() == {"aborted": 5}, what=lambda: f"{side.counts()}\n{worker.tail}")
    assert {side.status(far), side.status(honest)} == {"aborted"}


@pytest.mark.timeout(300)
def test_thousands_at_once_keep_the_window(stack: Stack, side: Side) -> None:
    worker = stack.worker(BRIDGE_WINDOW="200")
    side.conn.execute("INSERT INTO job (name, queue) SELECT 'quick', 'test' FROM generate_series(1, 3000)")
    longest = 0

    def done() -> bool:
        nonlocal longest
        longest = max(longest, depth(stack.broker_url, "test"))
        return not side.rows("SELECT FROM job WHERE status <> 'completed' LIMIT 1")

    until(done, seconds=280, what=lambda: worker.tail)
    assert 0 < longest <= 200
    assert side.rows("SELECT count(*) AS n FROM job_event")[0]["n"] == 6000


def test_two_dispatchers_share_one_window(stack: Stack, side: Side) -> None:
    dispatchers = [stack.dispatcher(BRIDGE_WINDOW="50") for _ in range(2)]
    side.conn.execute("INSERT INTO job (name, queue) SELECT 'quick', 'test' FROM generate_series(1, 500)")
    until(lambda: side.counts().get("scheduled") == 50)
    stays(lambda: side.counts()["scheduled"] == 50 and depth(stack.broker_url, "test") == 50, seconds=2)
    assert [each.end() for each in dispatchers] == [0, 0]


@contextmanager
def refused_queue(url: str, name: str) -> Iterator[None]:
    """A queue that nobody can publish to: on Redis a key that is no list, on RabbitMQ one declared otherwise."""
    with broker(url) as connection:
        channel = connection.channel()
        if connection.transport.driver_type == "redis":
            channel.client.set(name, "not a list")
            yield
            channel.client.delete(name)
        else:
            channel.queue_delete(name)  # an earlier test's dispatcher has declared it in the end
            channel.queue_declare(name, durable=False, auto_delete=False)
            yield
            channel.queue_delete(name)


def test_a_queue_that_the_broker_refuses_is_set_aside_alone(stack: Stack, side: Side) -> None:
    with refused_queue(stack.broker_url, "refused"):
        worker = stack.worker("-Q", "test,other")
        refused = [side.insert("plain", queue="refused") for _ in range(3)]
        flowing = [side.insert("plain") for _ in range(5)]
        until(lambda: {side.status(job_id) for job_id in flowing} == {"completed"}, what=lambda: worker.tail)
        worker.says("queue refused cannot be published")
        assert {side.status(job_id) for job_id in refused} == {"new"}
        assert worker.log.count("queue refused cannot be published") == 1
    until(lambda: {side.status(job_id) for job_id in refused} == {"scheduled"}, what=lambda: worker.tail)


def test_c09_a_warm_stop_leaves_what_was_reserved_pending(stack: Stack, side: Side, tmp_path: Path) -> None:
    worker = stack.worker("--prefetch-multiplier", "10", concurrency=1)
    ids = [side.insert("held", params={"until": str(tmp_path / "go")}) for _ in range(5)]
    until(lambda: side.counts() == {"running": 1, "scheduled": 4})
    worker.kill(signal.SIGTERM)
    worker.says("Warm shutdown")
    (tmp_path / "go").touch()
    assert worker.popen.wait(60) == 0
    assert side.counts() == {"completed": 1, "scheduled": 4}
    stack.worker()
    until(lambda: side.counts() == {"completed": 5}, what="the messages went back to the queue")
    for job_id in ids:
        assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]


def test_a_cold_stop_gives_the_run_back(stack: Stack, side: Side, tmp_path: Path) -> None:
    worker = stack.worker(concurrency=1)
    job_id = side.insert("held", params={"until": str(tmp_path / "go")})
    until(lambda: side.status(job_id) == "running" and side.received(job_id))
    worker.end(signal.SIGQUIT)
    row = side.row(job_id)
    assert row["status"] in ("retry", "scheduled"), worker.tail
    assert row["retry_num"] == 0
    assert side.events(job_id) == [("start", {"attempt": 1}), ("retry", {"attempt": 1, "reason": "noop"})]
    (tmp_path / "go").touch()
    stack.worker()
    until(lambda: side.status(job_id) == "completed")
    assert len(side.received(job_id)) == 2


def test_c17_killed_sessions_cost_at_most_the_statement(stack: Stack, side: Side) -> None:
    worker = stack.worker()
    ids = [side.insert("naps", params={"seconds": 0.1}) for _ in range(60)]
    kill = (
        "SELECT count(pg_terminate_backend(pid)) AS n FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'bridge%%'"  # not the handlers' own
    )
    killed = 0

    def done() -> bool:
        nonlocal killed
        killed += side.rows(kill)[0]["n"]
        until_changed(side)
        return side.counts() == {"completed": 60}

    until(done, seconds=60, what=lambda: f"{side.counts()}\n{worker.tail}")
    assert killed > 10
    for job_id in ids:
        assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]
        assert len(side.received(job_id)) == 1


def until_changed(side: Side) -> None:
    """Wait until something moved, or a moment."""
    before = side.counts()
    try:
        until(lambda: side.counts() != before, seconds=0.5)
    except AssertionError:
        return


def test_connections_stay_at_one_a_child_plus_three(stack: Stack, side: Side) -> None:
    stack.worker(concurrency=3)
    for _ in range(60):
        side.insert("quick")
    until(lambda: side.counts() == {"completed": 60})
    rows = side.rows(
        "SELECT application_name AS name, count(*) AS n FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'bridge%%' GROUP BY 1"
    )
    found = {row["name"]: row["n"] for row in rows}
    assert found.pop("bridge") <= 3
    assert found.keys() <= {"bridge-keeper", "bridge-dispatcher", "bridge-listener"}
    assert set(found.values()) == {1}
