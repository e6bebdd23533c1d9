"""A job is a Celery task: JobTask turns a delivery into a run, and its verdict into Celery's words."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import celery
from celery.exceptions import Retry as CeleryRetry

from bridge import runtime
from bridge.delivery import EVENTS, RUN_HEADER, WORKER_HEADER, JobFailed, Skipped, Unsettled
from bridge.encoding import safe_text
from bridge.errors import ConfigurationError, InvalidJob
from bridge.lifecycle import Status
from bridge.pool import limits_in_our_words, soft_limit_waits
from bridge.records import Definition, Run, Ticket
from bridge.runner import Verdict
from bridge.schemas import codec
from bridge.submission import check_max_retries, check_priority, check_queue


class JobTask(celery.Task[Any, Any] if TYPE_CHECKING else celery.Task):  # type: ignore[misc]  # generic in stubs only
    """The base of every job's task: `@app.task(base=JobTask)` makes a job of a Celery task.

    Class attributes, beside Celery's own: `schema` (marshmallow Schema class or instance), `job_queue`,
    `job_priority`, `max_retries`, `retry_lost`, `retry_on_error` (False here, since an exception that nobody
    catches fails a Celery task at once; True for @job).

    Example:
        >>> app = celery.Celery("shop", set_as_current=False)
        >>> @app.task(base=JobTask, name="greet")
        ... def greet(context, params):
        ...     return f"hello {params['name']}"
        >>> greet(None, {"name": "Ada"})
        'hello Ada'
    """

    abstract = True

    # The ledger decides what is acknowledged, retried and kept; Celery must not do it a second time.
    acks_late = True
    acks_on_failure = True
    acks_on_timeout = True
    reject_on_worker_lost = False
    retry_on_worker_lost = False
    ignore_result = True
    store_errors_even_if_ignored = False
    track_started = False
    serializer = "json"
    typing = False
    throws = (JobFailed,)  # one log line; the runner has logged the traceback
    Request = "bridge.delivery:DeliveredRequest"
    Strategy = "bridge.delivery:strategy"

    schema: Any = None
    job_queue = "default"  # not `queue` and `priority`: Celery deprecates these as attributes of a task
    job_priority = 100
    max_retries: int | None = 3
    retry_lost = False
    retry_on_error = False
    _definition: Definition | None = None

    @property
    def definition(self) -> Definition:
        """The job as the ledger's verbs know it.

        Raises:
            InvalidJob: an attribute is not what a job needs.
        """
        if self._definition is None:
            self._definition = _define(self)
        return self._definition

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The plain handler; only the delivery itself is a ticket, and is that once."""
        run_id = self.request.__dict__.pop(RUN_HEADER, None)
        if run_id is None:
            return self.run(*args, **kwargs)
        ticket = Ticket.parse(args)
        run = Run(UUID(run_id), self.request.__dict__.get(WORKER_HEADER) or "")
        bridge = runtime.of(self.app)
        with runtime.running(bridge), soft_limit_waits():
            try:
                verdict = bridge.runner.run(ticket, run, self.definition)
            except (Exception, MemoryError) as error:
                # Not the handler's: claim or settle failed. MemoryError as itself would end the whole worker.
                raise Unsettled(f"{type(error).__name__}: {safe_text(error, limit=200)}") from None
            _answer(verdict)

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a message without a row would be no job.

        Raises:
            InvalidJob: always.
        """
        raise InvalidJob(
            f"{self.name!r} is a job: submit it with bridge.submit({self.name!r}, params), which writes its row"
        )


def load_modules(app: Any) -> None:
    """Import an app's job modules: `imports`, `include` and BRIDGE_IMPORTS.

    Raises:
        ConfigurationError: one of them does not exist. What a module itself raises passes through.
    """
    for name in app.loader.default_modules:
        try:
            app.loader.import_task_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and misses one of its own
            raise ConfigurationError(
                f"The job module {name!r} (BRIDGE_IMPORTS, or imports and include of the Celery configuration) "
                f"is not on the path: {error}. Start from the folder that holds it, or install it."
            ) from None


class JobHandle:
    """What @job leaves in the place of a handler: called, it is the handler; asked, it is the current app's task."""

    def __init__(self, handler: Callable[..., Any], find: Callable[[], Any]) -> None:
        functools.update_wrapper(self, handler)
        self._find = find

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """A public attribute is the task's; looking at a handler must not make an app."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._find(), name)


def declare(name: str, handler: Callable[..., Any], find: Callable[[str], Any], options: dict[str, Any]) -> JobHandle:
    """Make a job of a handler; see `bridge.job`.

    Raises:
        InvalidJob: the name or an option cannot be a job's.
        DuplicateJob: another handler has the name.
    """
    if not callable(handler):
        raise InvalidJob(f"@job({name!r}) goes onto a function of (context, params)")
    _check_handler(name, handler)
    _check_task_options(name, options)
    if inspect.iscoroutinefunction(handler) or inspect.isgeneratorfunction(handler):
        raise InvalidJob(f"Job {name!r}: a handler is a plain function, not async and without yield")
    _check_name(name)
    for option in ("retry_lost", "retry_on_error"):
        if not isinstance(options[option], bool):
            raise InvalidJob(f"Job {name!r}: {option} is True or False")
    # refused here, not in a worker or at the first submit
    codec(options["schema"], job=name)
    _check_defaults(name, options["job_queue"], options["job_priority"], options["max_retries"])

    def register(app: Any) -> None:
        known = app._tasks.get(name)
        if known is None:
            app.task(name=name, base=JobTask, shared=False, **options)(handler)

    runtime.declare(runtime.Declared(name, handler, register))
    return JobHandle(handler, lambda: find(name))


def _define(task: JobTask) -> Definition:
    name = task.name or ""
    _check_name(name)
    found = codec(task.schema, job=name)
    queue, priority, max_retries = _check_defaults(
        name, getattr(task, "queue", None) or task.job_queue, task.job_priority, task.max_retries
    )
    return Definition(
        name=name,
        handler=_in_our_words(task.run),
        load=found.load,
        dump=found.dump,
        queue=queue,
        priority=priority,
        max_retries=max_retries,
        retry_lost=task.retry_lost,
        retry_on_error=task.retry_on_error,
    )


def _check_handler(name: str, handler: Callable[..., Any]) -> None:
    if not callable(handler) or isinstance(handler, type) or getattr(handler, "__name__", "<lambda>") == "<lambda>":
        raise InvalidJob(f"Job {name!r}: a handler is a function with a name, because logs and Celery show it")
    try:
        inspect.signature(handler).bind(None, None)
    except TypeError:
        raise InvalidJob(
            f"Job {name!r}: the handler takes (context, params), not {inspect.signature(handler)}"
        ) from None


def _check_task_options(name: str, options: dict[str, Any]) -> None:
    """Celery takes any option of a task in silence; a misspelled one would be lost."""
    for option in options:
        if not hasattr(JobTask, option) or option in ("definition", "run"):
            near = difflib.get_close_matches(option, [*options, *vars(JobTask), *vars(celery.Task)], 2)
            close = [each for each in near if each != option]
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InvalidJob(f"Job {name!r}: neither the bridge nor Celery has a task option {option!r}{hint}")


def _check_defaults(name: str, queue: object, priority: object, max_retries: object) -> tuple[str, int, int]:
    try:
        return check_queue(queue), check_priority(priority), check_max_retries(max_retries)
    except InvalidJob as error:
        raise InvalidJob(f"Job {name!r}: {error}") from None


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= 200 or not name.isprintable() or " " in name:
        raise InvalidJob(
            f"A job's name is 1 to 200 printable characters without spaces, not {safe_text(name, limit=80)!r}"
        )


def _in_our_words(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler, with Celery's exceptions turned into ours."""

    def call(context: Any, params: Any) -> Any:
        with limits_in_our_words():
            return handler(context, params)

    return call


def _answer(verdict: Verdict) -> None:
    """Celery's own word for what the row says; its events, its log and Flower follow from it."""
    match verdict.status:
        case Status.COMPLETED if verdict.ran:
            return None
        case Status.RETRY if verdict.ran:
            hint = verdict.error.hint if verdict.error else ""
            seconds = verdict.delay.total_seconds() if verdict.delay is not None else None
            raise CeleryRetry(hint, JobFailed(hint), cast(Any, seconds))
        case Status.FAILED if verdict.ran and verdict.error is not None:
            raise JobFailed(f"{verdict.error.ex_type}: {verdict.error.hint}")
        case status:
            terminal = status is not None and status is not Status.RETRY
            raise Skipped(f"row: {status}", EVENTS.get(status) if status is not None and terminal else None)
