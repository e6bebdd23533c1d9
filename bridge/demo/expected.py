"""How each job must end, and whether it did: its row and its history, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

import bridge


@dataclass(frozen=True, slots=True)
class Expected:
    """What a job's row must say at the end.

    Args:
        ex_type: the kind of its error; None means that it has none.
        not_before: how long after its submission it may start at the earliest.
        progress: must its history tell how far it was?
    """

    name: str
    status: str = "completed"
    retry_num: int = 0
    ex_type: str | None = None
    resource_id: UUID | None = None
    not_before: timedelta = timedelta(0)
    progress: bool = False

    @property
    def history(self) -> list[str]:
        """Its events, progress aside: every attempt starts, and is followed by a retry or the end.

        Example:
            >>> Expected("shop.charge", retry_num=1).history
            ['start 1', 'retry 2 backoff', 'start 2', 'end completed']
        """
        if self.status == "cancelled":
            return ["end cancelled"]  # called off before it started
        lines = []
        for attempt in range(1, self.retry_num + 1):
            lines += [f"start {attempt}", f"retry {attempt + 1} backoff"]
        return [*lines, f"start {self.retry_num + 1}", f"end {self.status}"]


def differences(job_id: UUID, expected: Expected) -> Iterator[str]:
    """What the job's row and history say otherwise than expected; nothing, if all is well."""
    job = bridge.get_job(job_id)
    if job is None:
        yield f"{expected.name} {job_id}: there is no such row"
        return
    said, progressed = history(job_id)
    pairs = {
        "name": (job.name, expected.name),
        "status": (str(job.status), expected.status),
        "retry_num": (job.retry_num, expected.retry_num),
        "error": (job.error and job.error["ex_type"], expected.ex_type),
        "resource_id": (job.resource_id, expected.resource_id),
        "has started": (job.started_at is not None, expected.status != "cancelled"),
        "has completed_at": (job.completed_at is not None, expected.status == "completed"),
        "history": (said, expected.history),
        "reports progress": (progressed, expected.progress),
    }
    for what, (found, wanted) in pairs.items():
        if found != wanted:
            yield f"{expected.name} {job_id}: {what} is {found!r}, should be {wanted!r}"
    if job.started_at is not None and job.started_at < job.created_at + expected.not_before:
        yield f"{expected.name} {job_id}: it started {job.started_at - job.created_at} after its submission, too early"


def history(job_id: UUID) -> tuple[list[str], bool]:
    """The job's events as short lines, and whether there was progress that reached its total."""
    lines, progressed = [], False
    for event in bridge.get_events(job_id):
        if event.kind == "progress":
            progressed = event.payload["current"] == event.payload["total"]
        else:
            said = [event.payload[key] for key in ("attempt", "reason", "outcome") if key in event.payload]
            lines.append(" ".join(map(str, [event.kind, *said])))
    return lines, progressed
