"""Real workers: `celery -A bridge worker` on every pool, with its own dispatcher, on real servers."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from celery import Celery

import bridge
from tests.support import Side, Stack, depth, send, stays, until

ABORTED_LOST = {"type": "internal", "code": "worker-lost", "ex_type": "worker-lost"}


def without_hint(error: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in error.items() if key != "hint"}


@pytest.mark.parametrize("events", ["tests.configuration", "tests.quiet"], ids=["events", "no-events"])
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_row_goes_through_celery_and_back(stack: Stack, side: Side, pool: str, events: str) -> None:
    worker = stack.worker(pool=pool, concurrency=1 if pool == "solo" else 2, CELERY_CONFIG_MODULE=events)
    ok = side.insert("plain", params={"n": 1})
    twice = side.insert("flaky", params={"times": 2})
    bad = side.insert("raises", params={"what": "ValueError"}, max_retries=0)
    memory = side.insert("raises", params={"what": "MemoryError"}, max_retries=0)
    leaves = side.insert("raises", params={"what": "SystemExit"}, max_retries=0)
    progress = side.insert("reports", params={"times": 3, "force": True})
    many = [side.insert("quick") for _ in range(20)]
    until(lambda: set(side.counts()) <= {"completed", "failed"}, what=lambda: worker.tail)
    assert {side.status(job_id) for job_id in (ok, twice, progress, *many)} == {"completed"}
    assert side.row(ok)["result"] == {"n": 1}
    assert [side.row(job_id)["error"]["ex_type"] for job_id in (bad, memory, leaves)] == [
        "ValueError",
        "MemoryError",
        "SystemExit",
    ]
    assert side.events(twice) == [
        ("start", {"attempt": 1}),
        ("retry", {"attempt": 2, "reason": "backoff"}),
        ("start", {"attempt": 2}),
        ("retry", {"attempt": 3, "reason": "backoff"}),
        ("start", {"attempt": 3}),
        ("end", {"outcome": "completed"}),
    ]
    assert len(side.rows("SELECT FROM job_event WHERE kind = 'progress' AND job_id = %s", progress)) == 3
    assert {row["actor"] for row in side.rows("SELECT actor FROM job_event")} == {worker.node}
    assert worker.popen.poll() is None, "SystemExit and MemoryError are the job's, not the worker's"
    assert worker.end() == 0
    assert depth(stack.broker_url, "test") == 0


def test_a_submit_wakes_the_dispatcher_and_a_due_time_does(app: Celery, stack: Stack, side: Side) -> None:
    """With a poll interval of ten minutes, only these two can start a job. How fast: benchmarks/latency.py."""
    stack.worker(BRIDGE_POLL_INTERVAL="10m", BRIDGE_LEASE="2h")
    until(lambda: side.rows("SELECT FROM bridge_dispatcher WHERE asleep"), what="the dispatcher sleeps")
    job_id = bridge.submit("plain", {})
    until(lambda: side.status(job_id) == "completed")
    later = bridge.submit("plain", {}, delay=2000)
    until(lambda: side.status(later) == "completed")
    row = side.row(later)
    assert row["started_at"] >= row["scheduled_at"]


def test_a_handler_that_calls_the_decorated_object_gets_the_plain_handler(stack: Stack, side: Side) -> None:
    stack.worker(concurrency=1)
    job_id = side.insert("calls-another")
    until(lambda: side.status(job_id) == "completed")
    assert side.row(job_id)["result"] == [{"called": "directly"}, "inner"]
    assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]


def test_without_q_a_worker_consumes_default_and_the_queue_of_every_job(stack: Stack, side: Side) -> None:
    command = ["-m", "celery", "-A", "bridge", "worker", "-c", "1", "-l", "info", "--without-mingle"]
    worker = stack.start(command)
    worker.says(" ready.")
    ids = [side.insert("plain", queue=queue) for queue in ("default", "test")]
    until(lambda: {side.status(job_id) for job_id in ids} == {"completed"}, what=lambda: worker.tail)


def test_without_q_a_tenants_worker_leaves_the_queues_of_others_and_what_x_excludes(stack: Stack, side: Side) -> None:
    """Celery's default queue is one for all tenants: a worker that consumed it would swallow the default tenant's."""
    command = ["-m", "celery", "-A", "bridge", "worker", "-c", "1", "-l", "info", "--without-mingle"]
    worker = stack.start([*command, "-X", "acme.test"], BRIDGE_TENANT="acme")
    worker.says(" ready.")
    stack.dispatcher()
    ids = [side.insert("plain", queue="default"), side.insert("plain", tenant="acme")]
    mine = side.insert("plain", tenant="acme", queue="default")
    until(lambda: side.status(mine) == "completed", what=lambda: worker.tail)
    until(lambda: {side.status(job_id) for job_id in ids} == {"scheduled"})
    stays(lambda: depth(stack.broker_url, "default") == depth(stack.broker_url, "acme.test") == 1, seconds=1.5)


def test_a_tenants_rows_are_its_own(stack: Stack, side: Side) -> None:
    worker = stack.worker("-Q", "acme.test", BRIDGE_TENANT="acme")
    theirs, mine = side.insert("plain"), side.insert("plain", tenant="acme")
    until(lambda: side.status(mine) == "completed", what=lambda: worker.tail)
    assert side.status(theirs) == "new"
    send(stack.broker_url, "plain", side.ticket(theirs), queue="acme.test")
    worker.says(f"job {theirs}: ticket of")
    assert side.status(theirs) == "new", "a forged ticket does not reach another tenant"


def test_c42_an_unknown_job_can_wait_for_a_worker_that_knows_it(stack: Stack, side: Side) -> None:
    worker = stack.worker(BRIDGE_UNKNOWN_JOB="defer")
    job_id = side.insert("of-the-next-release")
    until(lambda: side.row(job_id)["scheduled_at"] - side.row(job_id)["created_at"] > timedelta(seconds=9))
    row = side.row(job_id)
    assert (row["status"], row["retry_num"], row["started_at"]) == ("new", 0, None)
    assert side.events(job_id) == []
    worker.says("unknown here; put off")


@pytest.mark.parametrize("how", ["exit", signal.SIGKILL, signal.SIGSEGV], ids=["os._exit", "SIGKILL", "SIGSEGV"])
def test_c05_a_dead_child_ends_its_run_at_once(stack: Stack, side: Side, how: object) -> None:
    worker = stack.worker()
    job_id = side.insert("dies", params={"how": how})
    until(lambda: side.status(job_id) == "aborted", seconds=15, what=lambda: worker.tail)
    assert without_hint(side.row(job_id)["error"]) == ABORTED_LOST
    assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "aborted"})]
    after = side.insert("plain")
    until(lambda: side.status(after) == "completed", what="the worker goes on")


def test_c06_a_poison_job_that_may_run_again_does_so_within_its_budget(stack: Stack, side: Side) -> None:
    stack.worker()
    job_id = side.insert("lost-again", max_retries=1)
    others = [side.insert("quick") for _ in range(20)]
    until(lambda: side.status(job_id) == "aborted", seconds=30)
    assert side.events(job_id) == [
        ("start", {"attempt": 1}),
        ("retry", {"attempt": 2, "reason": "lost"}),
        ("start", {"attempt": 2}),
        ("end", {"outcome": "aborted"}),
    ]
    until(lambda: {side.status(each) for each in others} == {"completed"})


def test_t1_memory_that_runs_out_in_the_bookkeeping_ends_the_run_and_not_the_worker(stack: Stack, side: Side) -> None:
    """Params of 13 MB in a child that has 20 MB left: the claim's answer does not fit."""
    worker = stack.worker(concurrency=1)
    starved = side.insert("starves")
    until(lambda: side.status(starved) == "completed")
    row = side.conn.execute(
        "INSERT INTO job (name, queue, params, max_retries) SELECT 'plain', 'test', jsonb_build_object('x', "
        "string_agg(md5(g::text), '')), 0 FROM generate_series(1, 400000) AS g RETURNING id"
    ).fetchone()
    assert row is not None
    until(
        lambda: side.status(row[0]) in ("aborted", "failed"), what=lambda: f"{side.row(row[0])['status']} {worker.tail}"
    )
    assert worker.popen.poll() is None
    assert side.events(row[0])[-1][0] == "end"


def test_a_row_that_names_a_task_which_is_no_job_does_not_run_it(stack: Stack, side: Side) -> None:
    worker = stack.worker()
    job_id = side.insert("celery.backend_cleanup")
    until(lambda: side.status(job_id) == "failed", what=lambda: worker.tail)
    assert side.row(job_id)["error"]["ex_type"] == "not-found"
    assert "Task celery.backend_cleanup" not in worker.log


FORGED = {
    "timelimit that is a number": {"timelimit": 5},
    "timelimit of text": {"timelimit": ["a", "b"]},
    "timelimit of one": {"timelimit": [None]},
    "stamps that are a number": {"stamped_headers": 5},
    "task that is a list": {"task": ["x"]},
    "task that is an object": {"task": {}},
    "retries that are text": {"retries": "many"},
    "an eta": {"eta": "2099-01-01T00:00:00+00:00"},
    "an expiry in the past": {"expires": "2000-01-01T00:00:00+00:00"},
}


def test_t2_forged_headers_neither_end_the_worker_nor_change_the_job(stack: Stack, side: Side) -> None:
    worker = stack.worker(concurrency=1, BRIDGE_DISPATCHER="standalone")
    for headers in FORGED.values():
        job_id = side.insert("plain")
        send(stack.broker_url, "plain", side.ticket(job_id), headers=headers)
        if "task" not in headers:
            until(lambda job_id=job_id: side.status(job_id) == "completed", what=lambda: worker.tail)
    job_id = side.insert("plain")
    after = {"callbacks": [{"task": "plain", "args": [], "kwargs": {}, "options": {}}]}
    send(stack.broker_url, "plain", side.ticket(job_id), embed=after)
    until(lambda: "more than a ticket" in worker.log, what=lambda: worker.tail)
    send(stack.broker_url, "plain", side.ticket(job_id))
    until(lambda: side.status(job_id) == "completed", what=lambda: worker.tail)
    assert worker.end() == 0


def test_a_job_that_cannot_be_one_ends_the_worker_with_one_sentence(stack: Stack) -> None:
    (stack.folder / "adopted.py").write_text(
        "import bridge, celery\napp = bridge.install(celery.Celery('adopted', set_as_current=False))\n"
        "@app.task(base=bridge.JobTask, name='endless', max_retries=None)\ndef endless(context, params): pass\n"
    )
    process = stack.start(["-m", "celery", "-A", "adopted", "worker", "-c", "1"])
    assert process.popen.wait(30) == 1
    assert "bridge: Job 'endless': max_retries is a whole number" in process.log
    assert "Traceback" not in process.log


def test_c23_a_hard_time_limit_is_a_failure_of_the_job(stack: Stack, side: Side) -> None:
    worker = stack.worker()
    hard = side.insert("limited", max_retries=0)
    soft = side.insert("soft-limited", max_retries=0)
    until(lambda: {side.status(hard), side.status(soft)} == {"failed"}, what=lambda: worker.tail)
    assert side.row(hard)["error"] == {
        "type": "internal",
        "code": "timeout",
        "ex_type": "timeout",
        "hint": "hard time limit of 2 s exceeded",
    }
    assert side.row(soft)["error"]["code"] == "timeout"
    assert side.events(hard) == [("start", {"attempt": 1}), ("end", {"outcome": "failed"})]


def test_c24_a_soft_limit_does_not_hit_the_bookkeeping(stack: Stack, side: Side) -> None:
    """The handler ends in time; its outcome takes longer than the limit to be written."""
    side.conn.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(2); RETURN NEW; END $$;"
        "CREATE TRIGGER slow BEFORE INSERT ON job_event FOR EACH ROW WHEN (NEW.kind = 'end') EXECUTE FUNCTION slow()"
    )
    worker = stack.worker(concurrency=1)
    in_time = side.insert("soft-limited", params={"stop": True})
    until(lambda: side.status(in_time) == "completed", what=lambda: worker.tail)
    side.conn.execute("DROP TRIGGER slow ON job_event")
    after = [side.insert("naps", params={"seconds": 1}) for _ in range(2)]
    until(lambda: {side.status(each) for each in after} == {"completed"}, what=lambda: worker.tail)
    too_long = side.insert("soft-limited", max_retries=0)
    until(lambda: side.status(too_long) == "failed")
    assert side.row(too_long)["error"]["code"] == "timeout"


def test_a_second_delivery_whose_child_is_killed_leaves_the_first_run_alone(
    stack: Stack, side: Side, tmp_path: Path
) -> None:
    """Two workers, one ticket delivered twice; the second's child is stopped on the row's lock and killed."""
    first = stack.worker(concurrency=1, BRIDGE_DISPATCHER="standalone")
    job_id = side.insert("held", params={"until": str(tmp_path / "go")})
    ticket = side.ticket(job_id)
    send(stack.broker_url, "held", ticket)
    until(lambda: side.status(job_id) == "running" and side.received(job_id))
    run_id = side.row(job_id)["run_id"]
    second = stack.worker(concurrency=1, BRIDGE_DISPATCHER="standalone")
    # Both the claim of the second delivery and the keeper's close must find the row as the first run has it.
    with psycopg.connect(stack.database_url) as locker:
        locker.execute("LOCK TABLE job IN SHARE ROW EXCLUSIVE MODE")  # claims wait, reads do not
        send(stack.broker_url, "held", ticket)
        waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%-- claim%%'"
        until(lambda: side.rows(waiting), what=lambda: second.tail)
        (child,) = second.children()  # the first worker has no room: its one message is not acknowledged
        os.kill(child, signal.SIGKILL)
        second.says("Process 'ForkPoolWorker-1'")
    stays(lambda: side.row(job_id)["run_id"] == run_id and side.status(job_id) == "running", seconds=1.5)
    (tmp_path / "go").touch()
    until(lambda: side.status(job_id) == "completed", what=lambda: first.tail)
    assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]
    assert len(side.received(job_id)) == 1


def test_a_child_killed_before_its_claim_gives_the_row_back_at_once(stack: Stack, side: Side) -> None:
    """Its claim waits for a lock; the server gives it up together with the child."""
    worker = stack.worker(concurrency=1, BRIDGE_DISPATCHER="standalone")
    job_id = side.insert("plain", status="scheduled")
    with psycopg.connect(stack.database_url) as locker:
        locker.execute("LOCK TABLE job IN SHARE ROW EXCLUSIVE MODE")  # claims wait, reads do not
        send(stack.broker_url, "plain", side.ticket(job_id))
        claim = "FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%-- claim%%'"
        until(lambda: side.rows(f"SELECT pid {claim}"), what=lambda: worker.tail)
        (child,) = worker.children()
        os.kill(child, signal.SIGKILL)
        side.rows(f"SELECT pg_terminate_backend(pid) {claim}")  # or it would be carried out for nobody
        until(lambda: not side.rows(f"SELECT pid {claim}"))
        worker.says("exited with")
    until(lambda: side.status(job_id) == "new", what=lambda: worker.tail)
    stack.dispatcher()
    until(lambda: side.status(job_id) == "completed", what=lambda: worker.tail)
    assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]


def test_workers_that_do_not_dispatch_and_a_dispatcher_that_does(stack: Stack, side: Side) -> None:
    """Workers that do not dispatch, and one dispatcher that does."""
    stack.worker(BRIDGE_DISPATCHER="standalone")
    job_id = side.insert("plain")
    stays(lambda: side.status(job_id) == "new", seconds=1.5)
    dispatcher = stack.dispatcher()
    until(lambda: side.status(job_id) == "completed", what=lambda: dispatcher.tail)
    assert dispatcher.end() == 0
    assert side.rows("SELECT FROM bridge_dispatcher") == []


def test_dispatcher_once_hands_over_what_is_due_and_ends(stack: Stack, side: Side) -> None:
    ids = [side.insert("plain") for _ in range(250)]
    process = stack.start(["-m", "bridge", "dispatcher", "--once"])
    assert process.popen.wait(30) == 0, process.log
    assert {side.status(job_id) for job_id in ids} == {"scheduled"}
    assert depth(stack.broker_url, "test") == 250


def test_bad_settings_end_the_worker_with_one_sentence(stack: Stack) -> None:
    for name, value in (("BRIDGE_LEASE", "soon"), ("BRIDGE_TENANT", "a.b")):
        command = ["-m", "celery", "-A", "bridge", "worker", "-c", "1"]
        process = stack.start(command, **{name: value})
        assert process.popen.wait(30) == 1
        assert f"bridge: {name}:" in process.log
        assert "Traceback" not in process.log


def test_c11_celerys_revoke_is_a_cancel_of_the_row(app: Celery, stack: Stack, side: Side, tmp_path: Path) -> None:
    worker = stack.worker(concurrency=1)
    busy = side.insert("held", params={"until": str(tmp_path / "go")})
    until(lambda: side.status(busy) == "running")
    behind = side.insert("plain")
    until(lambda: side.status(behind) == "scheduled")
    with Celery("ctl", broker=stack.broker_url, set_as_current=False) as control:
        control.control.revoke(str(behind))
    worker.says("flagged as revoked")
    (tmp_path / "go").touch()
    until(lambda: side.status(behind) == "cancelled", what=lambda: worker.tail)
    until(lambda: side.status(busy) == "completed")
    assert side.events(behind) == [("end", {"outcome": "cancelled"})]
    assert side.received(behind) == []


def test_c11_revoke_with_terminate_cancels_the_running_row(stack: Stack, side: Side) -> None:
    worker = stack.worker(concurrency=1)
    job_id = side.insert("naps", params={"seconds": 30})
    until(lambda: side.status(job_id) == "running")
    with Celery("ctl", broker=stack.broker_url, set_as_current=False) as control:
        control.control.revoke(str(job_id), terminate=True)
    until(lambda: side.status(job_id) == "cancelled", what=lambda: worker.tail)
    assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "cancelled"})]
    after = side.insert("plain")
    until(lambda: side.status(after) == "completed")
