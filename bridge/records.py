"""Frozen values that travel between the rooms."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from bridge.lifecycle import EventKind, Status

_INSTANT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:?\d\d(:?\d\d(\.\d{1,6})?)?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Job:
    """A row of table `job`. Times are aware datetimes in UTC.

    `params_text` is what the worker decodes with the job's schema; `params` is the same as a plain JSON object.
    """

    id: UUID
    tenant: str
    name: str
    queue: str
    label: str
    params_text: str
    priority: int
    max_retries: int
    retry_num: int
    status: Status
    scheduled_at: datetime
    created_at: datetime
    modified_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    result: Any
    error: dict[str, str] | None
    profile_id: UUID | None
    resource_id: UUID | None
    expires_at: datetime | None
    start_before: datetime | None
    unique_key: str | None
    run_id: UUID | None
    worker: str | None
    lease_until: datetime | None
    retry_lost: bool | None
    meta: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", Status(self.status))
        for name in ("result", "error", "meta"):
            object.__setattr__(self, name, _loaded(getattr(self, name)))

    @property
    def context(self) -> Context:
        """What a handler sees of its row: five fields."""
        return Context(
            id=self.id,
            name=self.name,
            label=self.label or None,
            resource_id=self.resource_id,
            profile_id=self.profile_id,
        )

    @property
    def params(self) -> Any:
        """The params as plain JSON: text, numbers, lists, objects. Typed values are the schema's."""
        return _loaded(self.params_text)

    @property
    def has_budget(self) -> bool:
        """May it be retried once more?"""
        return self.retry_num < self.max_retries


@dataclass(frozen=True, slots=True)
class Context:
    """The first argument of a handler: exactly these five fields, immutable."""

    id: UUID
    name: str
    label: str | None
    resource_id: UUID | None
    profile_id: UUID | None


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A line of a job's history."""

    id: int
    job_id: UUID
    kind: EventKind
    payload: dict[str, Any]
    actor: str
    created_at: datetime

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", EventKind(self.kind))


TICKET_HEADER = "bridge_ticket"
"""On every message that a dispatcher publishes: its args are a ticket, whatever task of that name is registered."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """All that travels on the broker: which row, and the due time that it was handed over with."""

    job_id: UUID
    scheduled_at: datetime

    @classmethod
    def parse(cls, args: object) -> Ticket:
        """The ticket in a message's args.

        Raises:
            ValueError: they are not `[uuid, ISO 8601 instant with zone]`.

        Example:
            >>> Ticket.parse(["0199b1a7-0000-7000-8000-000000000000", "2026-11-30T12:00:00.000001+00:00"]).args[1]
            '2026-11-30T12:00:00.000001+00:00'
        """
        if not isinstance(args, list | tuple) or len(args) != 2:
            raise ValueError("the arguments are not [id, scheduled_at]")
        job_id, scheduled_at = args
        if not isinstance(job_id, str) or not isinstance(scheduled_at, str):
            raise ValueError("id and scheduled_at are not both text")
        if not _INSTANT.fullmatch(scheduled_at):
            raise ValueError("scheduled_at is not an ISO 8601 instant with a zone, of at most six decimals")
        try:
            found, instant = UUID(job_id), datetime.fromisoformat(scheduled_at)
        except ValueError:
            raise ValueError("id is not a uuid, or scheduled_at is not an ISO 8601 instant") from None
        if str(found) != job_id.lower() or instant.tzinfo is None:
            raise ValueError("id is not a plain uuid, or scheduled_at has no zone")
        return cls(found, instant)

    @property
    def args(self) -> tuple[str, str]:
        """The ticket as a message's args."""
        return str(self.job_id), self.scheduled_at.isoformat()


@dataclass(frozen=True, slots=True)
class Run:
    """One delivery of a ticket to a worker; its id guards everything after the claim."""

    id: UUID
    worker: str


@dataclass(frozen=True, slots=True)
class Handover:
    """A row that goes onto the broker: its ticket, the Celery task and the queue it is for."""

    ticket: Ticket
    name: str
    queue: str
    retry_num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A row to insert; the values are checked."""

    id: UUID
    tenant: str
    name: str
    params: str
    queue: str
    label: str = ""
    priority: int = 100
    max_retries: int = 3
    delay: timedelta = timedelta(0)
    expires_in: timedelta | None = None
    profile_id: UUID | None = None
    resource_id: UUID | None = None
    start_before: datetime | timedelta | None = None
    unique_key: str | None = None


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """What `job.error` holds."""

    type: str
    code: str
    ex_type: str
    hint: str

    @property
    def json(self) -> dict[str, str]:
        """The object that is stored."""
        return {"type": self.type, "code": self.code, "hint": self.hint, "ex_type": self.ex_type}


@dataclass(frozen=True, slots=True)
class Completion:
    """What a handler may return to set the row's resource beside its result.

    Example:
        >>> Completion({"pages": 2}, resource_id=UUID("0199b1a7-0000-7000-8000-000000000000")).result
        {'pages': 2}
    """

    result: object = None
    resource_id: UUID | str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A handler's progress report, checked."""

    current: float
    total: float | None = None
    stage: str | None = None

    @property
    def payload(self) -> dict[str, Any]:
        """The event's payload: the keys that were given."""
        pairs = (("current", self.current), ("total", self.total), ("stage", self.stage))
        return {key: value for key, value in pairs if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A job as it is registered: its name, its handler, how its params are decoded, its defaults.

    `load` turns JSON text into what the handler gets, `dump` the reverse; both raise InvalidParams.
    """

    name: str
    handler: Callable[..., Any]
    load: Callable[[str], Any]
    dump: Callable[[Any], str]
    queue: str = "default"
    priority: int = 100
    max_retries: int = 3
    retry_lost: bool = False
    retry_on_error: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


def new_id() -> UUID:
    """A fresh time-ordered id (RFC 9562, version 7)."""
    if sys.version_info >= (3, 14):
        return uuid.uuid7()
    stamp = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (stamp & (1 << 48) - 1) << 80 | random
    value = value & ~(0xF << 76) | 0x7 << 76
    return UUID(int=value & ~(0x3 << 62) | 0x2 << 62)


def _loaded(text: object) -> object:
    """JSON as PostgreSQL sent it. What plain SQL wrote and Python cannot hold stays the text that it is."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def check_progress(report: object) -> Progress:
    """A progress report as a value.

    Raises:
        ValueError: it is not a mapping of current (≥ 0), total (> 0 and ≥ current) and stage (≤ 250 characters).
    """
    if not isinstance(report, Mapping):
        raise ValueError("progress is a mapping with the keys current, total and stage")
    if unknown := sorted(str(key) for key in report.keys() - {"current", "total", "stage"}):
        raise ValueError(f"progress has no key {unknown[0]!r}: only current, total and stage")
    current, total, stage = report.get("current"), report.get("total"), report.get("stage")
    if current is None or not _finite(current) or current < 0:
        raise ValueError("progress.current is a number of at least 0")
    if total is not None and (not _finite(total) or total <= 0 or total < current):
        raise ValueError("progress.total is a number above 0 and not below current")
    if stage is not None and (not isinstance(stage, str) or len(stage) > 250 or "\0" in stage):
        raise ValueError("progress.stage is text of at most 250 characters")
    if stage is not None:
        _encodable(stage)
    return Progress(current, total, stage)


def _finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -(2.0**63) <= value < 2.0**63


def _encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("progress.stage holds a lone surrogate, which is not text") from None
