"""Every exception of the bridge. A docstring is the sentence that an operator reads.

BridgeError
├── ConfigurationError      a setting, an app or a server is not as the bridge needs it
│   ├── SettingError        one setting has a bad value (named, never echoed if it may be secret)
│   └── SchemaError         the database is not migrated, or holds tables that are not ours
├── InvalidJob              what was submitted or registered cannot be a job; nothing was written
│   ├── InvalidParams       the params do not fit the job's schema, or are not JSON
│   ├── UnknownJob          no job of that name is registered in this process
│   ├── DuplicateJob        two handlers claim one name
│   └── KeyTaken            an active job has this unique_key already
├── DatabaseError           PostgreSQL refused a statement, for good
│   └── DatabaseUnavailable PostgreSQL could not be asked now; the same may work in a moment
├── EncodingError           a value has no JSON form
└── PublishError            the broker could not be told now

What a handler may raise: Retry, Interrupted.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal
from uuid import UUID

LONGEST_DELAY = timedelta(days=3660)


class BridgeError(Exception):
    """Something that the bridge refuses or could not do."""


class ConfigurationError(BridgeError):
    """A setting, an app or a server is not as the bridge needs it."""


class SettingError(ConfigurationError):
    """One setting has a bad value."""


class SchemaError(ConfigurationError):
    """The database does not hold the tables that this version of the bridge needs."""


class InvalidJob(BridgeError, ValueError):
    """What was submitted or registered cannot be a job; nothing was written."""


class InvalidParams(InvalidJob):
    """The params do not fit the job's schema, or are not plain JSON.

    `fields` names what is wrong and never holds a value: it is stored as the hint of a failed job.
    """

    def __init__(self, message: str, *, fields: str = "") -> None:
        super().__init__(message)
        self.fields = fields or message


class UnknownJob(InvalidJob):
    """No job of that name is registered in this process."""


class DuplicateJob(InvalidJob):
    """Two different handlers claim one job name."""


class KeyTaken(InvalidJob):
    """An active job of this name has the unique_key already; `job_id` says which."""

    def __init__(self, message: str, *, job_id: UUID) -> None:
        super().__init__(message)
        self.job_id = job_id


class DatabaseError(BridgeError):
    """PostgreSQL refused a statement, and would refuse it again."""


class DatabaseUnavailable(DatabaseError):
    """PostgreSQL could not be asked now; the same statement may succeed in a moment."""


class EncodingError(BridgeError, ValueError):
    """A value has no JSON form that PostgreSQL can store."""


class PublishError(BridgeError):
    """The broker did not take the tickets; they stay due and are published again.

    `refused` says that it answered, and refused: something of the batch may be at fault, not the connection.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Retry(Exception):
    """Raised by a handler: run me again later.

    Args:
        hint: why, in words for the operator; stored as the error's hint.
        delay: base delay, an int of milliseconds or a timedelta; None means 1000 ms.
        strategy: "backoff" doubles the delay with every attempt and uses up one of the job's retries;
            "noop" says that nothing was tried: the same delay again, and the budget stays as it is.

    Raises:
        ValueError: the delay is negative or beyond ten years, or the strategy is unknown.

    Example:
        >>> raise Retry("card network is busy", delay=5000)
        Traceback (most recent call last):
        bridge.errors.Retry: card network is busy
    """

    # For a subclass that forgets our constructor.
    hint: str = ""
    delay: timedelta | None = None
    strategy: str = "backoff"

    def __init__(
        self,
        hint: str = "",
        *,
        delay: int | timedelta | None = None,
        strategy: Literal["backoff", "noop"] = "backoff",
    ) -> None:
        super().__init__(hint)
        self.hint = hint
        self.delay = milliseconds(delay, name="Retry(delay=…)") if delay is not None else None
        if strategy not in ("backoff", "noop"):
            raise ValueError(f"Retry(strategy=…) is 'backoff' or 'noop', not {strategy!r}")
        self.strategy = strategy


class Interrupted(Exception):
    """Raised in a handler by heartbeat: this run no longer holds the row, stop working.

    The row was cancelled, aborted, or given to another run; whatever this run writes changes nothing.
    """


def milliseconds(value: int | timedelta, *, name: str) -> timedelta:
    """A public delay, an int of milliseconds or a timedelta, as a timedelta.

    Raises:
        ValueError: it is neither, is negative, or lies beyond ten years.
    """
    if isinstance(value, bool) or not isinstance(value, int | timedelta):
        raise ValueError(f"{name} takes whole milliseconds or a timedelta, not {type(value).__name__}")
    if isinstance(value, int):
        if abs(value) > LONGEST_DELAY // timedelta(milliseconds=1):
            raise ValueError(f"{name} lies between 0 and ten years")
        value = timedelta(milliseconds=value)
    if not timedelta(0) <= value <= LONGEST_DELAY:
        raise ValueError(f"{name} lies between 0 and ten years")
    return value
