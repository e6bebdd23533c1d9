"""A message as the worker's main process sees it.

`strategy` refuses what is no ticket before Celery can trip over it; `DeliveredRequest` stamps each delivery
with its run, and tells the keeper what becomes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import Celery
from celery.exceptions import Ignore, Retry
from celery.worker.request import Request
from celery.worker.state import task_ready
from celery.worker.strategy import default
from kombu.asynchronous import get_event_loop

from bridge import runtime
from bridge.encoding import safe_text
from bridge.keeper import Delivery
from bridge.lifecycle import Status
from bridge.records import TICKET_HEADER, Ticket

logger = logging.getLogger(__name__)

RUN_HEADER = "bridge_run"
WORKER_HEADER = "bridge_worker"


class Strategies(dict[str, Callable[..., Any]]):
    """A consumer's strategies by task name, which let no ticket reach a task that is no job.

    A row may name any task of the app, say celery.backend_cleanup; only a job may be run by one. A name that
    is not registered, or is no text, is Celery's to report, unless its message is a ticket.
    """

    def __init__(self, consumer: Any, unknown: Callable[[Any, str], None]) -> None:
        super().__init__()
        self._consumer = consumer
        self._unknown = unknown

    def __getitem__(self, name: Any) -> Callable[..., Any]:
        if isinstance(name, str) and name in self:
            return super().__getitem__(name)
        return self._guarded(name, None)

    def __setitem__(self, name: str, handle: Callable[..., Any]) -> None:
        super().__setitem__(name, handle if getattr(handle, "checks_tickets", False) else self._guarded(name, handle))

    def _guarded(self, name: Any, handle: Callable[..., Any] | None) -> Callable[..., Any]:
        def guarded(message: Any, body: Any, ack: Any, *args: Any, **kwargs: Any) -> Any:
            if TICKET_HEADER in (message.headers or {}) and isinstance(name, str):
                self._unknown(message, name)
                return ack(logger, self._consumer.connection_errors)
            if handle is None:
                return self._consumer.on_unknown_task(body, message, KeyError(name))
            return handle(message, body, ack, *args, **kwargs)

        return guarded


class Skipped(Ignore):
    """Nothing was run. `event` is what Celery's monitors are told: the row's true state, if that is terminal."""

    def __init__(self, reason: str = "", event: str | None = None) -> None:
        super().__init__(reason, event)
        self.event = event


class JobFailed(Exception):
    """What Celery is told of a failed job: the class and the hint of its error. The row says more."""


class Unsettled(Exception):
    """The child could not claim or write the outcome for good; its main process closes the run."""


def strategy(task: Any, app: Celery, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Celery's default strategy behind a check: what is no ticket is logged, acknowledged and skipped."""
    handle = default(task, app, consumer, **options)

    def checked(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **kwargs: Any) -> Any:
        try:
            _ticket(message)
        except ValueError as error:
            logger.error("a message for %s is no ticket (%s); skipped", task.name, error)
            return ack(logger, consumer.connection_errors)
        return handle(message, body, ack, reject, callbacks, **kwargs)

    checked.checks_tickets = True  # type: ignore[attr-defined]  # read by Strategies
    return checked


def _ticket(message: Any) -> Ticket:
    """The ticket of a message.

    Raises:
        ValueError: it does not decode, or is not `[[id, scheduled_at], {}, {…}]` with that id in its header.
    """
    try:
        payload = message.payload
    except Exception as error:  # whatever a serializer raises on whatever was sent
        raise ValueError(f"its body does not decode: {type(error).__name__}") from None
    if not (isinstance(payload, list | tuple) and len(payload) == 3):
        raise ValueError("its body is not [args, kwargs, embed]")
    args, kwargs, embed = payload
    if kwargs != {} or not (embed is None or (isinstance(embed, dict) and not any(embed.values()))):
        raise ValueError("its body carries more than a ticket")
    ticket = Ticket.parse(args)
    if message.headers.get("id") != str(ticket.job_id):
        raise ValueError("its header names another id")
    # How a job runs is said by its task and its row: whatever else Celery would read from a message is set.
    message.headers.update(_HEADERS)
    for name in ("argsrepr", "kwargsrepr", "origin"):
        message.headers[name] = safe_text(message.headers.get(name) or "", limit=200)
    if not isinstance(message.headers.get("retries"), int):
        message.headers["retries"] = 0
    return ticket


_HEADERS: dict[str, Any] = {
    "eta": None,
    "expires": None,
    "timelimit": [None, None],
    "shadow": None,
    "group": None,
    "group_index": None,
    "root_id": None,
    "parent_id": None,
    "ignore_result": True,
    "replaced_task_nesting": 0,
    "stamped_headers": None,
    "stamps": {},
}


class DeliveredRequest(Request):  # type: ignore[misc]  # untyped in celery-types
    """One delivery of a ticket. What the child cannot write any more, the keeper does."""

    _cancelled = False
    _timed_out = False

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        bridge = runtime.of(self.app)
        self._keeper = bridge.keeper
        self._delivery: Delivery = self._keeper.receive(Ticket.parse(self.args), self.task.definition)
        # Read by JobTask in the child; in threads and solo the same dict is handed over as it is.
        self._request_dict[RUN_HEADER] = str(self._delivery.run.id)
        self._request_dict[WORKER_HEADER] = self._delivery.run.worker

    def __init_subclass__(cls, **options: Any) -> None:
        """Celery's create_request_cls subclasses us with an on_success of its own, which calls no super."""
        super().__init_subclass__(**options)
        replaced = cls.__dict__.get("on_success")
        if replaced is not None:

            def on_success(self: DeliveredRequest, failed__retval__runtime: Any, **kwargs: Any) -> Any:
                self._delivery.pid = None  # nothing executes it any more
                failed, _, seconds = failed__retval__runtime
                if not failed and seconds is None:
                    return self._killed()
                if not failed:
                    self._keeper.done(self._delivery)
                return replaced(self, failed__retval__runtime, **kwargs)

            cls.on_success = on_success

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """A child has it."""
        self._delivery.pid = pid
        super().on_accepted(pid, time_accepted)

    def on_failure(self, exc_info: ExceptionInfo, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """The child raised (return_ok), and has written the outcome; or it is gone, and has not."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, Skipped):
            return self._skip(error)
        if isinstance(error, Unsettled):
            self._keeper.unsettled(self._delivery, f"it could not be carried out: {error}", self._tell)
            send_failed_event = False
        elif return_ok and isinstance(error, JobFailed | Retry):
            self._keeper.done(self._delivery)
        elif return_ok:  # Celery's own machinery failed around the run
            self._keeper.unsettled(self._delivery, f"it could not be carried out: {type(error).__name__}", self._tell)
            send_failed_event = False
        elif self._cancelled:
            self._keeper.released(self._delivery)
        elif isinstance(error, TimeLimitExceeded):
            # Celery calls on_timeout right after this: one close, one event, with the row's own state.
            send_failed_event = False
        elif isinstance(error, WorkerLostError | SystemExit | KeyboardInterrupt):
            self._keeper.lost(self._delivery, _how(error), self._tell)
            send_failed_event = False
        elif not isinstance(error, Terminated):
            self._keeper.lost(self._delivery, f"the pool lost it: {type(error).__name__}", self._tell)
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """A soft limit is the handler's to see; at a hard one the child has been killed."""
        if not soft:
            self._timed_out = True
            self._keeper.timed_out(self._delivery, timeout, self._tell)
        super().on_timeout(soft, timeout)

    def send_event(self, type: str, **fields: Any) -> None:
        """Celery announces a hard time limit as a failure by itself; the keeper says what became of the row."""
        ours = fields.pop("bridge", False)
        if ours or not (self._timed_out and type == "task-failed"):
            super().send_event(type, **fields)

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> None:
        self._cancelled = True
        self._keeper.cancelled(self._delivery)
        super()._announce_cancelled(*args, **kwargs)

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        self._keeper.revoked(self._delivery, terminated=terminated)
        super()._announce_revoked(reason, terminated, signum, expired)

    def _killed(self) -> None:
        """A killed greenlet; Celery's gevent pool calls this a success without a result and without a duration."""
        task_ready(self)
        self.acknowledge()
        if self._cancelled:
            self._keeper.released(self._delivery)
        else:  # nothing to do if it was revoked
            self._keeper.lost(self._delivery, "the greenlet that ran it was killed", self._tell)

    def _skip(self, skipped: Skipped) -> None:
        task_ready(self)
        self._keeper.done(self._delivery)
        self.acknowledge()
        if skipped.event == "task-revoked":
            self.send_event(skipped.event, terminated=False, signum=None, expired=False)
        elif skipped.event is not None:
            self.send_event(skipped.event, **_fields(skipped.event))

    def _tell(self, status: Status | None) -> None:
        """From the keeper's thread: the monitors hear what the row says, sent by the thread that owns them."""
        event = EVENTS.get(status) if status is not None else None
        if event is None:
            return
        send = partial(self.send_event, event, **_fields(event))
        loop = get_event_loop()
        if loop is None:
            send()
        else:
            loop.call_soon(send)


EVENTS = {
    Status.COMPLETED: "task-succeeded",
    Status.FAILED: "task-failed",
    Status.CANCELLED: "task-revoked",
    Status.ABORTED: "task-revoked",
    Status.RETRY: "task-retried",
}
"""What Celery calls a status: its monitors show SUCCESS, FAILURE, REVOKED and RETRY."""


def _fields(event: str) -> dict[str, Any]:
    match event:
        case "task-succeeded":
            return {"result": "None", "runtime": 0.0}
        case "task-failed":
            return {"exception": "see job.error", "traceback": "", "bridge": True}
        case "task-retried":
            return {"exception": "see job.error", "traceback": ""}
        case _:
            return {"terminated": True, "signum": None, "expired": False}


def _how(error: BaseException) -> str:
    said = str(error).strip() or type(error).__name__
    return f"the process that ran it died: {said}"
