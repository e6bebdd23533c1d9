"""The public functions. Each finds the current Bridge and calls one of its verbs.

Which Bridge: that of the job running now, else the installed one, else the default app, built on first use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from celery import Celery

from bridge import celery, runtime
from bridge.records import Context, Job, JobEvent
from bridge.submission import Options, as_uuid
from bridge.task import declare


def install(app: Celery) -> Celery:
    """Make a Celery app's workers and producers speak to the ledger. Call it where the app is made; twice is once.

    Nothing is read or connected. The app keeps its tasks, its queues and its configuration.

    Returns:
        The app.

    Example:
        >>> app = install(Celery("shop", broker="redis://localhost/0", set_as_current=False))
    """
    return celery.install(app)


def job(
    name: str,
    *,
    schema: object = None,
    queue: str = "default",
    priority: int = 100,
    max_retries: int = 3,
    retry_lost: bool = False,
    retry_on_error: bool = True,
    **celery_task_options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `def handler(context, params)` as a job.

    Args:
        schema: marshmallow Schema class or instance that decodes the params; None passes the JSON object.
        queue: logical queue of its rows.
        priority: higher is handed over first.
        max_retries: how many times it may run again.
        retry_lost: may a run whose process was lost run again? It may have had its effects.
        retry_on_error: is any exception a reason to run again? False fails the job at once.
        celery_task_options: options of the Celery task, such as time_limit (seconds) or rate_limit.

    Raises:
        DuplicateJob: another handler has the name.
        InvalidJob: the name, the schema or the handler cannot be a job's.

    Example:
        >>> @job("shop.greet", max_retries=1)
        ... def greet(context, params):
        ...     return f"hello {params['name']}"
        >>> greet(None, {"name": "Ada"})
        'hello Ada'
    """
    options = {
        **celery_task_options,
        "schema": schema,
        "job_queue": queue,
        "job_priority": priority,
        "max_retries": max_retries,
        "retry_lost": retry_lost,
        "retry_on_error": retry_on_error,
    }
    return lambda handler: declare(name, handler, _task, options)


def submit(
    name: str,
    params: object = None,
    *,
    delay: int | timedelta = 0,
    queue: str | None = None,
    label: str = "",
    priority: int | None = None,
    max_retries: int | None = None,
    dedupe: bool = False,
    profile_id: UUID | str | None = None,
    resource_id: UUID | str | None = None,
    expires_in: int | timedelta | None = None,
    start_before: datetime | int | timedelta | None = None,
    unique_key: str | None = None,
    on_conflict: Literal["return", "raise", "replace"] = "return",
    conn: object = None,
) -> UUID:
    """Write a job's row, in the caller's transaction or in one of its own. The broker is not asked.

    Args:
        params: typed values that the job's schema can write, or a JSON object.
        delay: not before; an int of milliseconds, or a timedelta.
        dedupe: first delete the rows of the same name, queue and label that wait for a later time unstarted.
        profile_id: owner of a user-facing job.
        resource_id: the artefact that the job is about; it is set once.
        expires_in: how long the row is kept at least; an int of milliseconds, or a timedelta.
        start_before: the job is cancelled if it has not started by then, retries included; an aware datetime, or an
            int of milliseconds or a timedelta from now.
        unique_key: at most one active job of this name has it; text of 1 to 250 characters.
        on_conflict: what to do if one has it: "return" its id, "raise" KeyTaken, or "replace" it, which cancels it
            and writes the new row; one that runs is not replaced, but raises KeyTaken.
        conn: a psycopg connection; the row becomes visible with the caller's commit, or never.

    Returns:
        The job's id, which is also its Celery task id.

    Raises:
        UnknownJob: no job of that name is registered in this process.
        InvalidParams: the params do not fit the schema; the message names the field.
        KeyTaken: an active job has the unique_key; its `job_id` says which.
        InvalidJob: an option is bad. Nothing was written, and the caller's transaction is as it was.
        DatabaseUnavailable: PostgreSQL does not answer.

    Example:
        >>> with psycopg.connect(url) as conn:  # doctest: +SKIP
        ...     conn.execute("INSERT INTO orders (id) VALUES (7)")
        ...     submit("shop.invoice", {"order": 7}, conn=conn)
    """
    options = Options(
        delay=delay,
        queue=queue,
        label=label,
        priority=priority,
        max_retries=max_retries,
        dedupe=dedupe,
        profile_id=profile_id,
        resource_id=resource_id,
        expires_in=expires_in,
        start_before=start_before,
        unique_key=unique_key,
        on_conflict=on_conflict,
    )
    return current().submission.submit(name, params, options, conn)


async def asubmit(name: str, params: object = None, **options: Any) -> UUID:
    """`submit` in a thread, for code that must not block its event loop. It takes no `conn`.

    Raises:
        TypeError: `conn` was given: a synchronous connection cannot be shared with a thread in mid-transaction.
    """
    if options.get("conn") is not None:
        raise TypeError("asubmit takes no conn: submit in the thread that owns the transaction")
    return await asyncio.to_thread(submit, name, params, **options)


def submit_many(name: str, many: Sequence[object], *, conn: object = None, **options: Any) -> list[UUID]:
    """Write many rows of one job, all or none; the options of `submit` hold for each.

    Returns:
        Their ids, in order.

    Raises:
        InvalidParams: the message says which of them is bad; nothing was written.

    Example:
        >>> submit_many("shop.invoice", [{"order": 7}, {"order": 8}])  # doctest: +SKIP
    """
    return current().submission.submit_many(name, many, Options(**options), conn)


def invoke(
    name: str, raw_params: object = None, *, context: Context | None = None, job_id: UUID | str | None = None
) -> Any:
    """Run a job's handler here and now: no row, params decoded as a worker decodes them.

    Returns:
        What the handler returns.

    Raises:
        UnknownJob, InvalidParams: as submit; and whatever the handler raises.
    """
    return current().submission.invoke(name, raw_params, context=context, job_id=job_id)


def cancel(job_id: UUID | str, *, running: bool = False, conn: object = None) -> int:
    """Call off a job.

    Args:
        running: also one that runs: its handler meets Interrupted at a heartbeat that reaches the database, and
            whatever it does, its outcome is not written.
        conn: a psycopg connection; the cancel then is part of the caller's transaction.

    Returns:
        1 if this call cancelled it, 0 if it has ended, does not exist, or runs and `running` is False.

    Raises:
        InvalidJob: the id is no uuid.

    Example:
        >>> cancel("0199b1a7-0000-7000-8000-000000000000", running=True)  # doctest: +SKIP
        1
    """
    return current().submission.cancel(job_id, conn, running=running)


def get_job(job_id: UUID | str) -> Job | None:
    """The job's row, or None."""
    return current().submission.get_job(job_id)


def get_events(job_id: UUID | str) -> list[JobEvent]:
    """The job's history, oldest first."""
    return current().submission.get_events(job_id)


def heartbeat(progress: object = None, *, job_id: UUID | str | None = None, force: bool = False) -> int | None:
    """Say that the job is alive, and how far it is.

    Renews the lease at most once a minute (or a third of the lease, if shorter), and stores a progress event
    at most once a second.

    Args:
        progress: a mapping of current (≥ 0), total (> 0 and ≥ current) and stage (≤ 250 characters).
        job_id: the job, when this is not called in its handler.
        force: store the progress, however recent the last one is.

    Returns:
        How many durable writes were made; None outside a job.

    Raises:
        ValueError: the report is malformed; nothing was written.
        Interrupted: the row is no longer this run's.
    """
    found = None if job_id is None else as_uuid(job_id, name="job_id")
    return current().heart.beat(progress, job_id=found, force=force)


def finish(conn: object, result: object = None, resource_id: UUID | str | None = None) -> None:
    """In a handler: complete the job in the handler's own transaction, whose effects and `completed` commit together.

    Afterwards the worker writes nothing more, whatever the handler returns; a handler that returns without the
    commit has failed like one that raised. Called by `invoke`, it only checks its arguments.

    Args:
        conn: the handler's psycopg connection, in a READ COMMITTED transaction (its default).
        result: what the handler would return.
        resource_id: as in `Completion`.

    Raises:
        Interrupted: the row is no longer this run's. The connection is closed, so that nothing of the transaction
            can be committed, also by a handler that swallows this.
        InvalidJob: it is not called in a handler, in autocommit, under another isolation level, or the resource
            is no uuid or a second one.
        EncodingError: the result has no JSON form.

    Example:
        >>> @job("shop.book")  # doctest: +SKIP
        ... def book(context, params):
        ...     with psycopg.connect(url) as conn:
        ...         conn.execute("UPDATE account SET total = total + 1")
        ...         finish(conn, {"booked": 1})
    """
    current().heart.finish(conn, result, resource_id)


def current() -> runtime.Bridge:
    """The Bridge that the functions here use."""
    return runtime.current(celery.default)


def _task(name: str) -> Any:
    return current().app.tasks[name]
