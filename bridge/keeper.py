"""The keeper: one thread of a worker's main process, with a connection of its own. No Celery in it.

It renews the leases of the runs that the worker executes, says that messages which wait in the worker are
not lost, and closes what the children can no longer close: runs whose process died or ran out of time,
revoked jobs, jobs that nobody here knows. It follows deliveries, not job ids: a second delivery of a running
job's ticket is another run, and its end leaves the first one alone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from uuid import UUID
from weakref import WeakValueDictionary

from bridge import ledger
from bridge.database import Connection, Database
from bridge.errors import DatabaseError, DatabaseUnavailable, UnknownJob
from bridge.lifecycle import Status
from bridge.outcome import (
    Abort,
    Again,
    Cancel,
    Fail,
    Outcome,
    Release,
    TimeLimit,
    judge_error,
    judge_lost,
    report,
)
from bridge.records import Definition, Job, Run, Ticket, new_id
from bridge.settings import Settings

logger = logging.getLogger(__name__)

DEFER = timedelta(seconds=10)
"""How long a job that nobody here knows waits for a worker that does (BRIDGE_UNKNOWN_JOB=defer)."""

_FLUSH_SECONDS = 10.0


@dataclass(slots=True, weakref_slot=True, eq=False)
class Delivery:
    """A message that this worker holds. The keeper forgets it when Celery does."""

    ticket: Ticket
    run: Run
    definition: Definition
    pid: int | None = None
    closed: bool = False


Told = Callable[[Status | None], None]
"""Called with the row's status once a close is written, so that Celery's events can say the same."""


@dataclass(slots=True)
class Keeper:
    """Start it in the main process, tell it what happens to deliveries, stop it last.

    Args:
        worker: the node's name, stamped on the rows and events that the keeper writes.
        alive: does a process of that pid still run?
    """

    database: Database
    settings: Settings
    alive: Callable[[int], bool]
    worker: str = ""
    _deliveries: WeakValueDictionary[UUID, Delivery] = field(default_factory=WeakValueDictionary)
    _inbox: queue.SimpleQueue[Callable[[Connection], bool] | None] = field(default_factory=queue.SimpleQueue)
    _errands: deque[Callable[[Connection], bool]] = field(default_factory=deque)
    _thread: threading.Thread | None = None
    _stopping: bool = False
    _renewed: float = float("-inf")
    _held: float = float("-inf")
    _failing: bool = False
    _locked_out: bool = False
    _leaving: list[Delivery] = field(default_factory=list)

    def start(self, worker: str) -> None:
        """Start the thread, once."""
        if self._thread is None:
            self.worker = worker
            self._stopping = False
            self._thread = threading.Thread(target=self._loop, name="bridge-keeper", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Give back what a cold shutdown cancelled, write what is still to be written, then end the thread."""
        for delivery in self._leaving:
            self._inbox.put(partial(self._release, delivery))
        self._leaving.clear()
        self._stopping = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(_FLUSH_SECONDS + 5)
            self._thread = None

    # What the main process tells; none of these waits for PostgreSQL.

    def receive(self, ticket: Ticket, definition: Definition) -> Delivery:
        """A message came in: from now on it is held, and renewed once a child has claimed its row."""
        delivery = Delivery(ticket, Run(new_id(), self.worker), definition)
        self._deliveries[delivery.run.id] = delivery
        return delivery

    def done(self, delivery: Delivery) -> None:
        """The child has written the outcome; nothing is left to do."""
        delivery.closed = True
        self._deliveries.pop(delivery.run.id, None)

    def lost(self, delivery: Delivery, how: str, told: Told) -> None:
        """The delivery's process died."""
        self._close(delivery, partial(self._close_lost, delivery, how, told))

    def unsettled(self, delivery: Delivery, why: str, told: Told) -> None:
        """The delivery's process lives, but could not claim or write (out of memory, a statement refused)."""
        self._close(delivery, partial(self._close_lost, delivery, why, told, unclaimed="defer"))

    def timed_out(self, delivery: Delivery, limit: float, told: Told) -> None:
        """The delivery's process was killed at its hard time limit, in seconds."""
        self._close(delivery, partial(self._close_timed_out, delivery, limit, told))

    def revoked(self, delivery: Delivery, *, terminated: bool) -> None:
        """Celery revoked the job: a cancel of the row; of the running row only when the process was terminated."""
        self._close(delivery, partial(self._cancel, delivery, terminated))

    def cancelled(self, delivery: Delivery) -> None:
        """The delivery's process was told to die; its run is given back once it is dead."""
        self._leaving.append(delivery)

    def released(self, delivery: Delivery) -> None:
        """A cancelled delivery's process is dead."""
        with suppress(ValueError):
            self._leaving.remove(delivery)
        self._close(delivery, partial(self._release, delivery))

    def unknown(self, ticket: Ticket, name: str) -> None:
        """A ticket came for a job that is not registered here."""
        self._inbox.put(partial(self._unknown, ticket, name, Run(new_id(), self.worker)))

    def _close(self, delivery: Delivery, errand: Callable[[Connection], bool]) -> None:
        if not delivery.closed:
            self.done(delivery)
            self._inbox.put(errand)

    # The thread.

    def step(self, wait: float = 0.0) -> None:
        """Do what was told and renew what is due.

        Args:
            wait: seconds to wait for something to do.
        """
        with suppress(queue.Empty):
            while (errand := self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()) is not None:
                self._errands.append(errand)
                wait = 0.0
        try:
            with self.database.connection() as conn:
                self._renew(conn)
            self._run_errands()
        except DatabaseUnavailable as error:
            if not self._failing:
                logger.warning("keeper: PostgreSQL does not answer (%s); leases are renewed once it does", error)
            self._failing = True
        else:
            if self._failing:
                logger.info("keeper: PostgreSQL answers again")
            self._failing = False

    def _loop(self) -> None:
        deadline = float("inf")
        while True:
            try:
                self.step(self._pause())
            except Exception:
                logger.exception("keeper: unexpected; it goes on")
            if self._stopping:
                deadline = min(deadline, time.monotonic() + _FLUSH_SECONDS)
                if (not self._errands and self._inbox.empty()) or time.monotonic() > deadline:
                    self.database.close()
                    return

    def _pause(self) -> float:
        tick = min(self.settings.lease, self.settings.lost_after).total_seconds() / 3
        if self._failing or self._locked_out or self._errands or self._stopping:
            return min(0.2, tick / 3)
        due = min(self._renewed + self.settings.lease.total_seconds() / 3, self._held + tick)
        return max(0.01, min(due - time.monotonic(), tick))

    def _renew(self, conn: Connection) -> None:
        now = time.monotonic()
        live = {found.run.id: found.ticket for ref in self._deliveries.valuerefs() if (found := ref())}
        if now - self._renewed >= self.settings.lease.total_seconds() / 3:
            skipped = ledger.renew(conn, live, lease=self.settings.lease) if live else 0
            if not skipped:  # a row that somebody has locked is tried again at the next turn
                self._renewed = now
            self._locked_out = skipped > 0
        if now - self._held >= self.settings.lost_after.total_seconds() / 3:
            if live:
                ledger.hold(conn, list(live.values()), lease=self.settings.lost_after * 2)
            self._held = now

    def _run_errands(self) -> None:
        for _ in range(len(self._errands)):
            errand = self._errands[0]
            try:
                with self.database.connection() as conn:
                    done = errand(conn)
            except DatabaseUnavailable:
                self._errands.rotate(-1)  # it may wait for a lock that the others do not
                raise
            except DatabaseError as error:
                logger.error("keeper: PostgreSQL refused a write (%s); the lease will end the run", error)
                done = True
            except Exception:  # one errand must not keep the others waiting for ever
                logger.exception("keeper: an errand failed; the lease will end its run")
                done = True
            self._errands.popleft()
            if not done:
                self._errands.append(errand)

    # The errands. Each returns whether it is done; true also when the row had moved on.

    def _close_lost(
        self, delivery: Delivery, how: str, told: Told, conn: Connection, *, unclaimed: str = "reschedule"
    ) -> bool:
        return self._settle_run(conn, delivery, lambda job: judge_lost(job, how), told, unclaimed)

    def _close_timed_out(self, delivery: Delivery, limit: float, told: Told, conn: Connection) -> bool:
        error = TimeLimit(f"hard time limit of {limit:g} s exceeded")
        longest = self.settings.retry_max_delay
        return self._settle_run(
            conn, delivery, lambda job: judge_error(job, delivery.definition, error, longest=longest), told
        )

    def _settle_run(
        self,
        conn: Connection,
        delivery: Delivery,
        judge: Callable[[Job], Outcome | None],
        told: Told,
        unclaimed: str = "reschedule",
    ) -> bool:
        """End the run that a dead process held; give its row back if the process had not claimed it yet."""
        tenant, ticket, run = self.settings.tenant, delivery.ticket, delivery.run
        job = ledger.held(conn, ticket.job_id, run, tenant=tenant)
        if job is None and self._give_back(conn, ticket, unclaimed):
            told(Status.RETRY)
            return True
        # The dead process's claim may have been carried out between the two looks.
        job = job or ledger.held(conn, ticket.job_id, run, tenant=tenant)
        outcome = None if job is None else judge(job)
        if job is not None and outcome is not None:
            who = run.worker
            if ledger.settle(conn, job.id, outcome, tenant=tenant, actor=who, run=run.id, repeated=True):
                _log_closed(job, outcome)
        row = ledger.get(conn, ticket.job_id, tenant=tenant)
        current = row is not None and (row.status, row.scheduled_at) == (Status.SCHEDULED, ticket.scheduled_at)
        if job is None and current:
            return False  # somebody has locked it, perhaps that claim, still under way in the server: look again
        told(None if row is None else row.status)
        return True

    def _give_back(self, conn: Connection, ticket: Ticket, how: str) -> bool:
        tenant = self.settings.tenant
        if how == "defer":
            changed = ledger.defer(conn, ticket.job_id, DEFER, tenant=tenant, scheduled_at=ticket.scheduled_at)
        else:
            changed = ledger.reschedule(conn, [ticket.job_id], tenant=tenant, scheduled_at=ticket.scheduled_at)
        if changed:
            logger.warning("job %s: its process was lost before the claim; handed out again", ticket.job_id)
        return bool(changed)

    def _cancel(self, delivery: Delivery, terminated: bool, conn: Connection) -> bool:
        tenant, job_id, worker = self.settings.tenant, delivery.ticket.job_id, delivery.run.worker
        changed = ledger.settle(conn, job_id, Cancel(), tenant=tenant, actor=worker)
        if not changed and terminated:
            changed = ledger.settle(
                conn, job_id, Cancel(), tenant=tenant, actor=worker, run=delivery.run.id, running=True
            )
        if changed:
            logger.info("job %s: revoked in Celery; cancelled", job_id)
        return True

    def _release(self, delivery: Delivery, conn: Connection) -> bool:
        if delivery.pid is not None and self.alive(delivery.pid):
            return False  # not before its death; the flush's deadline bounds the wait
        changed = ledger.settle(
            conn,
            delivery.ticket.job_id,
            Release(),
            tenant=self.settings.tenant,
            actor=delivery.run.worker,
            run=delivery.run.id,
        )
        if changed:
            logger.info("job %s: given back by the shutdown; it runs again", delivery.ticket.job_id)
        return True

    def _unknown(self, ticket: Ticket, name: str, run: Run, conn: Connection) -> bool:
        tenant = self.settings.tenant
        if self.settings.unknown_job == "defer":
            if ledger.defer(conn, ticket.job_id, DEFER, tenant=tenant, scheduled_at=ticket.scheduled_at):
                logger.warning("job %s (%s): unknown here; put off for %s", ticket.job_id, name, DEFER)
            return True
        lease = self.settings.lease
        job = ledger.claim(conn, ticket, run, name=name, tenant=tenant, lease=lease, retry_lost=False)
        job = job or ledger.held(conn, ticket.job_id, run, tenant=tenant)  # an earlier turn's claim, unanswered
        if job is not None:
            fail = Fail(report(UnknownJob(name)))
            ledger.settle(conn, job.id, fail, tenant=tenant, actor=run.worker, run=run.id)
            logger.error(
                "job %s: no job named %r is registered here; failed, not retried. Name its module in BRIDGE_IMPORTS, "
                "or leave it to a worker that knows it with BRIDGE_UNKNOWN_JOB=defer",
                job.id,
                name,
            )
        return True


def _log_closed(job: Job, outcome: Outcome) -> None:
    match outcome:
        case Again(delay, error, reason):
            logger.warning("job %s (%s): %s; runs again in %s (%s)", job.id, job.name, error.hint, delay, reason)
        case Abort(error) | Fail(error):
            logger.error("job %s (%s): %s; %s", job.id, job.name, error.hint, error.code)
