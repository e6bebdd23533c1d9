"""The dispatcher's two sweeps: runs whose lease is over, and rows whose messages are lost."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from bridge import ledger
from bridge.database import Connection, Database
from bridge.errors import PublishError
from bridge.lifecycle import Status
from bridge.outcome import Abort, judge_orphan
from bridge.settings import Settings

logger = logging.getLogger(__name__)

_ORPHANS_AT_ONCE = 100


@dataclass(slots=True)
class Orphans:
    """Ends runs whose lease is over: docs/decisions/0009-ending-a-run.md."""

    database: Database
    settings: Settings
    _contact: tuple[datetime, datetime] | None = None  # since when, and when last
    _suspects: set[tuple[UUID, UUID | None]] = field(default_factory=set)

    def broken(self) -> None:
        """PostgreSQL did not answer: everybody may first renew."""
        self._contact = None

    def sweep(self) -> None:
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
class LostMessages:
    """Takes back the rows whose messages are certainly gone: docs/decisions/0005-lost-messages.md.

    Args:
        depth: the messages that wait in a queue on the broker, or PublishError.
    """

    database: Database
    settings: Settings
    depth: Callable[[str], int]
    _samples: dict[str, deque[_Sample]] = field(default_factory=dict)
    _uncounted: set[str] = field(default_factory=set)

    def sweep(self) -> None:
        """Sample the queues that hold handed-over rows for long, and take back what is lost."""
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
                samples.append(_Sample(at, self.depth(name), newest))
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
