"""What follows from a handler's end: pure, total, no clock.

`judge` decides, `ledger.settle` acts. The table is docs/life-of-a-job.md, "How a handler's end is mapped".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from bridge.encoding import dumps, safe_text
from bridge.errors import EncodingError, Interrupted, InvalidParams, Retry, UnknownJob
from bridge.lifecycle import RetryReason
from bridge.records import Completion, Definition, ErrorReport, Job

BASE_DELAY = timedelta(seconds=1)

ORPHAN = ErrorReport("internal", "orphan", "orphan", "job execution lease expired")


class TimeLimit(Exception):
    """The job ran into its time limit; the message says which."""


class Unfinished(Exception):
    """The handler called finish, and returned without the commit of its transaction."""


class BadEnvelope(Exception):
    """A handler returned a resource that cannot be set on the row."""

    def __init__(self, code: str, hint: str) -> None:
        super().__init__(hint)
        self.code = code


@dataclass(frozen=True, slots=True)
class Complete:
    """The job is done. `result` is JSON text; `lost_result` says why a result became null."""

    result: str | None
    resource_id: UUID | None = None
    lost_result: str | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """The job failed for good."""

    error: ErrorReport


@dataclass(frozen=True, slots=True)
class Again:
    """The job runs again after `delay`; "noop" uses up no retry."""

    delay: timedelta
    error: ErrorReport
    reason: RetryReason


@dataclass(frozen=True, slots=True)
class Release:
    """The run is given back untried: due now, no retry used up."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The run is over and nobody knows how far it came."""

    error: ErrorReport


@dataclass(frozen=True, slots=True)
class Cancel:
    """The job is called off."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The handler has completed the row itself, by finish; nothing is left to write."""


Outcome = Complete | Fail | Again | Release | Abort | Cancel


def judge_return(job: Job | None, value: object) -> Complete | Fail:
    """The outcome of a handler that returned; of one that runs without a row, its value is all there is to judge."""
    try:
        result, resource_id = _envelope(job, value)
    except BadEnvelope as error:
        return Fail(ErrorReport("validation", error.code, "validation", safe_text(error)))
    except Exception as error:
        return Complete(None, lost_result=f"raised {type(error).__name__} while it was looked at")
    if result is None:
        return Complete(None, resource_id)
    try:
        return Complete(dumps(result), resource_id)
    except EncodingError as error:
        return Complete(None, resource_id, lost_result=str(error))
    except Exception as error:  # a property, a __str__ or an __iter__ of the user's own value
        return Complete(None, resource_id, lost_result=f"raised {type(error).__name__} while it was encoded")


def judge_error(job: Job, definition: Definition, error: BaseException, *, longest: timedelta) -> Outcome | None:
    """The outcome of a handler that raised; None when the row is no longer this run's.

    Args:
        longest: the cap of the doubling; a base delay above it is kept as it is.
    """
    match error:
        case Interrupted():
            return None
        case Retry():
            base = error.delay if error.delay is not None else BASE_DELAY
            noop = error.strategy == "noop"
            reason = RetryReason.NOOP if noop else RetryReason.BACKOFF
            return _again(job, report(error), base, reason, longest)
        case _ if definition.retry_on_error:
            return _again(job, _of_handler(error), BASE_DELAY, RetryReason.BACKOFF, longest)
        case _:
            return Fail(_of_handler(error))


def judge_lost(job: Job, hint: str) -> Outcome:
    """The outcome of a run whose process died: once more if the job allows it, otherwise aborted."""
    error = ErrorReport("internal", "worker-lost", "worker-lost", safe_text(hint))
    return _lost(job, error)


def judge_orphan(job: Job) -> Outcome:
    """The outcome of a run whose lease is over: once more if the job allows it, otherwise aborted."""
    return _lost(job, ORPHAN)


def _lost(job: Job, error: ErrorReport) -> Outcome:
    if job.retry_lost and job.has_budget:
        return Again(timedelta(0), error, RetryReason.LOST)
    return Abort(error)


def _again(job: Job, error: ErrorReport, base: timedelta, reason: RetryReason, longest: timedelta) -> Outcome:
    if not job.has_budget:
        return Fail(error)
    retry_num = job.retry_num + (reason is not RetryReason.NOOP)
    return Again(delay(base, retry_num, longest=longest), error, reason)


def delay(base: timedelta, retry_num: int, *, longest: timedelta) -> timedelta:
    """base × 2^(max(1, retry_num) - 1), never below the base, capped.

    Example:
        >>> delay(timedelta(seconds=1), 3, longest=timedelta(hours=1))
        datetime.timedelta(seconds=4)
    """
    doublings = min(max(1, retry_num) - 1, 62)
    if base.total_seconds() * 2.0**doublings >= longest.total_seconds():
        return max(base, longest)
    return timedelta(seconds=base.total_seconds() * 2.0**doublings)


def report(error: BaseException) -> ErrorReport:
    """What `job.error` says of an exception; safe for jsonb, bounded, whatever its str() does."""
    match error:
        case Retry():
            return ErrorReport("retry", "failed", "retry", safe_text(error.hint) or "retry")
        case UnknownJob():
            return ErrorReport("not-found", "no-job-definition", "not-found", safe_text(error))
        case InvalidParams():
            return ErrorReport("assertion", "data-validation", "assertion", safe_text(error.fields))
        case TimeLimit() | TimeoutError():
            return ErrorReport("internal", "timeout", "timeout", safe_text(error) or "time limit exceeded")
        case _:
            return _ordinary(error)


def _of_handler(error: BaseException) -> ErrorReport:
    """A handler's own submit may be refused: that is an exception of the handler, not of its job."""
    return _ordinary(error) if isinstance(error, UnknownJob | InvalidParams) else report(error)


def _ordinary(error: BaseException) -> ErrorReport:
    kind = safe_text(type(error).__name__, limit=200)
    return ErrorReport("internal", "failed", kind, safe_text(error).strip() or kind)


def _envelope(job: Job | None, value: object) -> tuple[object, UUID | None]:
    match value:
        case Completion():
            result, resource = value.result, value.resource_id
        case Mapping() if "resource_id" in value:
            result, resource = value.get("result"), value["resource_id"]
        case _:
            return value, None
    if resource is None:
        return result, None
    found = _uuid(resource)
    if found is None:
        raise BadEnvelope(
            "invalid-resource-id",
            "resource_id is not a uuid: return {'result': …, 'resource_id': UUID or its text}",
        )
    if job is not None and job.resource_id not in (None, found):
        raise BadEnvelope(
            "resource-already-associated",
            "the job already has a resource: return the result alone, or the same resource_id",
        )
    return result, found


def _uuid(value: object) -> UUID | None:
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value) if isinstance(value, str) else None
    except ValueError:
        return None
