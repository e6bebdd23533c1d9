"""The only module that runs the ledger's statements: `conn` first, a lost race returns 0 or None, never raises.

Each writer is one conditional statement whose sources, target and event come from `lifecycle.MOVES`. A
writer called with a run is fenced by it; without one (operators, external workers) by the status alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, assert_never
from uuid import UUID

import psycopg
from psycopg.rows import class_row, dict_row

from bridge.database import Connection, as_milliseconds
from bridge.errors import InvalidJob
from bridge.lifecycle import MOVES, RetryReason, Status
from bridge.outcome import Abort, Again, Cancel, Complete, Fail, Outcome, Release
from bridge.records import Handover, Job, JobEvent, NewJob, Progress, Run, Ticket
from bridge.sql import statement

AnyConnection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """What `dispatch` took: the rows now handed over, and how much room the window had."""

    rows: list[Handover]
    room: int


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat found: does the run still hold its row, and how many durable writes were made."""

    held: bool
    written: int


def insert(conn: AnyConnection, job: NewJob) -> int:
    """Write a new row; 0 if it is there already, or an active row has its unique_key."""
    return conn.cursor().execute(statement("insert"), {**_new(job), "id": str(job.id)}).rowcount


def insert_many(conn: AnyConnection, job: NewJob, ids: Sequence[UUID], params: Sequence[str]) -> int:
    """Write new rows that are alike but for id and params, all or none."""
    values = {**_new(job), "ids": [str(each) for each in ids], "params": list(params)}
    return conn.cursor().execute(statement("insert_many"), values).rowcount


def dedupe(conn: AnyConnection, job: NewJob) -> int:
    """Delete the equal rows that wait unstarted; inside a READ COMMITTED transaction, one submitter at a time.

    Raises:
        InvalidJob: the transaction is not READ COMMITTED: it would not see what the other submitter wrote.
    """
    values = {key: getattr(job, key) for key in ("tenant", "name", "queue", "label")}
    row = conn.cursor(row_factory=dict_row).execute(statement("dedupe_lock"), values).fetchone() or {}
    if row.get("isolation") != "read committed":
        raise InvalidJob(
            f"dedupe=True needs a READ COMMITTED transaction, this one is {row.get('isolation')}: "
            "set the isolation level, or submit without conn"
        )
    return conn.cursor().execute(statement("dedupe"), {**values, "id": str(job.id)}).rowcount


def _new(job: NewJob) -> dict[str, object]:
    return {
        "tenant": job.tenant,
        "name": job.name,
        "queue": job.queue,
        "label": job.label,
        "params": job.params,
        "priority": job.priority,
        "max_retries": job.max_retries,
        "delay": as_milliseconds(job.delay),
        "expires_in": None if job.expires_in is None else as_milliseconds(job.expires_in),
        "profile_id": _text(job.profile_id),
        "resource_id": _text(job.resource_id),
        "start_before": job.start_before if isinstance(job.start_before, datetime) else None,
        "start_in": as_milliseconds(job.start_before) if isinstance(job.start_before, timedelta) else None,
        "unique_key": job.unique_key,
    }


def active(conn: AnyConnection, job: NewJob) -> Job | None:
    """The row that has a new job's unique_key now."""
    return _one_job(conn, "active", {"tenant": job.tenant, "name": job.name, "unique_key": job.unique_key})


def get(conn: AnyConnection, job_id: UUID, *, tenant: str) -> Job | None:
    """The row, or None."""
    return _one_job(conn, "get", {"id": str(job_id), "tenant": tenant})


def events(conn: AnyConnection, job_id: UUID, *, tenant: str) -> list[JobEvent]:
    """The row's history, oldest first."""
    cursor = conn.cursor(row_factory=class_row(JobEvent))
    return cursor.execute(statement("events"), {"id": str(job_id), "tenant": tenant}).fetchall()


def claim(
    conn: AnyConnection,
    ticket: Ticket,
    run: Run,
    *,
    name: str,
    tenant: str,
    lease: timedelta,
    retry_lost: bool,
) -> Job | None:
    """Make the ticket's row this run's; None if the ticket is not the current one, or the row is not pending."""
    values = {
        **_move("claim"),
        "id": str(ticket.job_id),
        "scheduled_at": ticket.scheduled_at,
        "name": name,
        "tenant": tenant,
        "run": str(run.id),
        "actor": run.worker,
        "lease": as_milliseconds(lease),
        "retry_lost": retry_lost,
    }
    return _one_job(conn, "claim", values)


def held(conn: AnyConnection, job_id: UUID, run: Run, *, tenant: str) -> Job | None:
    """The row, if this run holds it."""
    return _one_job(conn, "held", {"id": str(job_id), "tenant": tenant, "run": str(run.id)})


def settle(
    conn: AnyConnection,
    job_id: UUID,
    outcome: Outcome,
    *,
    tenant: str,
    actor: str,
    run: UUID | None = None,
    repeated: bool = False,
    running: bool = False,
) -> int:
    """Write an outcome and its event; 0 if the row had moved on.

    Args:
        repeated: an earlier try may have been carried out unanswered. The one move that leads to where it
            started, retry, is then made from running only, so that it is not counted twice.
        running: a Cancel may also end a running row.
    """
    fence = {"id": str(job_id), "tenant": tenant, "actor": actor, "run": _text(run)}
    match outcome:
        case Complete(result, resource_id):
            values = {**_move("complete"), "result": result, "resource_id": _text(resource_id)}
            return _count(conn, "complete", {**values, **fence})
        case Fail(error):
            return _count(conn, "end", {**_move("fail"), "error": json.dumps(error.json), **fence})
        case Abort(error):
            return _count(conn, "end", {**_move("abort"), "error": json.dumps(error.json), **fence})
        case Cancel():
            move = _move("cancel")
            if running:
                move["sources"] = [*move["sources"], Status.RUNNING]
            return _count(conn, "end", {**move, "error": None, **fence})
        case Again(delay, error, reason):
            move = _move("retry")
            if repeated:
                move["sources"] = [Status.RUNNING]
            used = {
                "used": int(reason is not RetryReason.NOOP),
                "delay": as_milliseconds(delay),
                "reason": reason,
            }
            return _count(conn, "retry", {**move, **used, "error": json.dumps(error.json), **fence})
        case Release():
            used = {"used": 0, "delay": 0, "reason": RetryReason.NOOP}
            return _count(conn, "retry", {**_move("release"), **used, "error": None, **fence})
        case _:
            assert_never(outcome)


def transaction(conn: AnyConnection) -> tuple[str, str]:
    """The transaction's id and its isolation level, as PostgreSQL writes them."""
    row = conn.cursor(row_factory=dict_row).execute(statement("transaction")).fetchone() or {}
    return str(row["id"]), str(row["isolation"])


def late(conn: AnyConnection, *, tenant: str, actor: str, job_id: UUID | None = None, limit: int = 1) -> list[UUID]:
    """Cancel pending rows whose start_before has passed: that row, or the first few; says which."""
    values = {**_move("cancel"), "tenant": tenant, "actor": actor, "id": _text(job_id), "limit": limit}
    return [row["id"] for row in conn.cursor(row_factory=dict_row).execute(statement("late"), values)]


def reschedule(
    conn: AnyConnection, job_ids: Sequence[UUID], *, tenant: str, scheduled_at: datetime | None = None
) -> int:
    """Take handed-over rows back under new tickets; with `scheduled_at` only if that ticket is the current one."""
    values = {**_move("reschedule"), "ids": [str(each) for each in job_ids], "tenant": tenant}
    cursor = conn.cursor(row_factory=dict_row)
    row = cursor.execute(statement("reschedule"), {**values, "scheduled_at": scheduled_at}).fetchone()
    return int(row["moved"]) if row else 0


def defer(
    conn: AnyConnection, job_id: UUID, delay: timedelta, *, tenant: str, scheduled_at: datetime | None = None
) -> int:
    """Put a row off without using up a retry."""
    values = {**_move("defer"), "id": str(job_id), "tenant": tenant, "delay": as_milliseconds(delay)}
    return _count(conn, "defer", {**values, "scheduled_at": scheduled_at})


def heartbeat(
    conn: AnyConnection,
    job_id: UUID,
    *,
    tenant: str,
    actor: str,
    lease: timedelta,
    run: UUID | None,
    renew: bool,
    progress: Progress | None,
) -> Beat:
    """Renew the lease and write progress under the row's lock, if the run still holds it."""
    values = {
        "id": str(job_id),
        "tenant": tenant,
        "actor": actor,
        "lease": as_milliseconds(lease),
        "run": _text(run),
        "renew": renew,
        "progress": None if progress is None else json.dumps(progress.payload),
    }
    row = conn.cursor(row_factory=dict_row).execute(statement("heartbeat"), values).fetchone() or {}
    return Beat(bool(row.get("held")), int(row.get("written", 0)))


def renew(conn: Connection, runs: Mapping[UUID, Ticket], *, lease: timedelta) -> int:
    """Renew the leases of the runs that really hold their rows; how many of these somebody else had locked."""
    ids = sorted({str(ticket.job_id) for ticket in runs.values()})
    values = {"ids": ids, "runs": [str(run) for run in runs], "lease": as_milliseconds(lease)}
    row = conn.cursor(row_factory=dict_row).execute(statement("renew"), values).fetchone() or {}
    return int(row["held"]) - int(row["renewed"])


def hold(conn: Connection, tickets: Sequence[Ticket], *, lease: timedelta) -> int:
    """Say that the messages of handed-over rows wait in a live worker, for that long."""
    ids, times = [str(each.job_id) for each in tickets], [each.scheduled_at for each in tickets]
    return _count(conn, "hold", {"ids": ids, "scheduled_ats": times, "lease": as_milliseconds(lease)})


def backlog(conn: Connection, *, tenant: str) -> dict[str, float]:
    """The queues that hold pending rows, each with the seconds until its earliest is due (negative: overdue)."""
    rows = conn.cursor(row_factory=dict_row).execute(statement("backlog"), {"tenant": tenant}).fetchall()
    return {row["queue"]: row["due_in"] for row in rows}


def lock_queue(conn: Connection, queue: str, *, tenant: str) -> datetime | None:
    """Be the only dispatcher of a queue until the transaction ends; the database's time, or None if another is."""
    values = {"tenant": tenant, "queue": queue}
    row = conn.cursor(row_factory=dict_row).execute(statement("queue_lock"), values).fetchone()
    return row["at"] if row and row["locked"] else None


def dispatch(conn: Connection, queue: str, *, tenant: str, batch: int, window: int) -> Batch:
    """Mark a queue's due rows as handed over, as far as the window has room; the caller publishes, then commits."""
    values = {**_move("dispatch"), "queue": queue, "tenant": tenant, "batch": batch, "window": window}
    found = conn.cursor(row_factory=dict_row).execute(statement("dispatch"), values).fetchall()
    rows = [
        Handover(Ticket(row["id"], row["scheduled_at"]), row["name"], row["queue"], row["retry_num"])
        for row in found
        if row["id"] is not None
    ]
    return Batch(rows, found[0]["free"] if found else 0)


def handed_over(conn: Connection, *, tenant: str) -> dict[str, float]:
    """The queues that hold handed-over rows, each with the age of its oldest in seconds."""
    rows = conn.cursor(row_factory=dict_row).execute(statement("handed_over"), {"tenant": tenant}).fetchall()
    return {row["queue"]: row["oldest"] for row in rows}


def unclaimed(conn: Connection, queue: str, *, tenant: str, before: datetime) -> list[tuple[UUID, datetime]]:
    """A queue's handed-over rows that nobody claimed or held since a time, oldest first, with their hand-over."""
    values = {"tenant": tenant, "queue": queue, "before": before}
    rows = conn.cursor(row_factory=dict_row).execute(statement("unclaimed"), values)
    return [(row["id"], row["modified_at"]) for row in rows]


def newest(conn: Connection, queue: str, *, tenant: str) -> dict[UUID, datetime]:
    """A queue's few newest handed-over rows, with their hand-over."""
    rows = conn.cursor(row_factory=dict_row).execute(statement("newest"), {"tenant": tenant, "queue": queue})
    return {row["id"]: row["modified_at"] for row in rows}


def started(conn: Connection, job_ids: Sequence[UUID], *, after: datetime) -> list[UUID]:
    """Which of the rows were claimed after a time."""
    values = {"ids": [str(each) for each in job_ids], "after": after}
    return [row["id"] for row in conn.cursor(row_factory=dict_row).execute(statement("started"), values)]


def probe(conn: Connection) -> datetime:
    """Take the locks that a renewal takes, change nothing, and return the database's time after it."""
    conn.execute(statement("probe"))
    row = conn.cursor(row_factory=dict_row).execute(statement("clock")).fetchone() or {}
    at: datetime = row["at"]
    return at


def orphans(conn: Connection, *, tenant: str, limit: int) -> list[Job]:
    """Runs whose lease is over, locked until the transaction ends."""
    cursor = conn.cursor(row_factory=class_row(Job))
    return cursor.execute(statement("orphans"), {"tenant": tenant, "limit": limit}).fetchall()


def mark(conn: Connection, dispatcher: UUID, *, tenant: str, asleep: bool) -> None:
    """Mark a dispatcher asleep or awake."""
    conn.execute(statement("sleep"), {"id": str(dispatcher), "tenant": tenant, "asleep": asleep})


def forget(conn: Connection, dispatcher: UUID) -> None:
    """Take a dispatcher's mark away."""
    conn.execute(statement("forget"), {"id": str(dispatcher)})


def last_revoked(conn: Connection) -> int:
    """The id of the newest event of a cancelled or aborted job."""
    row = conn.cursor(row_factory=dict_row).execute(statement("last_event")).fetchone()
    return int(row["id"]) if row else 0


def revoked(conn: Connection, *, after: int) -> list[tuple[int, UUID, str]]:
    """The jobs that were cancelled or aborted after an event: the event's id, the job's, its tenant."""
    rows = conn.cursor(row_factory=dict_row).execute(statement("revoked"), {"after": after})
    return [(row["id"], row["job_id"], row["tenant"]) for row in rows]


def _one_job(conn: AnyConnection, name: str, values: Mapping[str, object]) -> Job | None:
    return conn.cursor(row_factory=class_row(Job)).execute(statement(name), values).fetchone()


def _count(conn: AnyConnection, name: str, values: Mapping[str, object]) -> int:
    return conn.cursor().execute(statement(name), values).rowcount


def _move(writer: str) -> dict[str, Any]:
    move = MOVES[writer]
    return {"sources": list(move.sources), "target": move.target, "kind": move.event}


def _text(value: UUID | None) -> str | None:
    return None if value is None else str(value)
