"""Submit, look, cancel: validate everything, then one statement."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from bridge import ledger, progress
from bridge.database import Database, joined, nested
from bridge.encoding import dumps, safe_text
from bridge.errors import DatabaseUnavailable, EncodingError, InvalidJob, InvalidParams, KeyTaken, milliseconds
from bridge.lifecycle import Status
from bridge.outcome import Cancel
from bridge.records import Context, Definition, Job, JobEvent, NewJob, new_id
from bridge.settings import Settings

OPERATOR = "operator"
T = TypeVar("T")

_LOOKS = 20
_QUEUE = re.compile(r"[A-Za-z0-9_.:-]{1,150}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a caller may say of a job beside its name and params; None takes the job's own default."""

    delay: int | timedelta = 0
    queue: str | None = None
    label: str = ""
    priority: int | None = None
    max_retries: int | None = None
    dedupe: bool = False
    profile_id: UUID | str | None = None
    resource_id: UUID | str | None = None
    expires_in: int | timedelta | None = None
    start_before: datetime | int | timedelta | None = None
    unique_key: str | None = None
    on_conflict: str = "return"


@dataclass(frozen=True, slots=True)
class Submission:
    """The verbs of a producer.

    Args:
        definition: finds a registered job by its name, or raises UnknownJob.
    """

    database: Database
    settings: Settings
    definition: Callable[[str], Definition]

    def submit(self, name: str, params: object, options: Options, conn: object) -> UUID:
        """See `bridge.submit`."""
        definition = self.definition(name)
        _check_sameness(options)
        job = self._new(definition, _dump(definition, params), options)
        if conn is not None:
            with joined(conn) as caller:
                return self._write(caller, job, options)
        return self._repeated(lambda own: self._write(own, job, options))

    def submit_many(self, name: str, many: Sequence[object], options: Options, conn: object) -> list[UUID]:
        """See `bridge.submit_many`."""
        if options.dedupe or options.unique_key is not None:
            raise InvalidJob("submit_many takes no dedupe and no unique_key: submit the jobs one by one")
        if isinstance(many, str | bytes) or not isinstance(many, Sequence):
            raise InvalidJob(f"submit_many takes a list of params, not a {type(many).__name__}")
        definition = self.definition(name)
        texts = []
        for index, params in enumerate(many):
            try:
                texts.append(_dump(definition, params))
            except InvalidParams as error:
                raise InvalidParams(f"number {index}: {error}", fields=error.fields) from None
        if not texts:
            return []
        job = self._new(definition, texts[0], options)
        ids = [new_id() for _ in texts]
        if conn is not None:
            with joined(conn) as caller:
                ledger.insert_many(caller, job, ids, texts)
        else:
            self._repeated(lambda own: ledger.insert_many(own, job, ids, texts))
        return ids

    def invoke(self, name: str, raw: object, *, context: Context | None, job_id: UUID | str | None) -> Any:
        """See `bridge.invoke`."""
        definition = self.definition(name)
        if context is not None and not isinstance(context, Context):
            raise InvalidJob("context takes a bridge.Context, or nothing: then one is made")
        try:
            text = dumps({} if raw is None else raw)
        except EncodingError as error:
            raise InvalidParams(f"params {error}") from None
        if context is None:
            found = new_id() if job_id is None else as_uuid(job_id, name="job_id")
            context = Context(id=found, name=name, label=None, resource_id=None, profile_id=None)
        loaded = definition.load(text)
        with progress.invoked():
            return definition.handler(context, loaded)

    def cancel(self, job_id: UUID | str, conn: object, *, running: bool) -> int:
        """See `bridge.cancel`."""
        found = as_uuid(job_id, name="job_id")
        if not isinstance(running, bool):
            raise InvalidJob("running is True or False: may a job that has started be called off too?")
        with self._open(conn) as one:
            return ledger.settle(one, found, Cancel(), tenant=self.settings.tenant, actor=OPERATOR, running=running)

    def get_job(self, job_id: UUID | str) -> Job | None:
        """See `bridge.get_job`."""
        with self.database.connection() as conn:
            return ledger.get(conn, as_uuid(job_id, name="job_id"), tenant=self.settings.tenant)

    def get_events(self, job_id: UUID | str) -> list[JobEvent]:
        """See `bridge.get_events`."""
        with self.database.connection() as conn:
            return ledger.events(conn, as_uuid(job_id, name="job_id"), tenant=self.settings.tenant)

    def _new(self, definition: Definition, params: str, options: Options) -> NewJob:
        expires = options.expires_in
        return NewJob(
            id=new_id(),
            tenant=self.settings.tenant,
            name=definition.name,
            params=params,
            queue=check_queue(definition.queue if options.queue is None else options.queue),
            label=_text("label", options.label),
            priority=check_priority(definition.priority if options.priority is None else options.priority),
            max_retries=check_max_retries(
                definition.max_retries if options.max_retries is None else options.max_retries
            ),
            delay=_duration("delay", options.delay),
            expires_in=None if expires is None else _duration("expires_in", expires),
            profile_id=_optional("profile_id", options.profile_id),
            resource_id=_optional("resource_id", options.resource_id),
            start_before=_start_before(options.start_before),
            unique_key=options.unique_key if options.unique_key is None else _key(options.unique_key),
        )

    def _write(self, conn: ledger.AnyConnection, job: NewJob, options: Options) -> UUID:
        if options.dedupe:
            with nested(conn):
                ledger.dedupe(conn, job)
                ledger.insert(conn, job)
        elif job.unique_key is not None:
            with nested(conn):
                return self._write_unique(conn, job, options.on_conflict)
        else:
            ledger.insert(conn, job)
        return job.id

    def _write_unique(self, conn: ledger.AnyConnection, job: NewJob, on_conflict: str) -> UUID:
        """The index decides; what it says of is looked at, and may have moved on by then."""
        for _ in range(_LOOKS):
            if ledger.insert(conn, job):
                return job.id
            taken = ledger.active(conn, job)
            if taken is None:
                if ledger.get(conn, job.id, tenant=job.tenant) is not None:
                    return job.id  # by a try whose answer was lost; it has ended since
                continue
            if taken.id == job.id or on_conflict == "return":
                return taken.id
            if on_conflict == "raise" or taken.status is Status.RUNNING:
                raise KeyTaken(
                    f"job {taken.id} ({taken.name}, {taken.status}) has the unique_key {job.unique_key!r}",
                    job_id=taken.id,
                )
            ledger.settle(conn, taken.id, Cancel(), tenant=job.tenant, actor=OPERATOR)
        raise DatabaseUnavailable(f"others take and give the unique_key {job.unique_key!r} too fast; try again")

    def _repeated(self, write: Callable[[ledger.AnyConnection], T]) -> T:
        """Once more if the answer was lost: the id is made, so that the second try cannot double the job."""
        try:
            with self.database.connection() as conn:
                return write(conn)
        except DatabaseUnavailable:
            with self.database.connection() as conn:
                return write(conn)

    def _open(self, conn: object) -> AbstractContextManager[ledger.AnyConnection]:
        return self.database.connection() if conn is None else joined(conn)


def as_uuid(value: UUID | str, *, name: str) -> UUID:
    """An id that a caller gave.

    Raises:
        InvalidJob: it is no uuid.
    """
    if isinstance(value, UUID):
        return UUID(int=value.int)
    try:
        return UUID(value)
    except (ValueError, AttributeError, TypeError):
        raise InvalidJob(f"{name} is not a uuid: {safe_text(value, limit=80)!r}") from None


def _dump(definition: Definition, params: object) -> str:
    try:
        return definition.dump({} if params is None else params)
    except InvalidParams as error:
        raise InvalidParams(f"Job {definition.name!r} was not submitted: {error}", fields=error.fields) from None


def _check_sameness(options: Options) -> None:
    if not isinstance(options.dedupe, bool):
        raise InvalidJob("dedupe is True or False; what is equal is said by name, queue and label")
    if options.on_conflict not in ("return", "raise", "replace"):
        raise InvalidJob(
            f"on_conflict is 'return', 'raise' or 'replace', not {safe_text(options.on_conflict, limit=80)!r}"
        )
    if options.on_conflict != "return" and options.unique_key is None:
        raise InvalidJob(f"on_conflict={options.on_conflict!r} speaks of a unique_key: give one")
    if options.dedupe and options.unique_key is not None:
        raise InvalidJob("dedupe and unique_key are two ways to say what is equal: give one")


def _start_before(value: datetime | int | timedelta | None) -> datetime | timedelta | None:
    if not isinstance(value, datetime):
        return None if value is None else _duration("start_before", value)
    if value.utcoffset() is None:
        raise InvalidJob("start_before has no zone: give an aware datetime, or a duration from now")
    if not 1970 <= value.year < 9999:
        raise InvalidJob("start_before lies between the years 1970 and 9998")
    return value


def _key(value: object) -> str:
    return _text("unique_key", value, low=1)


def _optional(name: str, value: UUID | str | None) -> UUID | None:
    return None if value is None else as_uuid(value, name=name)


def _duration(name: str, value: int | timedelta) -> timedelta:
    try:
        return milliseconds(value, name=name)
    except ValueError as error:
        raise InvalidJob(str(error)) from None


def check_priority(value: object) -> int:
    """A job's priority: -32768 to 32767, higher first, or InvalidJob."""
    return _whole("priority", value, -32768, 32767)


def check_max_retries(value: object) -> int:
    """How often a job may run again: 0 to 100,000, or InvalidJob: a job without a limit has no budget."""
    return _whole("max_retries", value, 0, 100_000)


def check_queue(value: object) -> str:
    """A logical queue's name as every broker takes it, or InvalidJob."""
    if not isinstance(value, str) or not _QUEUE.fullmatch(value):
        raise InvalidJob(f"queue is 1 to 150 of the characters A-Z a-z 0-9 _ . : -, not {safe_text(value, limit=80)!r}")
    return value


def _whole(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidJob(f"{name} is a whole number from {low} to {high}, not {safe_text(value, limit=80)!r}")
    return value


def _text(name: str, value: object, *, low: int = 0) -> str:
    if not isinstance(value, str) or not low <= len(value) <= 250:
        raise InvalidJob(f"{name} is text of {f'{low} to' if low else 'at most'} 250 characters")
    try:
        dumps(value)
    except EncodingError as error:
        raise InvalidJob(f"{name} {error}") from None
    return value
