"""The dispatcher: hands due rows to the broker, takes lost ones back, ends orphans. Any number of processes.

Three kinds of transaction, each short: dispatch (per queue, one dispatcher at a time), lost, orphans. Rows
are published before their commit: a crash in between leaves a message that the claim sorts out, never a
handed-over row without one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol
from uuid import UUID

from bridge import ledger
from bridge.database import Connection, Database, Listener
from bridge.errors import BridgeError, DatabaseUnavailable, PublishError
from bridge.lifecycle import Status
from bridge.outcome import Abort, judge_orphan
from bridge.records import Handover, new_id
from bridge.settings import Settings

logger = logging.getLogger(__name__)

WINDOW_FULL = 0.05
"""Seconds until a full window is looked at again."""

BUSY = 0.01
"""Seconds between two looks while rows keep coming; the dispatcher stays awake, and submits pay no NOTIFY."""

_BUSY_AFTER = 3  # hand-overs in close succession
_IDLE_AFTER = 0.1  # seconds without one

_REFUSED = timedelta(minutes=1)
_LONGEST_ASIDE = 30.0
_ORPHANS_AT_ONCE = 100


class Publisher(Protocol):
    """The broker, as the dispatcher needs it."""

    def publish(self, rows: Sequence[Handover]) -> None:
        """Put the tickets onto their queue, or raise PublishError."""

    def depth(self, queue: str) -> int:
        """The messages that wait in a queue, or PublishError."""

    def announce_revoked(self, job_ids: Sequence[UUID]) -> None:
        """Tell Celery's monitors that these jobs, if any, are called off; best effort."""

    def close(self) -> None:
        """Drop the connection."""


@dataclass(slots=True)
class _Aside:
    """A queue that the broker refuses, left alone until a time (monotonic seconds)."""

    until: float = 0.0
    pause: float = 0.5


@dataclass(frozen=True, slots=True)
class _Sample:
    """A queue as it was at a time: the broker's messages, and the newest rows that were handed over."""

    at: datetime
    depth: int
    newest: dict[UUID, datetime]


def _newest_of_age(samples: deque[_Sample], before: datetime) -> _Sample | None:
    """The newest sample that is not younger; the older ones are dropped."""
    while len(samples) > 1 and samples[1].at <= before:
        samples.popleft()
    return samples[0] if samples[0].at <= before else None


@dataclass(slots=True)
class Dispatcher:
    """A loop; `step()` is one turn of it.

    Args:
        publisher: the broker.
        listener: wakes the loop when rows arrive; None polls only.
    """

    database: Database
    settings: Settings
    publisher: Publisher
    listener: Listener | None = None
    id: UUID = field(default_factory=new_id)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _asleep: bool | None = None
    _marked_at: float = float("-inf")
    _aside: dict[str, _Aside] = field(default_factory=dict)
    _samples: dict[str, deque[_Sample]] = field(default_factory=dict)
    _uncounted: set[str] = field(default_factory=set)
    _contact: tuple[datetime, datetime] | None = None  # since when, and when last
    _suspects: set[tuple[UUID, UUID | None]] = field(default_factory=set)
    _swept: dict[str, float] = field(default_factory=dict)
    _seen_event: int | None = None
    _trouble: str = ""
    _streak: int = 0
    _last_rows: float = float("-inf")
    _handed_over: int = 0
    _crowded: bool = False
    _full: bool = False
    _broker_gone: bool = False

    def start(self) -> None:
        """Run the loop in a thread."""
        self._thread = threading.Thread(target=self.run, name="bridge-dispatcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the loop after its present turn; does not wait."""
        self._stop.set()

    def join(self, seconds: float = 15.0) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join(seconds)

    def run(self) -> None:
        """Turn until stopped; every error is logged, once for as long as it lasts, and the loop goes on."""
        pause = 0.0
        while not self._stop.is_set():
            try:
                self._sleep(pause)
                pause = self.step()
                self._settled()
            except BridgeError as error:
                self._broken()
                pause = self._troubled(f"{type(error).__name__}: {error}")
            except Exception:
                logger.exception("dispatcher: unexpected; it goes on")
                self._broken()
                pause = self._pause_limit()
        self._end()

    def once(self) -> int:
        """Turn until nothing is due any more, without a loop.

        Returns:
            How many rows were handed over.

        Raises:
            PublishError: the broker refuses a queue; the others were handed over.
            DatabaseUnavailable: PostgreSQL does not answer.
        """
        try:
            while self.step() <= 0 and not self._stop.is_set():
                pass
            if self._aside:
                raise PublishError(f"the broker does not take queue {', '.join(sorted(self._aside))}")
            return self._handed_over
        finally:
            self._end()

    def step(self) -> float:
        """One turn: hand over what is due, sweep when it is time.

        Returns:
            Seconds until the next turn, unless something wakes the loop.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer; nothing was lost.
        """
        with self.database.connection() as conn:
            backlog = ledger.backlog(conn, tenant=self.settings.tenant)
        pause, self._crowded, self._full, self._broker_gone = self._pause_limit(), False, False, False
        for name, due_in in backlog.items():
            if self._broker_gone:
                break  # each further queue would only wait for the same dead connection
            pause = min(pause, self._dispatch(name) if due_in <= 0 else max(due_in, 0.001))
        if self._busy():
            pause = min(pause, BUSY)
        self._sweep("orphans", min(self.settings.lease.total_seconds() / 6, 5.0), self._end_orphans)
        self._sweep("lost", min(self.settings.lost_after.total_seconds() / 4, 15.0), self._recover_lost)
        self._sweep("revoked", 0.5, self._announce)
        return pause

    # Dispatch

    def _dispatch(self, name: str) -> float:
        aside = self._aside.get(name)
        if aside is not None and time.monotonic() < aside.until:
            return aside.until - time.monotonic()
        tenant, settings = self.settings.tenant, self.settings
        try:
            with self.database.transaction() as conn:
                if ledger.lock_queue(conn, name, tenant=tenant) is None:
                    self._crowded = True  # another dispatcher is at it
                    return self._pause_limit()
                batch = ledger.dispatch(conn, name, tenant=tenant, batch=settings.batch_size, window=settings.window)
                if batch.rows:
                    self._publish(conn, batch.rows)
        except PublishError as error:
            return self._set_aside(name, error)
        if self._aside.pop(name, None):
            logger.info("dispatcher: the broker takes queue %s again", name)
        self._count(len(batch.rows))
        if batch.room == 0:
            self._full = True
            return WINDOW_FULL
        return 0.0 if batch.rows else self._pause_limit()  # look again: the queue's next due time is not known

    def _count(self, rows: int) -> None:
        self._handed_over += rows
        if rows:
            now = time.monotonic()
            self._streak = self._streak + 1 if now - self._last_rows < _IDLE_AFTER else 0
            self._last_rows = now

    def _busy(self) -> bool:
        return self._streak >= _BUSY_AFTER and time.monotonic() - self._last_rows < _IDLE_AFTER

    def _publish(self, conn: Connection, rows: list[Handover]) -> None:
        try:
            self.publisher.publish(rows)
        except PublishError as error:
            if not error.refused or len(rows) == 1:
                raise
            self._publish_singly(conn, rows)

    def _publish_singly(self, conn: Connection, rows: list[Handover]) -> None:
        """The broker refused something of the batch: find out what, and put only that off."""
        refused: list[tuple[Handover, PublishError]] = []
        for row in rows:
            try:
                self.publisher.publish([row])
            except PublishError as trouble:
                if not trouble.refused:
                    raise
                refused.append((row, trouble))
        if len(refused) == len(rows):
            raise refused[0][1]
        for row, error in refused:
            ledger.defer(conn, row.ticket.job_id, _REFUSED, tenant=self.settings.tenant)
            logger.error(
                "job %s: the broker refuses its message (%s); put off for %s",
                row.ticket.job_id,
                error,
                _REFUSED,
            )

    def _set_aside(self, name: str, error: PublishError) -> float:
        self._broker_gone = not error.refused
        aside = self._aside.get(name)
        if aside is None:
            aside = self._aside[name] = _Aside()
            logger.warning(
                "dispatcher: queue %s cannot be published (%s); its rows stay due and are tried again",
                name,
                error,
            )
        aside.until = time.monotonic() + aside.pause
        pause, aside.pause = aside.pause, min(aside.pause * 2, _LONGEST_ASIDE)
        return pause

    # Sweeps

    def _sweep(self, name: str, every: float, sweep: Callable[[], None]) -> None:
        now = time.monotonic()
        if now - self._swept.get(name, float("-inf")) >= every:
            self._swept[name] = now
            sweep()

    def _end_orphans(self) -> None:
        """End the runs whose lease is over, unless renewals may have been impossible until just now."""
        tenant, ended = self.settings.tenant, []
        with self.database.transaction() as conn:
            if not self._in_contact(ledger.probe(conn)):
                self._suspects = set()
                return
            asked = time.monotonic()
            found = ledger.orphans(conn, tenant=tenant, limit=_ORPHANS_AT_ONCE)
            if time.monotonic() - asked > self.settings.lease.total_seconds() / 3:  # PostgreSQL stood still over it
                return
            for job in found:
                # Seen twice: a row that somebody had locked until just now could not be renewed.
                if (job.id, job.run_id) not in self._suspects:
                    continue
                outcome = judge_orphan(job)
                if ledger.settle(conn, job.id, outcome, tenant=tenant, actor="dispatcher", run=job.run_id):
                    ended.append((job, Status.ABORTED if isinstance(outcome, Abort) else Status.RETRY))
            self._suspects = {(job.id, job.run_id) for job in found}
        for job, status in ended:
            where = job.worker or "an unknown worker"
            logger.error("job %s (%s): its lease on %s is over; %s", job.id, job.name, where, status)

    def _in_contact(self, now: datetime) -> bool:
        """Have probes succeeded for half a lease, without a gap of a third of it by the database's clock?

        A probe is a write as renewals are. An outage, a lock on the table, a server that stood still, a
        suspended machine, a clock that jumped: each leaves a gap, after which everybody may first renew.
        """
        allowed = self.settings.lease / 3
        if self._contact is None or now - self._contact[1] > allowed:
            self._contact = (now, now)
        else:
            self._contact = (self._contact[0], now)
        return now - self._contact[0] >= self.settings.lease / 2  # a keeper has renewed within a third

    def _recover_lost(self) -> None:
        with self.database.connection() as conn:
            ages = ledger.handed_over(conn, tenant=self.settings.tenant)
        for name in self._samples.keys() - ages.keys():
            del self._samples[name]
        for name, oldest in ages.items():
            if oldest >= self.settings.lost_after.total_seconds() / 4:
                self._recover_queue(name)

    def _recover_queue(self, name: str) -> None:
        """Take back the rows whose messages are certainly gone: docs/decisions/0005-lost-messages.md."""
        tenant = self.settings.tenant
        try:
            with self.database.transaction() as conn:
                at = ledger.lock_queue(conn, name, tenant=tenant)
                if at is None:
                    return
                samples = self._samples.setdefault(name, deque())
                newest = ledger.newest(conn, name, tenant=tenant)
                samples.append(_Sample(at, self.publisher.depth(name), newest))
                old = _newest_of_age(samples, at - self.settings.lost_after)
                lost = self._lost(conn, name, old) if old else []
                if lost and (changed := ledger.reschedule(conn, lost, tenant=tenant)):
                    logger.warning(
                        "dispatcher: %d messages of queue %s are lost; their rows are published again", changed, name
                    )
        except PublishError as error:
            if name not in self._uncounted:
                self._uncounted.add(name)
                logger.warning(
                    "dispatcher: the depth of queue %s is unknown (%s); none of its rows counts as lost", name, error
                )
        else:
            self._uncounted.discard(name)

    def _lost(self, conn: Connection, name: str, sample: _Sample) -> list[UUID]:
        """Rows that were handed over before a sample of BRIDGE_LOST_AFTER ago, and that nobody claimed or held since.

        Those that exceed the messages of then are lost; and so are those that were overtaken, that is, handed
        over before a row whose message, in the queue at the time, has since been received.
        """
        found = ledger.unclaimed(conn, name, tenant=self.settings.tenant, before=sample.at)
        passed = ledger.started(conn, list(sample.newest), after=sample.at)
        reached = max((sample.newest[each] for each in passed), default=None)
        overtaken = sum(reached is not None and handed_over < reached for _, handed_over in found)
        return [job_id for job_id, _ in found[: max(overtaken, len(found) - sample.depth)]]

    def _announce(self) -> None:
        with self.database.connection() as conn:
            if self._seen_event is None:
                self._seen_event = ledger.last_revoked(conn)
                return
            found = ledger.revoked(conn, after=self._seen_event)
        if found:
            self._seen_event = found[-1][0]
            self.publisher.announce_revoked([each for _, each, tenant in found if tenant == self.settings.tenant])

    # Sleep and trouble

    def _sleep(self, pause: float) -> None:
        if self._crowded or self._full or self._busy():
            self._mark(asleep=False)
            self._stop.wait(pause)
            return
        if pause <= 0:
            return
        if self.listener is not None:
            self.listener.ready()  # before the mark, so that no notification falls between the two
        if not self._mark(asleep=True):  # a new mark: rows may have come before it, look once more
            if self.listener is None:
                self._stop.wait(pause)
            else:
                self.listener.wait(pause, self._stop, self.settings.tenant)

    def _mark(self, *, asleep: bool) -> bool:
        """Mark this dispatcher; true if the mark is new. Renewed each minute, also because a crash empties it."""
        now = time.monotonic()
        changed = self._asleep is not asleep
        if changed or now - self._marked_at > 60:
            with self.database.connection() as conn:
                ledger.mark(conn, self.id, tenant=self.settings.tenant, asleep=asleep)
            self._asleep, self._marked_at = asleep, now
        return changed

    def _broken(self) -> None:
        self._contact = self._asleep = None

    def _troubled(self, trouble: str) -> float:
        if not self._trouble:
            logger.warning("dispatcher: %s; trying again until it works, nothing is lost", trouble)
        self._trouble = trouble
        self._stop.wait(min(1.0, self._pause_limit()))
        return 0.0

    def _settled(self) -> None:
        if self._trouble:
            logger.info("dispatcher: works again")
            self._trouble = ""

    def _pause_limit(self) -> float:
        """The longest sleep: the poll interval, but never so long that the contact `_end_orphans` asks for ends."""
        return min(self.settings.poll_interval, self.settings.lease / 6).total_seconds()

    def _end(self) -> None:
        try:
            with self.database.connection() as conn:
                ledger.forget(conn, self.id)
        except DatabaseUnavailable:
            logger.debug("dispatcher: its mark stays until another one clears it")
        self.database.close()
        self.publisher.close()
        if self.listener is not None:
            self.listener.close()
