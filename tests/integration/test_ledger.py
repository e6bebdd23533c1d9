"""The ledger against a real PostgreSQL: every status × writer, the fence, the tickets, what a row may hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from bridge import ledger
from bridge.lifecycle import MOVES, RetryReason, Status
from bridge.outcome import ORPHAN, Abort, Again, Cancel, Complete, Fail, Release
from bridge.records import NewJob, Progress, Run, Ticket, new_id
from tests.support import Side, until

MINE, OTHER = Run(new_id(), "mine"), Run(new_id(), "other")
LEASE = timedelta(seconds=30)
AGAIN = Again(timedelta(0), ORPHAN, RetryReason.BACKOFF)


def settle(outcome: Any) -> Callable[..., int]:
    return lambda conn, side, job_id, run: ledger.settle(
        conn, job_id, outcome, tenant="default", actor="w", run=run and run.id
    )


def dispatch(conn: Any, side: Side, job_id: UUID, run: Run | None) -> int:
    with conn.transaction():
        return len(ledger.dispatch(conn, "test", tenant="default", batch=10, window=10).rows)


def claim(conn: Any, side: Side, job_id: UUID, run: Run | None) -> int:
    ticket = Ticket(job_id, side.row(job_id)["scheduled_at"])
    job = ledger.claim(conn, ticket, run or OTHER, name="plain", tenant="default", lease=LEASE, retry_lost=False)
    return 0 if job is None else 1


WRITERS: dict[str, Callable[..., int]] = {
    "dispatch": dispatch,
    "claim": claim,
    "complete": settle(Complete('{"a": 1}')),
    "fail": settle(Fail(ORPHAN)),
    "retry": settle(AGAIN),
    "release": settle(Release()),
    "cancel": settle(Cancel()),
    "abort": settle(Abort(ORPHAN)),
    "reschedule": lambda conn, side, job_id, run: ledger.reschedule(conn, [job_id], tenant="default"),
    "defer": lambda conn, side, job_id, run: ledger.defer(conn, job_id, timedelta(0), tenant="default"),
}
FENCED = {"complete", "fail", "retry", "release", "abort"}
"""Writers that a run calls; the others belong to nobody's run."""

EVENTS = {
    "claim": [("start", {"attempt": 1})],
    "complete": [("end", {"outcome": "completed"})],
    "fail": [("end", {"outcome": "failed"})],
    "retry": [("retry", {"attempt": 2, "reason": "backoff"})],
    "release": [("retry", {"attempt": 1, "reason": "noop"})],
    "cancel": [("end", {"outcome": "cancelled"})],
    "abort": [("end", {"outcome": "aborted"})],
}


def test_every_writer_of_the_table_is_tried() -> None:
    assert WRITERS.keys() == MOVES.keys()


@pytest.mark.parametrize("run", [MINE, OTHER, None], ids=["right-run", "wrong-run", "no-run"])
@pytest.mark.parametrize("writer", WRITERS)
def test_every_status_and_writer(side: Side, conn: psycopg.Connection, writer: str, run: Run | None) -> None:
    """A legal move leaves its event and no other; what is not legal leaves the row as it was, to the letter."""
    if run is OTHER and writer not in FENCED:
        run = None
    for status in Status:
        side.conn.execute("DELETE FROM job")
        job_id = side.insert("plain", status=status, run_id=MINE.id, retry_num=0)
        before = side.row(job_id)
        legal = status in MOVES[writer].sources and (run is not OTHER)
        assert WRITERS[writer](conn, side, job_id, run) == int(legal), (status, writer)
        if legal:
            assert side.status(job_id) == MOVES[writer].target
            assert side.events(job_id) == EVENTS.get(writer, [])
        else:
            assert side.row(job_id) == before
            assert side.events(job_id) == []


@pytest.mark.parametrize("writer", ["retry", "release", "reschedule", "defer"])
@pytest.mark.parametrize("ahead", ["-1 hour", "0", "1 hour"])
def test_a_row_that_becomes_claimable_again_has_a_later_ticket(
    side: Side, conn: psycopg.Connection, writer: str, ahead: str
) -> None:
    status = "scheduled" if writer in ("reschedule", "defer") else "running"
    job_id = side.insert("plain", status=status, run_id=MINE.id)
    conn.execute("UPDATE job SET scheduled_at = now() + %s::interval + interval '7 microseconds'", (ahead,))
    old = side.row(job_id)["scheduled_at"]
    assert WRITERS[writer](conn, side, job_id, MINE) == 1
    new = side.row(job_id)["scheduled_at"]
    assert new >= old + timedelta(milliseconds=1)
    if writer == "reschedule":
        assert new == old + timedelta(milliseconds=1), "it keeps its place in line"


def test_an_unanswered_retry_is_not_counted_twice(side: Side, conn: psycopg.Connection) -> None:
    job_id = side.insert("plain", status="running", run_id=MINE.id)
    how = {"tenant": "default", "actor": "w", "run": MINE.id}
    assert ledger.settle(conn, job_id, AGAIN, **how) == 1
    assert ledger.settle(conn, job_id, AGAIN, **how, repeated=True) == 0
    assert side.row(job_id)["retry_num"] == 1


def test_the_first_terminal_transition_wins_under_race(side: Side, database_url: str) -> None:
    job_id = side.insert("plain", status="running", run_id=MINE.id)
    barrier = threading.Barrier(4)
    changed: list[int] = []

    def end(outcome: Any) -> None:
        with psycopg.connect(database_url, autocommit=True) as one:
            barrier.wait()
            changed.append(ledger.settle(one, job_id, outcome, tenant="default", actor="w"))

    outcomes = [Complete("1"), Fail(ORPHAN), Abort(ORPHAN), Complete("2")]
    threads = [threading.Thread(target=end, args=(outcome,)) for outcome in outcomes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(changed) == [0, 0, 0, 1]
    assert len(side.events(job_id)) == 1


def test_a_claim_of_another_name_or_tenant_changes_nothing(side: Side, conn: psycopg.Connection) -> None:
    job_id = side.insert("plain")
    ticket = Ticket(job_id, side.row(job_id)["scheduled_at"])
    for name, tenant in (("other", "default"), ("plain", "other")):
        assert ledger.claim(conn, ticket, MINE, name=name, tenant=tenant, lease=LEASE, retry_lost=False) is None
    assert side.status(job_id) == "new"


def test_a_second_resource_is_not_written(side: Side, conn: psycopg.Connection) -> None:
    first = new_id()
    job_id = side.insert("plain", status="running", resource_id=first)
    assert ledger.settle(conn, job_id, Complete(None, new_id()), tenant="default", actor="w") == 0
    assert ledger.settle(conn, job_id, Complete(None, first), tenant="default", actor="w") == 1
    assert side.row(job_id)["resource_id"] == first


def test_dispatch_takes_by_priority_then_time_up_to_the_window(side: Side, conn: psycopg.Connection) -> None:
    for label, priority, ago in [("c", 100, 3), ("a", 200, 1), ("d", 100, 2), ("b", 150, 9), ("late", 300, -60)]:
        side.insert("plain", label=label, priority=priority)
        conn.execute("UPDATE job SET scheduled_at = now() - make_interval(secs => %s) WHERE label = %s", (ago, label))
    labels = []
    for batch, window in ((3, 10), (10, 3), (10, 4), (10, 10)):
        with conn.transaction():
            rows = ledger.dispatch(conn, "test", tenant="default", batch=batch, window=window).rows
        labels.append([side.row(row.ticket.job_id)["label"] for row in rows])
    assert labels == [["a", "b", "c"], [], ["d"], []]


def test_dispatch_leaves_rows_that_somebody_locks(side: Side, conn: psycopg.Connection, database_url: str) -> None:
    locked, free = side.insert("plain"), side.insert("plain")
    with psycopg.connect(database_url) as other:
        other.execute("SELECT FROM job WHERE id = %s FOR UPDATE", (locked,))
        with conn.transaction():
            rows = ledger.dispatch(conn, "test", tenant="default", batch=10, window=10).rows
    assert [row.ticket.job_id for row in rows] == [free]


def test_backlog_names_each_queue_with_its_earliest_due_time(side: Side, conn: psycopg.Connection) -> None:
    for queue, priority, ahead in [("a", 1, 60), ("a", 5, 30), ("b", 100, -5), ("b", 1, 10), ("c", 1, 5)]:
        side.insert("plain", queue=queue, priority=priority, label=f"{queue}{priority}")
        conn.execute(
            "UPDATE job SET scheduled_at = now() + make_interval(secs => %s) WHERE label = %s",
            (ahead, f"{queue}{priority}"),
        )
    conn.execute("UPDATE job SET status = 'completed' WHERE queue = 'c'")
    backlog = ledger.backlog(conn, tenant="default")
    assert {queue: round(due_in) for queue, due_in in backlog.items()} == {"b": -5, "a": 30}
    assert ledger.backlog(conn, tenant="other") == {}


def test_renew_touches_only_the_runs_that_hold_their_rows(
    side: Side, conn: psycopg.Connection, database_url: str
) -> None:
    running = [side.insert("plain", status="running", run_id=MINE.id) for _ in range(2)]
    taken = side.insert("plain", status="running", run_id=OTHER.id)
    ended = side.insert("plain", status="completed", run_id=MINE.id)
    runs = {MINE.id: Ticket(running[0], datetime.now(UTC))}
    for job_id in (taken, ended):
        assert ledger.renew(conn, {MINE.id: Ticket(job_id, datetime.now(UTC))}, lease=LEASE) == 0
    assert side.rows("SELECT FROM job WHERE lease_until IS NOT NULL") == []
    assert ledger.renew(conn, runs, lease=LEASE) == 0
    assert [row["id"] for row in side.rows("SELECT id FROM job WHERE lease_until IS NOT NULL")] == [running[0]]
    with psycopg.connect(database_url) as other:
        other.execute("SELECT FROM job WHERE id = %s FOR UPDATE", (running[0],))
        assert ledger.renew(conn, runs, lease=LEASE) == 1, "a locked row is left for the next turn, and counted"


def test_a_held_row_counts_as_claimed_and_keeps_its_hand_over(side: Side, conn: psycopg.Connection) -> None:
    job_id = side.insert("plain", status="scheduled")
    conn.execute("UPDATE job SET modified_at = now() - interval '1 hour'")
    before = side.row(job_id)
    at = before["scheduled_at"]
    old = {"tenant": "default", "before": datetime.now(UTC)}
    assert [each for each, _ in ledger.unclaimed(conn, "test", **old)] == [job_id]
    assert ledger.hold(conn, [Ticket(job_id, at - timedelta(milliseconds=1))], lease=LEASE) == 0
    assert ledger.hold(conn, [Ticket(job_id, at)], lease=LEASE) == 1
    assert side.row(job_id)["modified_at"] == before["modified_at"]
    assert ledger.unclaimed(conn, "test", **old) == []
    conn.execute("UPDATE job SET lease_until = now() - interval '1 second'")
    assert [each for each, _ in ledger.unclaimed(conn, "test", **old)] == [job_id], "the holder is gone"


def test_progress_never_follows_the_end(side: Side, conn: psycopg.Connection, database_url: str) -> None:
    """A heartbeat that waits for the row's lock while the job ends writes nothing."""
    job_id = side.insert("plain", status="running", run_id=MINE.id)
    beats: list[ledger.Beat] = []

    def beat() -> None:
        with psycopg.connect(database_url, autocommit=True) as own:
            beats.append(
                ledger.heartbeat(
                    own, job_id, tenant="default", actor="w", lease=LEASE, run=MINE.id, renew=True, progress=Progress(1)
                )
            )

    with psycopg.connect(database_url) as other:
        ledger.settle(other, job_id, Complete("1"), tenant="default", actor="w", run=MINE.id)
        thread = threading.Thread(target=beat)
        thread.start()
        waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        until(lambda: side.rows(waiting))
        other.commit()
        thread.join()
    assert beats == [ledger.Beat(held=False, written=0)]
    assert [row["kind"] for row in side.rows("SELECT kind FROM job_event ORDER BY id")] == ["end"]


ABSURD: dict[str, dict[str, Any]] = {
    "time -infinity": {"scheduled_at": "-infinity"},
    "time infinity": {"scheduled_at": "infinity"},
    "year 1969": {"scheduled_at": "1969-12-31T23:59:59Z"},
    "year 10000": {"scheduled_at": "10000-01-01T00:00:00Z"},
    "created at infinity": {"created_at": "infinity"},
    "expires at infinity": {"expires_at": "infinity"},
    "no name": {"name": ""},
    "name with a space": {"name": "two words"},
    "name with a control character": {"name": "bell\x07"},
    "name of 201": {"name": "n" * 201},
    "no queue": {"queue": ""},
    "queue with a priority separator": {"queue": "q\x06\x163"},
    "queue with a space": {"queue": "a b"},
    "queue of 151": {"queue": "q" * 151},
    "queue in another script": {"queue": "очередь"},
    "tenant with a dot": {"tenant": "a.b"},
    "label of 251": {"label": "l" * 251},
    "params that are a list": {"params": "[1]"},
    "params that are null": {"params": "null"},
    "priority beyond": {"priority": 40000},
    "negative retries": {"max_retries": -1},
    "negative retry_num": {"retry_num": -1},
    "a status of its own": {"status": "waiting"},
    "an empty unique_key": {"unique_key": ""},
}


@pytest.mark.parametrize("columns", ABSURD.values(), ids=ABSURD.keys())
def test_plain_sql_cannot_write_what_nobody_could_publish(side: Side, columns: dict[str, Any]) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        side.insert(**{"name": "plain", **columns})


PAYLOADS = [
    ("start", '{"attempt": 1, "params": {}}'),
    ("start", "{}"),
    ("progress", '{"current": 1, "note": "x"}'),
    ("retry", '{"attempt": 2, "reason": "backoff", "error": "x"}'),
    ("retry", '{"attempt": 2}'),
    ("end", '{"outcome": "completed", "result": 1}'),
    ("end", "[]"),
    ("other", "{}"),
]


@pytest.mark.parametrize(("kind", "payload"), PAYLOADS)
def test_events_carry_only_the_keys_of_their_kind(side: Side, kind: str, payload: str) -> None:
    job_id = side.insert("plain")
    with pytest.raises(psycopg.errors.CheckViolation):
        side.conn.execute("INSERT INTO job_event (job_id, kind, payload) VALUES (%s, %s, %s)", (job_id, kind, payload))


def test_history_is_not_rewritten(side: Side, conn: psycopg.Connection) -> None:
    job_id = side.insert("plain")
    claim(conn, side, job_id, MINE)
    with pytest.raises(psycopg.errors.RestrictViolation, match="append-only"):
        conn.execute("UPDATE job_event SET actor = 'somebody else'")


def test_an_event_goes_with_its_job_and_not_before(side: Side, conn: psycopg.Connection) -> None:
    job_id = side.insert("plain")
    claim(conn, side, job_id, MINE)
    with pytest.raises(psycopg.errors.RestrictViolation, match="append-only"):
        conn.execute("DELETE FROM job_event")
    conn.execute("DELETE FROM job WHERE id = %s", (job_id,))
    assert side.rows("SELECT FROM job_event") == []


def test_whoever_may_only_insert_runs_nothing_as_the_owner(side: Side, conn: psycopg.Connection) -> None:
    """The wake-up runs as its owner; a caller's temporary table of the same name must not be taken for ours."""
    role = f"bridge_writer_{new_id().hex[-8:]}"
    conn.execute(f"CREATE ROLE {role}")
    conn.execute(f"GRANT INSERT ON job TO {role}")
    try:
        conn.execute(f"SET ROLE {role}")
        conn.execute(
            "CREATE FUNCTION pg_temp.evil() RETURNS boolean LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'ran as %', current_user; END $$"
        )
        conn.execute(
            "CREATE TEMP VIEW bridge_dispatcher AS SELECT gen_random_uuid() AS id, 'default'::text AS tenant, "
            "pg_temp.evil() AS asleep, now() AS seen_at"
        )
        conn.execute("INSERT INTO job (name) VALUES ('plain')")
    finally:
        conn.execute("RESET ROLE")
        conn.execute("DROP VIEW IF EXISTS pg_temp.bridge_dispatcher")
        conn.execute("DROP FUNCTION IF EXISTS pg_temp.evil()")
        conn.execute(f"DROP OWNED BY {role}")
        conn.execute(f"DROP ROLE {role}")


def test_one_active_row_of_a_unique_key(side: Side) -> None:
    first = side.insert("plain", unique_key="k")
    with pytest.raises(psycopg.errors.UniqueViolation):
        side.insert("plain", unique_key="k")
    side.conn.execute("UPDATE job SET status = 'completed' WHERE id = %s", (first,))
    side.insert("plain", unique_key="k")


def test_ids_made_by_plain_sql_are_version_7_and_ordered(side: Side) -> None:
    ids = [side.insert("plain") for _ in range(50)]
    assert {each.version for each in ids} == {7}
    assert {each.variant for each in ids} == {"specified in RFC 4122"}
    assert [each.int >> 80 for each in ids] == sorted(each.int >> 80 for each in ids)


def test_insert_repeated_after_a_lost_answer_changes_nothing(side: Side, conn: psycopg.Connection) -> None:
    job = NewJob(id=new_id(), tenant="default", name="plain", params="{}", queue="test")
    assert [ledger.insert(conn, job), ledger.insert(conn, job)] == [1, 0]
