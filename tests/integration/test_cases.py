"""Public reports, each tried as the kind that it is; docs/reliability.md lists them all."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery
from kombu import Connection

import bridge
from bridge import runtime
from bridge.embedded import Servers
from bridge.records import Run, Ticket, new_id
from tests.integration.test_reference import run_here
from tests.jobs import anything
from tests.support import Side, Stack, depth, stays, until

COMPLETED = [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]


def test_c01_messages_that_come_back_run_nothing_twice(stack: Stack, side: Side, tmp_path: Path) -> None:
    """A visibility timeout far below the job's time, and a job that is due beyond it."""
    if not stack.broker_url.startswith("redis"):
        return  # RabbitMQ has no such timeout
    workers = [stack.worker(concurrency=2) for _ in range(2)]
    long = side.insert("held", params={"until": str(tmp_path / "go")})
    later = side.insert("plain", scheduled_at=datetime.now(UTC) + timedelta(seconds=3))
    until(lambda: side.received(long), what=lambda: workers[0].tail)
    with Connection(stack.broker_url, transport_options={"visibility_timeout": 0}) as impatient:

        def came_back() -> bool:
            channel: Any = impatient.channel()
            channel.qos.restore_visible(0, 100, interval=1)  # what each worker does now and then
            channel.close()
            return any("is not current" in each.log for each in workers)  # once: its own acknowledgement drops it

        until(came_back, what=lambda: workers[0].tail)
    (tmp_path / "go").touch()
    until(lambda: side.counts() == {"completed": 2}, what=lambda: workers[0].tail)
    for job_id in (long, later):
        assert side.events(job_id) == COMPLETED
        assert len(side.received(job_id)) == 1


@pytest.mark.parametrize("meanwhile", ["due later", "deleted", "cancelled", "completed"])
def test_c03_a_row_that_moves_between_receipt_and_claim(one: runtime.Bridge, side: Side, meanwhile: str) -> None:
    job_id = side.insert("plain", status="scheduled")
    ticket = side.ticket(job_id)
    side.conn.execute(
        {
            "due later": "UPDATE job SET scheduled_at = scheduled_at + interval '1 minute'",
            "deleted": "DELETE FROM job",
            "cancelled": "UPDATE job SET status = 'cancelled'",
            "completed": "UPDATE job SET status = 'completed'",
        }[meanwhile]
    )
    before = side.rows("SELECT * FROM job")
    if meanwhile == "deleted":
        verdict = one.runner.run(
            Ticket.parse(ticket),
            Run(new_id(), "here"),
            one.submission.definition("plain"),
        )
        assert verdict.status is None
    else:
        verdict = run_here(one, side, job_id, ticket)
    assert not verdict.ran
    assert side.rows("SELECT * FROM job") == before
    assert side.received(job_id) == []


@pytest.mark.parametrize("whom", ["the group", "a child"])
def test_c10_a_stop_signal_that_reaches_the_children(stack: Stack, side: Side, tmp_path: Path, whom: str) -> None:
    worker = stack.worker(concurrency=1)
    job_id = side.insert("held", params={"until": str(tmp_path / "go")})
    until(lambda: side.received(job_id), what=lambda: worker.tail)
    (child,) = worker.children()
    if whom == "the group":
        for pid in (worker.popen.pid, child):
            os.kill(pid, signal.SIGTERM)
    else:
        os.kill(child, signal.SIGTERM)
    until(lambda: side.status(job_id) not in ("running", "scheduled"), what=lambda: worker.tail)
    assert side.status(job_id) == "aborted", worker.tail
    assert side.row(job_id)["error"]["code"] == "worker-lost"
    if whom == "a child":
        after = side.insert("plain")
        until(lambda: side.status(after) == "completed", what=lambda: worker.tail)
    else:
        assert worker.popen.wait(60) == 0


def test_c19_a_listener_that_dies_costs_a_poll_and_listens_again(stack: Stack, side: Side) -> None:
    worker = stack.worker()
    listener = "FROM pg_stat_activity WHERE application_name = 'bridge-listener' AND datname = current_database()"
    for _ in range(3):
        until(lambda: side.rows(f"SELECT 1 {listener}"), what=lambda: worker.tail)
        side.rows(f"SELECT pg_terminate_backend(pid) {listener}")
        job_id = side.insert("plain")
        until(lambda job_id=job_id: side.status(job_id) == "completed", what=lambda: worker.tail)
    worker.says("listening again")


def test_c20_sweeps_cancels_and_submits_do_not_deadlock(app: Celery, stack: Stack, side: Side) -> None:
    name = side.conn.info.dbname
    side.conn.execute(f"ALTER DATABASE {name} SET deadlock_timeout TO '50ms'")
    workers = [stack.worker(BRIDGE_LEASE="2s", BRIDGE_LOST_AFTER="2s") for _ in range(2)]
    ids = bridge.submit_many("quick", [{} for _ in range(600)])
    for job_id in ids[::7]:
        bridge.cancel(job_id, running=True)
    for n in range(50):
        bridge.submit("quick", {}, unique_key=str(n % 5), on_conflict="replace") if n % 2 else bridge.submit(
            "quick", {}, delay=60_000, dedupe=True
        )
    until(lambda: set(side.counts()) <= {"completed", "cancelled", "new"}, seconds=60, what=lambda: workers[0].tail)
    until(lambda: side.counts().get("new") == 1, seconds=60, what=lambda: f"{side.counts()}")  # the deduped one
    assert side.rows("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == [{"deadlocks": 0}]


def test_c21_no_transaction_is_open_while_a_handler_runs(stack: Stack, side: Side, tmp_path: Path) -> None:
    worker = stack.worker()
    job_id = side.insert("held", params={"until": str(tmp_path / "go")})
    until(lambda: side.received(job_id), what=lambda: worker.tail)
    old = (
        "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'bridge%%' "
        "AND xact_start < clock_timestamp() - interval '1 second'"
    )
    stays(lambda: not side.rows(old), seconds=3)
    side.conn.execute("SET lock_timeout = '2s'")
    side.conn.execute("ALTER TABLE job ADD COLUMN more integer")
    (tmp_path / "go").touch()
    until(lambda: side.status(job_id) == "completed", what=lambda: worker.tail)


def test_c24_a_soft_limit_inside_a_statement_of_the_handler(stack: Stack, side: Side) -> None:
    worker = stack.worker(concurrency=1)
    job_id = side.insert("waits-in-sql", max_retries=0)
    until(lambda: side.status(job_id) == "failed", what=lambda: worker.tail)
    assert side.row(job_id)["error"]["code"] == "timeout"
    after = side.insert("plain")
    until(lambda: side.status(after) == "completed", what=lambda: worker.tail)


def test_c25_whatever_a_handler_raises_is_told_and_the_worker_lives(stack: Stack, side: Side) -> None:
    worker = stack.worker(concurrency=1)
    (child,) = worker.children()
    kinds = [*anything(), "recursion"]
    jobs = {what: side.insert("raises-anything", params={"what": what}, max_retries=1) for what in kinds}
    until(lambda: side.counts() == {"failed": len(jobs)}, seconds=60, what=lambda: f"{side.counts()}\n{worker.tail}")
    for what, job_id in jobs.items():
        row = side.row(job_id)
        assert row["error"]["type"] == "internal", what
        assert 0 < len(row["error"]["hint"]) < 10_000, what
        assert row["retry_num"] == 1, what
        assert len(side.received(job_id)) == 2 or what == "recursion", what
    assert {what: side.row(jobs[what])["error"]["ex_type"] for what in ("stubborn", "local", "below", "exit")} == {
        "stubborn": "Stubborn",
        "local": "Local",
        "below": "Below",
        "exit": "SystemExit",
    }
    assert worker.children() == [child], "not one of them ended its process"


def test_c30_each_attempt_sees_the_original_params_and_options(stack: Stack, side: Side) -> None:
    worker = stack.worker()
    params = {"list": [1, {"two": 2}]}
    job_id = side.insert("changes-its-params", params=params, label="mine", max_retries=3)
    until(lambda: side.status(job_id) == "failed", what=lambda: worker.tail)
    calls = side.received(job_id)
    assert [call["params"] for call in calls] == [repr(params)] * 4
    assert {call["context"]["label"] for call in calls} == {"mine"}
    assert [said["attempt"] for kind, said in side.events(job_id) if kind == "start"] == [1, 2, 3, 4]
    assert side.row(job_id)["params"] == params


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/St_Johns"])
def test_c33_no_zone_of_a_process_or_the_database_moves_a_due_time(stack: Stack, side: Side, zone: str) -> None:
    side.conn.execute(f"ALTER DATABASE {side.conn.info.dbname} SET TimeZone TO 'Pacific/Chatham'")
    program = (
        "import bridge, tests.jobs, datetime as d\n"
        "bridge.submit('plain', {}, delay=1500)\n"
        "bridge.submit('plain', {}, delay=3_600_000)\n"
    )
    producer = stack.start(["-c", program], TZ=zone, PGTZ="Europe/London")
    assert producer.popen.wait(30) == 0, producer.log
    worker = stack.worker(TZ=zone)
    until(lambda: side.counts() == {"completed": 1, "new": 1}, what=lambda: worker.tail)
    (row,) = side.rows("SELECT started_at - created_at AS wait FROM job WHERE status = 'completed'")
    assert row["wait"] >= timedelta(milliseconds=1500)


def test_c35_a_higher_priority_waits_for_what_is_reserved_only(stack: Stack, side: Side, tmp_path: Path) -> None:
    worker = stack.worker(concurrency=1, BRIDGE_WINDOW="1")
    held = side.insert("held", params={"until": str(tmp_path / "go")})
    until(lambda: side.status(held) == "running", what=lambda: worker.tail)
    low = [side.insert("plain", priority=1) for _ in range(10)]
    until(lambda: side.counts().get("scheduled") == 1)
    high = side.insert("plain", priority=200)
    (tmp_path / "go").touch()
    until(lambda: side.counts() == {"completed": 12}, what=lambda: worker.tail)
    order = [row["id"] for row in side.rows("SELECT id FROM job ORDER BY started_at")]
    assert order.index(high) <= 2, "after the running one and the one that was handed over"
    assert sorted(order[1:]) == sorted([*low, high])


def test_c38_children_that_are_recycled_leave_nothing_open(stack: Stack, side: Side) -> None:
    worker = stack.worker("--max-tasks-per-child", "5", concurrency=2)
    for _ in range(60):
        side.insert("plain")
    until(lambda: side.counts() == {"completed": 60}, seconds=60, what=lambda: f"{side.counts()}\n{worker.tail}")
    assert len(side.rows("SELECT FROM received")) == 60


@pytest.mark.parametrize("how", ["full memory", "read-only"])
def test_c39_a_broker_that_refuses_costs_time(own: tuple[Servers, Stack], how: str) -> None:
    servers, stack = own
    worker = stack.worker()
    with psycopg.connect(servers.database_url, autocommit=True) as conn:
        side = Side(conn)
        commands: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
            "full memory": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
            "read-only": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        }
        refuse, allow = commands[how]
        with Celery("ctl", broker=servers.broker_url, set_as_current=False).connection_for_write() as connection:
            client: Any = connection.channel().client
            client.execute_command(*refuse)
            ids = [side.insert("plain") for _ in range(20)]
            worker.says("queue test cannot be published")
            assert side.counts() == {"new": 20}
            client.execute_command(*allow)
        until(lambda: side.counts() == {"completed": 20}, seconds=60, what=lambda: f"{side.counts()}\n{worker.tail}")
        for job_id in ids:
            assert side.events(job_id) == COMPLETED
            assert len(side.received(job_id)) == 1
    assert worker.popen.poll() is None


def test_c41_far_jobs_stay_in_the_table(stack: Stack, side: Side) -> None:
    side.conn.execute(
        "INSERT INTO job (name, queue, scheduled_at) "
        "SELECT 'quick', 'test', now() + interval '1 hour' + n * interval '1 second' FROM generate_series(1, 20000) n"
    )
    worker = stack.worker()
    for _ in range(100):
        side.insert("quick")
    until(lambda: side.counts() == {"completed": 100, "new": 20000}, what=lambda: worker.tail)
    assert depth(stack.broker_url, "test") == 0
