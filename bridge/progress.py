"""The run that a handler is in: its heartbeat, and its end by finish."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn
from uuid import UUID

from bridge import ledger
from bridge.database import Database, in_transaction, joined
from bridge.errors import DatabaseError, EncodingError, Interrupted, InvalidJob
from bridge.outcome import Complete, Fail, judge_return
from bridge.records import Completion, Job, Progress, Run, check_progress
from bridge.settings import Settings

logger = logging.getLogger(__name__)

PROGRESS_EVERY = timedelta(seconds=1)
RENEW_EVERY = timedelta(minutes=1)


@dataclass(slots=True)
class Current:
    """The run that this handler is in. Clock readings are monotonic seconds."""

    job: Job
    run: Run
    renewed: float
    reported: float = float("-inf")
    failing_since: float | None = None
    finished: tuple[ledger.AnyConnection, str] | None = None  # the connection, and its transaction's id
    interrupted: bool = False


_invoked: ContextVar[bool] = ContextVar("bridge_invoked", default=False)
_current: ContextVar[Current | None] = ContextVar("bridge_current_run", default=None)


@contextmanager
def running(job: Job, run: Run) -> Iterator[Current]:
    """Inside the block, heartbeat knows which run it speaks for."""
    current = Current(job, run, renewed=time.monotonic())
    token = _current.set(current)
    try:
        yield current
    finally:
        _current.reset(token)


@contextmanager
def invoked() -> Iterator[None]:
    """Inside the block, a handler is called without a row: what it says of its run is checked, and goes nowhere."""
    run, token = _current.set(None), _invoked.set(True)
    try:
        yield
    finally:
        _invoked.reset(token)
        _current.reset(run)


@dataclass(frozen=True, slots=True)
class Heart:
    """What a handler may say of its own run."""

    database: Database
    settings: Settings

    def beat(self, progress: object = None, *, job_id: UUID | None = None, force: bool = False) -> int | None:
        """See `bridge.heartbeat`."""
        report = None if progress is None else check_progress(progress)
        current = _current.get()
        if current is not None and job_id in (None, current.job.id):
            return self._beat_current(current, report, force=force)
        if job_id is None:
            return None
        with self.database.connection() as conn:
            beat = ledger.heartbeat(
                conn,
                job_id,
                tenant=self.settings.tenant,
                actor="",
                lease=self.settings.lease,
                run=None,
                renew=True,
                progress=report,
            )
        return beat.written

    def _beat_current(self, current: Current, report: Progress | None, *, force: bool) -> int:
        if current.finished is not None:
            return 0  # the row is locked by the handler's own transaction, or completed
        now = time.monotonic()
        every = min(RENEW_EVERY, self.settings.lease / 3).total_seconds()
        renew = now - current.renewed >= every
        due = report is not None and (force or now - current.reported >= PROGRESS_EVERY.total_seconds())
        if not renew and not due:
            return 0
        try:
            beat = self._write(current, report if due else None, renew=renew)
        except DatabaseError as error:
            return self._failed(current, error, now)
        current.failing_since = None
        if not beat.held:
            raise Interrupted(f"job {current.job.id} is no longer held by this run")
        if renew:
            current.renewed = now
        if due:
            current.reported = now
        return beat.written

    def finish(self, conn: object, result: object, resource_id: UUID | str | None) -> None:
        """See `bridge.finish`."""
        current = _current.get()
        if current is None and not _invoked.get():
            raise InvalidJob(
                "finish(conn, …) ends the run that it is called in: call it in the thread of a job's handler"
            )
        if current is None:
            _complete(None, result, resource_id)
            return
        outcome = _complete(current.job, result, resource_id)
        with joined(conn) as caller:
            if caller.autocommit and not in_transaction(caller):
                raise InvalidJob(
                    "finish needs a transaction, and this connection is in autocommit: use conn.transaction()"
                )
            transaction, isolation = ledger.transaction(caller)
            if isolation != "read committed":
                raise InvalidJob(f"finish needs a READ COMMITTED transaction, this one is {isolation}")
            job, run = current.job, current.run
            if not ledger.settle(caller, job.id, outcome, tenant=job.tenant, actor=run.worker, run=run.id):
                self._not_finished(current, caller)
            current.finished = (caller, transaction)

    def _not_finished(self, current: Current, caller: ledger.AnyConnection) -> NoReturn:
        """The row was not this run's to complete, or not with this transaction: look from outside of it."""
        job, lost = current.job, True
        try:
            with self.database.connection() as conn:
                lost = ledger.held(conn, job.id, current.run, tenant=job.tenant) is None
        finally:
            if lost:
                # Closed, because a savepoint of the caller's could undo anything less, and commit what is around it.
                current.interrupted = True
                caller.close()
        if lost:
            raise Interrupted(f"job {job.id} is no longer held by this run; its transaction is rolled back")
        raise InvalidJob("finish was called before in this transaction, or its connection is to another database")

    def _write(self, current: Current, report: Progress | None, *, renew: bool) -> ledger.Beat:
        with self.database.connection() as conn:
            return ledger.heartbeat(
                conn,
                current.job.id,
                tenant=current.job.tenant,
                actor=current.run.worker,
                lease=self.settings.lease,
                run=current.run.id,
                renew=renew,
                progress=report,
            )

    def _failed(self, current: Current, error: DatabaseError, now: float) -> int:
        """An outage is the worker's trouble, not the handler's, until it has lasted for a whole lease."""
        if current.failing_since is None:
            current.failing_since = now
            logger.warning("heartbeat of job %s could not be written (%s); the handler goes on", current.job.id, error)
        if now - current.failing_since >= self.settings.lease.total_seconds():
            raise Interrupted(f"job {current.job.id} could not be renewed for a whole lease") from error
        return 0


def _complete(job: Job | None, result: object, resource_id: UUID | str | None) -> Complete:
    """The outcome that finish writes; what a returned value would only lose or fail for is refused here."""
    outcome = judge_return(job, Completion(result, resource_id))
    if isinstance(outcome, Fail):
        raise InvalidJob(outcome.error.hint)
    assert isinstance(outcome, Complete)  # noqa: S101 -- narrows the type: judge_return makes no other
    if outcome.lost_result:
        raise EncodingError(f"the result {outcome.lost_result}")
    return outcome
