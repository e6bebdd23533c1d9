"""The dispatcher: hands due rows to the broker, takes lost ones back, ends orphans. Any number of processes.

Three kinds of transaction, each short: dispatch (per queue, one dispatcher at a time), lost, orphans. Rows
are published before their commit: a crash in between leaves a message that the claim sorts out, never a
handed-over row without one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol
from uuid import UUID

from bridge import ledger
from bridge.database import Connection, Database
from bridge.errors import BridgeError, DatabaseUnavailable, PublishError
from bridge.listener import Listener
from bridge.records import Handover, new_id
from bridge.settings import Settings
from bridge.sweeps import LostMessages, Orphans

logger = logging.getLogger(__name__)

WINDOW_FULL = 0.05
"""Seconds until a full window is looked at again."""

BUSY = 0.01
"""Seconds between two looks while rows keep coming; the dispatcher stays awake, and submits pay no NOTIFY."""

_BUSY_AFTER = 3  # hand-overs in close succession
_IDLE_AFTER = 0.1  # seconds without one

_REFUSED = timedelta(minutes=1)
_LONGEST_ASIDE = 30.0


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
    _orphans: Orphans = field(init=False)
    _lost: LostMessages = field(init=False)
    _swept: dict[str, float] = field(default_factory=dict)
    _seen_event: int | None = None
    _trouble: str = ""
    _streak: int = 0
    _last_rows: float = float("-inf")
    _handed_over: int = 0
    _crowded: bool = False
    _full: bool = False
    _broker_gone: bool = False

    def __post_init__(self) -> None:
        self._orphans = Orphans(self.database, self.settings)
        self._lost = LostMessages(self.database, self.settings, self.publisher.depth)

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
        self._sweep("orphans", min(self.settings.lease.total_seconds() / 6, 5.0), self._orphans.sweep)
        self._sweep("lost", min(self.settings.lost_after.total_seconds() / 4, 15.0), self._lost.sweep)
        self._sweep("late", 1.0, self._cancel_late)
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

    # Sweeps: bridge.sweeps does them

    def _sweep(self, name: str, every: float, sweep: Callable[[], None]) -> None:
        now = time.monotonic()
        if now - self._swept.get(name, float("-inf")) >= every:
            self._swept[name] = now
            sweep()

    def _cancel_late(self) -> None:
        with self.database.connection() as conn:
            late = ledger.late(conn, tenant=self.settings.tenant, actor="dispatcher", limit=self.settings.batch_size)
        for job_id in late:
            logger.info("job %s: it was to start before now; cancelled", job_id)

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
        self._orphans.broken()
        self._asleep = None

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
        """The longest sleep: the poll interval, but short enough for the contact that ending orphans asks for."""
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
