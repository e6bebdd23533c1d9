"""Celery's own events say what the row says: what Flower would show, read as Flower reads it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
from celery import Celery
from celery.events.state import State
from psycopg import Connection

from tests.support import Side, Stack, send, until


@pytest.fixture
def monitor(broker_url: str) -> Iterator[State]:
    """Celery's in-memory view of the cluster, fed by the events on the broker."""
    app = Celery("monitor", broker=broker_url, set_as_current=False)
    state = State()
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": state.event})
        # One subscription for the whole test: what is published between two would be lost, as Redis does not keep it.
        thread = threading.Thread(target=lambda: receiver.capture(limit=None, timeout=None, wakeup=False))
        thread.start()
        yield state
        receiver.should_stop = True
        thread.join()


def shown(state: State, job_id: object) -> str | None:
    task = state.tasks.get(str(job_id))
    return None if task is None else task.state


def test_c45_celery_shows_what_the_row_says(stack: Stack, side: Side, monitor: State) -> None:
    worker = stack.worker()
    expected = {
        side.insert("plain"): "SUCCESS",
        side.insert("raises", params={"what": "ValueError"}, max_retries=0): "FAILURE",
        side.insert("again", params={"delay": 3_600_000}): "RETRY",
        side.insert("limited", max_retries=0): "FAILURE",
        side.insert("dies", params={"how": signal.SIGKILL}): "REVOKED",
        side.insert("aborts-itself"): "REVOKED",
    }
    for job_id, state in expected.items():
        until(
            lambda job_id=job_id, state=state: shown(monitor, job_id) == state,
            what=lambda job_id=job_id: f"{side.row(job_id)['name']}: {shown(monitor, job_id)}\n{worker.tail}",
        )


def test_a_skipped_message_sends_the_rows_terminal_state_and_otherwise_nothing(
    stack: Stack, side: Side, monitor: State
) -> None:
    worker = stack.worker(BRIDGE_DISPATCHER="standalone")
    cancelled, rescheduled = side.insert("plain", status="cancelled"), side.insert("plain")
    old = side.ticket(rescheduled)
    side.conn.execute("UPDATE job SET scheduled_at = scheduled_at + interval '1 hour' WHERE id = %s", (rescheduled,))
    send(stack.broker_url, "plain", old)
    send(stack.broker_url, "plain", side.ticket(cancelled))
    until(lambda: shown(monitor, cancelled) == "REVOKED", what=lambda: worker.tail)
    assert shown(monitor, rescheduled) in ("RECEIVED", "STARTED"), "nothing is claimed about a row that lives on"


def test_an_operators_cancel_and_an_orphan_are_shown_too(
    stack: Stack, side: Side, conn: Connection, monitor: State
) -> None:
    stack.worker(BRIDGE_LEASE="3s")
    waiting = side.insert("again", params={"delay": 3_600_000})
    until(lambda: shown(monitor, waiting) == "RETRY")
    orphan = side.insert("plain", status="running")
    conn.execute("UPDATE job SET lease_until = now() - interval '1 second' WHERE id = %s", (orphan,))
    until(lambda: side.status(orphan) == "aborted")
    cancel = stack.start(["-c", f"import bridge, tests.jobs; raise SystemExit(1 - bridge.cancel('{waiting}'))"])
    assert cancel.popen.wait(20) == 0, cancel.log
    until(lambda: shown(monitor, waiting) == "REVOKED")
    until(lambda: shown(monitor, orphan) == "REVOKED")


def test_t8_a_lost_run_that_runs_again_is_shown_as_retried_then_as_it_ends(
    stack: Stack, side: Side, monitor: State
) -> None:
    stack.worker()
    job_id = side.insert("lost-again", max_retries=1)
    until(lambda: side.status(job_id) == "aborted")
    until(lambda: shown(monitor, job_id) == "REVOKED")
    assert monitor.tasks[str(job_id)].retried is not None
