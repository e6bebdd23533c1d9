"""The machine as data: the statuses of a job and the only moves between them.

The table stands here and nowhere else: `bridge.ledger` hands its sources and target to the statements,
the tests generate every status × writer from it, docs/life-of-a-job.md draws it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Status(StrEnum):
    """Where a job stands."""

    NEW = "new"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    RETRY = "retry"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    ABORTED = "aborted"


PENDING = frozenset({Status.NEW, Status.SCHEDULED, Status.RETRY})
ACTIVE = PENDING | {Status.RUNNING}
TERMINAL = frozenset(Status) - ACTIVE


class EventKind(StrEnum):
    """What a line of a job's history says."""

    START = "start"
    PROGRESS = "progress"
    RETRY = "retry"
    END = "end"


class RetryReason(StrEnum):
    """Why a job runs again: it asked to, it asked without having tried, or its run was lost."""

    BACKOFF = "backoff"
    NOOP = "noop"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Move:
    """One writer: the statuses it may leave, the one it enters, and the event that it writes with it."""

    sources: tuple[Status, ...]
    target: Status
    event: EventKind | None


MOVES: Mapping[str, Move] = MappingProxyType(
    {
        "dispatch": Move((Status.NEW, Status.RETRY), Status.SCHEDULED, None),
        "claim": Move((Status.NEW, Status.SCHEDULED, Status.RETRY), Status.RUNNING, EventKind.START),
        "complete": Move((Status.RUNNING, Status.RETRY), Status.COMPLETED, EventKind.END),
        "fail": Move((Status.RUNNING, Status.RETRY), Status.FAILED, EventKind.END),
        "retry": Move((Status.RUNNING, Status.RETRY), Status.RETRY, EventKind.RETRY),
        "release": Move((Status.RUNNING,), Status.RETRY, EventKind.RETRY),
        "cancel": Move((Status.NEW, Status.SCHEDULED, Status.RETRY), Status.CANCELLED, EventKind.END),
        "abort": Move((Status.RUNNING,), Status.ABORTED, EventKind.END),
        "reschedule": Move((Status.SCHEDULED,), Status.NEW, None),
        "defer": Move((Status.NEW, Status.SCHEDULED), Status.NEW, None),
    }
)

_USER_STATUS: Mapping[Status, str] = MappingProxyType(
    {
        **dict.fromkeys(PENDING, "pending"),
        Status.RUNNING: "running",
        Status.COMPLETED: "completed",
        **dict.fromkeys(TERMINAL - {Status.COMPLETED}, "failed"),
    }
)


def user_status(status: Status | str) -> str:
    """The status that a user sees: pending, running, completed or failed.

    Raises:
        ValueError: it is no status of a job.

    Example:
        >>> user_status("aborted")
        'failed'
    """
    return _USER_STATUS[Status(status)]
