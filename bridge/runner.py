"""One run of one job: claim → decode → handler → judge → settle. No Celery in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from bridge import ledger, metrics, progress
from bridge.database import Database, abandon, as_milliseconds, in_doubt
from bridge.errors import DatabaseError, DatabaseUnavailable, InvalidParams, Retry
from bridge.lifecycle import MOVES, Status
from bridge.outcome import (
    Abort,
    Again,
    Cancel,
    Complete,
    Fail,
    Finished,
    Outcome,
    Release,
    Unfinished,
    judge_error,
    judge_return,
    report,
)
from bridge.records import Definition, ErrorReport, Job, Run, Ticket
from bridge.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a delivery.

    `status` is what the row says afterwards, None if there is no such row; `ran` whether this delivery called
    the handler; `error` and `delay` are those of a failure or a retry.
    """

    status: Status | None
    ran: bool
    error: ErrorReport | None = None
    delay: timedelta | None = None


def target(outcome: Outcome) -> Status:
    """The status that an outcome leads to."""
    match outcome:
        case Complete():
            return MOVES["complete"].target
        case Fail():
            return MOVES["fail"].target
        case Again():
            return MOVES["retry"].target
        case Release():
            return MOVES["release"].target
        case Abort():
            return MOVES["abort"].target
        case Cancel():
            return MOVES["cancel"].target


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs jobs in this process.

    Args:
        ends_run: is this the pool ending the run? Somebody else then closes it, not the handler's wreck.
    """

    database: Database
    settings: Settings
    ends_run: Callable[[BaseException], bool] = lambda error: False

    def run(self, ticket: Ticket, run: Run, definition: Definition) -> Verdict:
        """Run the ticket's job once, if the ticket is current; every outcome is written before this returns.

        Raises:
            BaseException: what `ends_run` says of; the row stays running.
        """
        job = self._claim(ticket, run, definition)
        if job is None:
            return self._skipped(ticket, run)
        metrics.started(job)
        began = time.monotonic()
        outcome = self._execute(job, run, definition)
        seconds = time.monotonic() - began
        metrics.executed(job, seconds)
        if isinstance(outcome, Finished):
            metrics.ended(job, seconds, Status.COMPLETED)
            return Verdict(Status.COMPLETED, True)
        if outcome is None:
            logger.info("job %s (%s): interrupted, its row is no longer this run's", job.id, job.name)
            return self._found(job.id, ran=True)
        if not self._settle(job, run, outcome):
            logger.warning(
                "job %s (%s): its row moved on while the handler ran; %s is not written",
                job.id,
                job.name,
                type(outcome).__name__.lower(),
            )
            return self._found(job.id, ran=True)
        if target(outcome) is not Status.RETRY:
            metrics.ended(job, seconds, target(outcome))
        return _verdict(outcome)

    def _claim(self, ticket: Ticket, run: Run, definition: Definition) -> Job | None:
        def attempt(number: int) -> Job | None:
            with self.database.connection() as conn:
                job = ledger.claim(
                    conn,
                    ticket,
                    run,
                    name=definition.name,
                    tenant=self.settings.tenant,
                    lease=self.settings.lease,
                    retry_lost=definition.retry_lost,
                )
                if job is None and number:
                    job = ledger.held(conn, ticket.job_id, run, tenant=self.settings.tenant)
                return job

        return in_doubt(attempt, wait=_sleep, what=f"claim of job {ticket.job_id}")

    def _execute(self, job: Job, run: Run, definition: Definition) -> Outcome | Finished | None:
        longest = self.settings.retry_max_delay
        try:
            params = definition.load(job.params_text)
        except InvalidParams as error:
            logger.error("job %s (%s): bad params (%s); failed, not retried", job.id, job.name, error.fields)
            return Fail(report(error))
        value: object = None
        trouble: BaseException | None = None
        with progress.running(job, run) as current:
            try:
                value = definition.handler(job.context, params)
            except BaseException as error:
                if self.ends_run(error):
                    raise
                trouble = error
        if current.interrupted:
            return None
        if current.finished is not None:
            if self._is_finished(job, run, *current.finished):
                if trouble is not None:
                    logger.warning("job %s (%s): raised after it had finished", job.id, job.name, exc_info=trouble)
                return Finished()
            trouble = trouble or Unfinished("finish was called, and its transaction was not committed")
        if trouble is not None:
            judged = judge_error(job, definition, trouble, longest=longest)
            _log_error(job, trouble, judged)
            return judged
        outcome = judge_return(job, value)
        if isinstance(outcome, Complete) and outcome.lost_result:
            logger.error("job %s (%s): its result %s; stored as null", job.id, job.name, outcome.lost_result)
        return outcome

    def _is_finished(self, job: Job, run: Run, conn: ledger.AnyConnection, transaction: str) -> bool:
        """Was the transaction committed in which the handler called finish? One that is still open is rolled back."""

        def attempt(_: int) -> bool:
            with self.database.connection() as own:
                row = ledger.get(own, job.id, tenant=job.tenant)
            return row is not None and row.run_id == run.id and row.status is Status.COMPLETED

        if in_doubt(attempt, wait=_sleep, what=f"look at job {job.id}"):
            return True
        if abandon(conn, transaction):
            logger.error("job %s (%s): its handler ended without a commit after finish; rolled back", job.id, job.name)
        return False

    def _settle(self, job: Job, run: Run, outcome: Outcome) -> bool:
        """Write the outcome; true if it stands, by this statement or by an unanswered one before it."""

        def attempt(number: int) -> bool:
            with self.database.connection() as conn:
                changed = ledger.settle(
                    conn,
                    job.id,
                    outcome,
                    tenant=job.tenant,
                    actor=run.worker,
                    run=run.id,
                    repeated=number > 0,
                )
                if changed or not number:
                    return bool(changed)
                row = ledger.get(conn, job.id, tenant=job.tenant)
                return row is not None and row.run_id == run.id and row.status is target(outcome)

        try:
            return bool(in_doubt(attempt, wait=_sleep, what=f"outcome of job {job.id}"))
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:
            if isinstance(outcome, Fail):
                raise
            logger.error("job %s (%s): its outcome was refused (%s); failed instead", job.id, job.name, error)
            return self._settle(job, run, Fail(report(error)))

    def _skipped(self, ticket: Ticket, run: Run) -> Verdict:
        self._cancel_late(ticket, run)
        verdict = self._found(ticket.job_id, ran=False)
        logger.info(
            "job %s: ticket of %s is not current (row: %s); skipped",
            ticket.job_id,
            ticket.scheduled_at.isoformat(),
            verdict.status or "none",
        )
        return verdict

    def _cancel_late(self, ticket: Ticket, run: Run) -> None:
        """If the claim found nothing because the job was to start before now, its row says so at once."""

        def attempt(_: int) -> bool:
            with self.database.connection() as conn:
                late = ledger.late(conn, tenant=self.settings.tenant, actor=run.worker, job_id=ticket.job_id)
            return bool(late)

        if in_doubt(attempt, wait=_sleep, what=f"cancel of job {ticket.job_id}"):
            logger.info("job %s: it was to start before now; cancelled", ticket.job_id)

    def _found(self, job_id: UUID, *, ran: bool) -> Verdict:
        def attempt(_: int) -> Verdict:
            with self.database.connection() as conn:
                row = ledger.get(conn, job_id, tenant=self.settings.tenant)
            error = None if row is None or row.error is None else _report(row.error)
            return Verdict(None if row is None else row.status, ran, error)

        return in_doubt(attempt, wait=_sleep, what=f"look at job {job_id}") or Verdict(None, ran)


def _verdict(outcome: Outcome) -> Verdict:
    match outcome:
        case Fail(error) | Abort(error):
            return Verdict(target(outcome), True, error)
        case Again(delay, error, _):
            return Verdict(target(outcome), True, error, delay)
        case _:
            return Verdict(target(outcome), True)


def _report(stored: dict[str, str]) -> ErrorReport:
    return ErrorReport(*(str(stored.get(key, "")) for key in ("type", "code", "ex_type", "hint")))


def _log_error(job: Job, error: BaseException, outcome: Outcome | None) -> None:
    match outcome:
        case Again(delay, said, reason):
            logger.warning(
                "job %s (%s): %s: %s; runs again in %d ms (%s)",
                job.id,
                job.name,
                said.ex_type,
                said.hint,
                as_milliseconds(delay),
                reason,
            )
        case Fail(said):
            trace = None if isinstance(error, Retry) else error  # a Retry is deliberate, and says why
            logger.error("job %s (%s): failed: %s: %s", job.id, job.name, said.ex_type, said.hint, exc_info=trace)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
