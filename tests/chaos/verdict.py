"""What the run shows: lost, double, illegal. Nothing here asks the ledger's own code."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any
from uuid import UUID

HISTORY = re.compile(
    r"(?:start\d+ (?:progress )*retry\d+(?:backoff|noop|lost) )*(?:start\d+ (?:progress )*)?"
    r"(?:end(?P<outcome>\w+) )?"
)
"""The grammar of a job's events: starts that each led to a retry, then perhaps a last start, then perhaps an end."""

TERMINAL = ("completed", "failed", "cancelled", "aborted")


@dataclass(frozen=True, slots=True)
class Told:
    """What the body of one run told: when it started, each time, when it last was heard of, whether it ended."""

    run: UUID
    starts: int
    first: datetime
    last: datetime
    ended: bool


def runs(rows: Iterable[tuple[UUID, UUID, str, datetime]]) -> dict[UUID, list[Told]]:
    """What was told of each job, run by run, the earliest first."""
    told: dict[UUID, dict[UUID, list[tuple[str, datetime]]]] = defaultdict(lambda: defaultdict(list))
    for job_id, run, what, at in rows:
        told[job_id][run].append((what, at))
    found = {}
    for job_id, each in told.items():
        found[job_id] = sorted(
            (
                Told(
                    run,
                    sum(what == "start" for what, _ in said),
                    min(at for _, at in said),
                    max(at for _, at in said),
                    any(what == "end" for what, _ in said),
                )
                for run, said in each.items()
            ),
            key=lambda one: one.first,
        )
    return found


def is_double(of_job: Sequence[Told]) -> bool:
    """Two starts of one run, or a run that was heard of after the next one's start."""
    if any(one.starts > 1 for one in of_job):
        return True
    return any(later.first < earlier.last for earlier, later in pairwise(of_job))


def is_lost(status: str | None, of_job: Sequence[Told]) -> bool:
    """No row, no end, or an end that says it ran though its body never did.

    An aborted job is not lost: its row says that its process died and that nobody knows how far it came.
    """
    if status not in TERMINAL:
        return True
    return not of_job and status not in ("cancelled", "aborted")


def is_illegal(status: str, events: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """A history that the grammar does not take, whose attempts do not count up, or that contradicts the row."""
    text = "".join(
        f"{kind}{said.get('attempt', '')}{said.get('reason', '')}{said.get('outcome', '')} " for kind, said in events
    )
    match = HISTORY.fullmatch(text)
    if text.startswith("end") and status != "cancelled":
        return True
    if match is None or (match["outcome"] or "") != (status if status in TERMINAL else ""):
        return True
    attempt = 1
    for kind, said in events:
        if kind == "start" and said["attempt"] != attempt:
            return True
        if kind == "retry":
            attempt += said["reason"] != "noop"
            if said["attempt"] != attempt:
                return True
    return False
