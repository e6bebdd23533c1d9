"""finish: a job's effects and its completion commit together, or not at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery
from psycopg.conninfo import make_conninfo

import bridge
from bridge import ledger, runtime
from bridge.errors import DatabaseUnavailable, EncodingError, Interrupted, InvalidJob
from bridge.lifecycle import Status
from bridge.records import Run, Ticket, new_id
from bridge.runner import Verdict
from tests.support import Side, Stack, stays, until

COMPLETED = [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]
Handler = Callable[[psycopg.Connection], object]


@pytest.fixture
def play(one: runtime.Bridge, side: Side, database_url: str) -> Callable[..., tuple[dict[str, Any], Verdict]]:
    """Runs a body as a job's handler in this process, on a connection of its own that commits in the end."""
    side.conn.execute("CREATE TABLE effect (what text)")

    def play(body: Handler, **columns: Any) -> tuple[dict[str, Any], Verdict]:
        def handler(context: bridge.Context, params: dict[str, Any]) -> object:
            with psycopg.connect(database_url) as conn:
                conn.execute("INSERT INTO effect VALUES ('there')")
                return body(conn)

        bridge.job("books", queue="test", max_retries=1)(handler)
        job_id = side.insert("books", **columns)
        with runtime.running(one):
            definition = one.submission.definition("books")
            verdict = one.runner.run(Ticket.parse(side.ticket(job_id)), Run(new_id(), "here"), definition)
        return side.row(job_id), verdict

    return play


@pytest.fixture
def effects(side: Side) -> Callable[[], int]:
    """How many effects were committed."""
    return lambda: len(side.rows("SELECT FROM effect"))


def test_effects_and_completion_commit_together(play: Any, side: Side, effects: Any) -> None:
    resource = new_id()

    def body(conn: psycopg.Connection) -> str:
        bridge.finish(conn, {"booked": 1}, resource_id=resource)
        assert (effects(), len(side.rows("SELECT FROM job WHERE status = 'running'"))) == (0, 1)
        return "ignored"

    row, verdict = play(body)
    assert (row["status"], row["result"], row["resource_id"], effects()) == ("completed", {"booked": 1}, resource, 1)
    assert verdict == Verdict(Status.COMPLETED, True)
    assert side.events(row["id"]) == COMPLETED


def lose(side: Side, how: str) -> None:
    """The row goes to somebody else while the handler runs."""
    if how == "cancelled":
        assert bridge.cancel(side.rows("SELECT id FROM job")[0]["id"], running=True) == 1
    else:
        side.conn.execute("UPDATE job SET run_id = gen_random_uuid()")


@pytest.mark.parametrize("how", ["cancelled", "another run"])
@pytest.mark.parametrize("swallow", [False, True], ids=["raises", "swallows"])
@pytest.mark.parametrize("savepoint", [False, True], ids=["plain", "in a savepoint"])
def test_a_lost_run_leaves_no_effect_behind(
    play: Any, side: Side, effects: Any, how: str, swallow: bool, savepoint: bool
) -> None:
    def body(conn: psycopg.Connection) -> str:
        lose(side, how)
        try:
            if savepoint:
                with conn.transaction():
                    bridge.finish(conn)
            else:
                bridge.finish(conn)
        except Interrupted:
            if not swallow:
                raise
        with suppress(psycopg.Error):
            conn.execute("INSERT INTO effect VALUES ('after')")
        return "done"

    row, _ = play(body)
    assert effects() == 0
    assert row["status"] == ("cancelled" if how == "cancelled" else "running")
    assert [kind for kind, _ in side.events(row["id"])] == (["start", "end"] if how == "cancelled" else ["start"])


def rolled_back(conn: psycopg.Connection) -> None:
    bridge.finish(conn)
    conn.rollback()


def rolled_back_to_a_savepoint(conn: psycopg.Connection) -> None:
    with conn.transaction():
        bridge.finish(conn)
        raise psycopg.Rollback


def raised(conn: psycopg.Connection) -> None:
    bridge.finish(conn)
    raise ValueError("and then this")


NOT_COMMITTED = {
    "rolled back": (rolled_back, "finish was called, and its transaction was not committed"),
    "rolled back to a savepoint": (
        rolled_back_to_a_savepoint,
        "finish was called, and its transaction was not committed",
    ),
    "raised": (raised, "and then this"),
}


@pytest.mark.parametrize(("body", "hint"), NOT_COMMITTED.values(), ids=NOT_COMMITTED.keys())
def test_a_finish_that_was_not_committed_is_an_error_of_the_handler(play: Any, body: Handler, hint: str) -> None:
    row, _ = play(body)
    assert (row["status"], row["retry_num"], row["result"]) == ("retry", 1, None)
    assert row["error"]["hint"] == hint


def test_a_transaction_that_the_handler_left_open_is_rolled_back(
    play: Any, side: Side, effects: Any, database_url: str
) -> None:
    left: list[psycopg.Connection] = []

    def body(_: psycopg.Connection) -> str:
        conn = psycopg.connect(database_url)
        left.append(conn)
        conn.execute("INSERT INTO effect VALUES ('left open')")
        bridge.finish(conn)
        return "done"

    row, _ = play(body)
    assert (row["status"], row["error"]["ex_type"]) == ("retry", "Unfinished")
    left[0].commit()
    left[0].close()
    assert side.rows("SELECT what FROM effect") == [{"what": "there"}]


def test_what_is_raised_after_the_commit_changes_nothing(play: Any, side: Side) -> None:
    def body(conn: psycopg.Connection) -> None:
        bridge.finish(conn, "done")
        conn.commit()
        raise ValueError("too late")

    row, verdict = play(body)
    assert (row["status"], row["result"], row["error"]) == ("completed", "done", None)
    assert verdict.status is Status.COMPLETED
    assert side.events(row["id"]) == COMPLETED


REFUSED: dict[str, tuple[Callable[[psycopg.Connection], object], type[Exception], str]] = {
    "autocommit": (lambda conn: in_autocommit(conn), InvalidJob, "autocommit"),
    "repeatable read": (
        lambda conn: isolated(conn, 3),
        InvalidJob,
        "READ COMMITTED transaction, this one is repeatable",
    ),
    "serializable": (
        lambda conn: isolated(conn, 4),
        InvalidJob,
        "READ COMMITTED transaction, this one is serializable",
    ),
    "no connection": (lambda _: bridge.finish("postgresql://"), TypeError, "psycopg.Connection"),
    "no resource": (lambda conn: bridge.finish(conn, resource_id="me"), InvalidJob, "resource_id is not a uuid"),
    "no JSON": (lambda conn: bridge.finish(conn, float("nan")), EncodingError, "NaN"),
}


def in_autocommit(conn: psycopg.Connection) -> None:
    conn.rollback()
    conn.autocommit = True
    bridge.finish(conn)


def isolated(conn: psycopg.Connection, level: int) -> None:
    conn.rollback()
    conn.isolation_level = psycopg.IsolationLevel(level)
    bridge.finish(conn)


@pytest.mark.parametrize(("call", "kind", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_a_finish_that_cannot_be_one_is_refused_and_the_handler_goes_on(
    play: Any, call: Handler, kind: type[Exception], sentence: str
) -> None:
    def body(conn: psycopg.Connection) -> str:
        with pytest.raises(kind, match=sentence):
            call(conn)
        return "went on"

    row, _ = play(body)
    assert (row["status"], row["result"]) == ("completed", "went on")


def test_a_second_resource_is_refused(play: Any) -> None:
    first = new_id()

    def body(conn: psycopg.Connection) -> str:
        with pytest.raises(InvalidJob, match="already has a resource"):
            bridge.finish(conn, resource_id=new_id())
        return "went on"

    row, _ = play(body, resource_id=first)
    assert (row["status"], row["resource_id"]) == ("completed", first)


def test_while_it_is_uncommitted_nobody_waits_and_nobody_ends_the_run(
    play: Any, one: runtime.Bridge, side: Side
) -> None:
    """The keeper, the orphan sweep, a heartbeat of the handler's, and somebody's cancel."""

    def body(conn: psycopg.Connection) -> None:
        (row,) = side.rows("SELECT * FROM job")
        bridge.finish(conn, "done")
        side.conn.execute("SET lock_timeout = '200ms'")
        with one.database.connection() as own:
            ticket = Ticket(row["id"], row["scheduled_at"])
            assert ledger.renew(own, {row["run_id"]: ticket}, lease=one.settings.lease) == 1  # told: somebody has it
            assert ledger.orphans(own, tenant="default", limit=10) == []
        assert bridge.heartbeat({"current": 1}, force=True) == 0
        with pytest.raises(DatabaseUnavailable, match="lock timeout"):
            bridge.cancel(row["id"], running=True, conn=side.conn)

    row, _ = play(body)
    assert (row["status"], row["result"]) == ("completed", "done")
    assert bridge.cancel(row["id"], running=True) == 0


@pytest.mark.parametrize("how", ["twice", "another database"])
def test_a_finish_that_is_not_this_transactions_to_write_is_an_error_of_the_handler(
    play: Any, effects: Any, admin_url: str, template: str, how: str
) -> None:
    def body(conn: psycopg.Connection) -> None:
        if how == "twice":
            bridge.finish(conn, 1)
            bridge.finish(conn, 2)
        else:
            with psycopg.connect(make_conninfo(admin_url, dbname=template)) as other:
                bridge.finish(other)

    row, _ = play(body)
    assert (row["status"], row["error"]["ex_type"], effects()) == ("retry", "InvalidJob", 0)
    assert "finish was called before in this transaction, or" in row["error"]["hint"]


@pytest.mark.parametrize("how", ["cancelled", "another run"])
def test_a_pipeline_is_refused_because_it_answers_late(play: Any, side: Side, effects: Any, how: str) -> None:
    def body(conn: psycopg.Connection) -> None:
        lose(side, how)
        with conn.pipeline():
            bridge.finish(conn)

    play(body)
    assert effects() == 0


def test_a_connection_that_a_pool_has_given_to_another_job_is_left_alone(
    play: Any, side: Side, database_url: str
) -> None:
    """This job has committed, and gone on; the next one is in its own transaction on the same connection."""
    with psycopg.connect(database_url) as shared:

        def body(_: psycopg.Connection) -> None:
            with shared.transaction():
                shared.execute("INSERT INTO effect VALUES ('mine')")
                bridge.finish(shared)
            shared.execute("INSERT INTO effect VALUES ('the next one')")

        row, _ = play(body)
        assert row["status"] == "completed"
        assert shared.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        shared.commit()
    assert {each["what"] for each in side.rows("SELECT what FROM effect")} == {"mine", "the next one", "there"}


def test_a_connection_that_is_in_a_later_transaction_is_left_alone(play: Any, side: Side, database_url: str) -> None:
    with psycopg.connect(database_url) as shared:

        def body(_: psycopg.Connection) -> None:
            bridge.finish(shared)
            shared.rollback()
            shared.execute("INSERT INTO effect VALUES ('another')")

        row, _ = play(body)
        assert (row["status"], row["error"]["ex_type"]) == ("retry", "Unfinished")
        shared.commit()
    assert side.rows("SELECT FROM effect WHERE what = 'another'") != []


def test_outside_a_handler_it_is_refused_and_under_invoke_it_only_checks(app: Celery, database_url: str) -> None:
    @bridge.job("invoked")
    def invoked(context: bridge.Context, params: dict[str, Any]) -> str:
        with pytest.raises(EncodingError, match="NaN"):
            bridge.finish(None, float("nan"))
        bridge.finish(None, "fine")
        return "returned"

    with psycopg.connect(database_url) as conn, pytest.raises(InvalidJob, match="in the thread of a job's handler"):
        bridge.finish(conn)
    assert bridge.invoke("invoked") == "returned"


@pytest.mark.parametrize("committed", [False, True], ids=["before", "after"])
def test_a_child_killed_around_the_commit(stack: Stack, side: Side, tmp_path: Path, committed: bool) -> None:
    side.conn.execute("CREATE TABLE effect (what text)")
    worker = stack.worker(concurrency=1)
    job_id = side.insert("finishes", params={"committed": committed, "until": str(tmp_path / "go")})
    until(lambda: side.received(job_id) and (tmp_path / "go.there").exists(), what=lambda: worker.tail)
    (child,) = worker.children()
    os.kill(child, signal.SIGKILL)
    until(lambda: side.status(job_id) in ("completed", "aborted"), what=lambda: worker.tail)
    stays(lambda: side.status(job_id) == ("completed" if committed else "aborted"), seconds=1)
    assert len(side.rows("SELECT FROM effect")) == int(committed)
    assert side.events(job_id)[1:] == [("end", {"outcome": "completed" if committed else "aborted"})]
