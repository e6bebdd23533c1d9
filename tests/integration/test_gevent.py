"""C37: the gevent pool, where one process runs many jobs, threads are greenlets and only waiting can be interrupted."""

from __future__ import annotations

import signal
from pathlib import Path

from celery import Celery

from tests.support import Side, Stack, send, until


def test_c37_more_greenlets_than_connections(stack: Stack, side: Side, tmp_path: Path) -> None:
    """Each waits in its handler, so all of them run at once; keeper, dispatcher and the others go on beside them."""
    worker = stack.worker(pool="gevent", concurrency=60, BRIDGE_LEASE="3s", BRIDGE_WINDOW="100")
    ids = [side.insert("held", params={"until": str(tmp_path / "go")}) for _ in range(60)]
    until(lambda: side.counts() == {"running": 60} and len(side.rows("SELECT FROM received")) == 60)
    sessions = side.rows(
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'bridge%%'"
    )
    assert len(sessions) <= 8 + 3
    first = min(row["lease_until"] for row in side.rows("SELECT lease_until FROM job"))
    until(lambda: min(row["lease_until"] for row in side.rows("SELECT lease_until FROM job")) > first)
    (tmp_path / "go").touch()
    until(lambda: side.counts() == {"completed": 60}, what=lambda: worker.tail)
    assert all(side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "completed"})] for job_id in ids)
    assert worker.end() == 0


def test_c37_a_time_limit_of_a_greenlet_is_a_failure_of_the_job(stack: Stack, side: Side) -> None:
    worker = stack.worker(pool="gevent")
    job_id = side.insert("limited", max_retries=0)
    until(lambda: side.status(job_id) == "failed", what=lambda: worker.tail)
    error = side.row(job_id)["error"]
    assert (error["code"], error["hint"]) == ("timeout", "time limit of 2 s exceeded")
    assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "failed"})]


def test_c37_a_time_limit_in_the_claim_gives_the_row_back(stack: Stack, side: Side) -> None:
    """The limit counts from the delivery, so that it may end a claim which waits for a lock."""
    worker = stack.worker(pool="gevent", BRIDGE_DISPATCHER="standalone")
    job_id = side.insert("limited", max_retries=0, status="scheduled")
    with side.conn.transaction():
        side.conn.execute("SELECT FROM job WHERE id = %s FOR UPDATE", (job_id,))
        send(stack.broker_url, "limited", side.ticket(job_id))
        worker.says("time limit (2")
    stack.dispatcher()
    until(lambda: side.status(job_id) == "failed", what=lambda: worker.tail)
    assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "failed"})]


def test_c37_revoke_with_terminate_cancels_what_a_greenlet_runs(stack: Stack, side: Side) -> None:
    worker = stack.worker(pool="gevent")
    job_id = side.insert("naps", params={"seconds": 60})
    until(lambda: side.received(job_id))
    with Celery("ctl", broker=stack.broker_url, set_as_current=False) as control:
        control.control.revoke(str(job_id), terminate=True)
    until(lambda: side.status(job_id) == "cancelled", what=lambda: worker.tail)
    assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "cancelled"})]
    after = side.insert("plain")
    until(lambda: side.status(after) == "completed", what=lambda: worker.tail)
    assert worker.end(seconds=30) == 0, "the greenlet is gone, and nothing waits for it"


def test_c37_a_cold_stop_gives_back_what_greenlets_ran(stack: Stack, side: Side, tmp_path: Path) -> None:
    worker = stack.worker(pool="gevent")
    job_id = side.insert("held", params={"until": str(tmp_path / "go")})
    until(lambda: side.received(job_id))
    worker.end(signal.SIGQUIT)
    assert side.status(job_id) in ("retry", "scheduled"), worker.tail
    assert side.events(job_id) == [("start", {"attempt": 1}), ("retry", {"attempt": 1, "reason": "noop"})]
    (tmp_path / "go").touch()
    stack.worker()
    until(lambda: side.status(job_id) == "completed")
    assert len(side.received(job_id)) == 2


def test_c37_a_killed_process_loses_the_runs_of_all_its_greenlets(stack: Stack, side: Side, tmp_path: Path) -> None:
    worker = stack.worker(pool="gevent", concurrency=5, BRIDGE_LEASE="2s")
    stack.dispatcher(BRIDGE_LEASE="2s")
    ids = [side.insert("held", params={"until": str(tmp_path / "go")}) for _ in range(5)]
    until(lambda: all(side.received(job_id) for job_id in ids))
    worker.kill()
    until(lambda: side.counts() == {"aborted": 5})
    assert {side.row(job_id)["error"]["code"] for job_id in ids} == {"orphan"}


def test_c37_the_eventlet_pool_is_refused_by_one_sentence(stack: Stack) -> None:
    command = ["-m", "celery", "-A", "bridge", "worker", "-c", "1"]
    blocked = stack.start([*command, "-P", "eventlet"])
    assert blocked.popen.wait(30) == 1
    assert "bridge: psycopg blocks every greenlet of the eventlet pool. Use: -P gevent" in blocked.log
    assert "Traceback" not in blocked.log, blocked.log
