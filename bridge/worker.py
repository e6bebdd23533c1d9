"""What a Celery worker does more when the bridge is installed: keeper, dispatcher, queues, unknown jobs."""

from __future__ import annotations

import logging
import sys
from typing import Any

from celery import Celery, bootsteps, signals
from celery.utils.text import str_to_list

from bridge import envelope, runtime
from bridge.delivery import Strategies
from bridge.dispatcher import Dispatcher
from bridge.errors import BridgeError, DatabaseUnavailable
from bridge.migrating import check
from bridge.publishing import queue_name
from bridge.records import Ticket
from bridge.task import JobTask, load_modules

logger = logging.getLogger(__name__)


class KeeperStep(bootsteps.StartStopStep):
    """A step of the consumer, because these end last: leases are renewed until the pool is empty.

    Celery stops and starts consumer steps at each reconnect of the broker; the keeper goes on through that.
    """

    label = "Bridge keeper"

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        parent.strategies = Strategies(parent, lambda message, name: _to_keeper(parent, message, name))

    def start(self, parent: Any) -> None:
        """Start the keeper, once."""
        runtime.of(parent.app).keeper.start(parent.hostname)

    def stop(self, parent: Any) -> None:
        """Nothing: runs are still executed."""

    def shutdown(self, parent: Any) -> None:
        """The pool is gone: write what is left, and end."""
        runtime.of(parent.app).keeper.stop()


class DispatcherStep(bootsteps.StartStopStep):
    """A dispatcher in the worker's main process, unless BRIDGE_DISPATCHER=standalone."""

    label = "Bridge dispatcher"
    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self.dispatcher: Dispatcher | None = None
        if parent.pool_cls.__module__.endswith(".eventlet"):
            sys.exit("bridge: psycopg blocks every greenlet of the eventlet pool. Use: -P gevent")
        self.enabled = _ready(parent.app).settings.dispatcher == "worker"

    def start(self, parent: Any) -> None:
        """Start it."""
        self.dispatcher = runtime.of(parent.app).new_dispatcher()
        self.dispatcher.start()

    def close(self, parent: Any) -> None:
        """Hand over nothing more."""
        if self.dispatcher is not None:
            self.dispatcher.stop()

    def stop(self, parent: Any) -> None:
        """Wait for its last turn."""
        self.close(parent)
        if self.dispatcher is not None:
            self.dispatcher.join()

    terminate = stop


def _ready(app: Celery) -> runtime.Bridge:
    """The app's Bridge on a database that it fits; otherwise the worker ends with one sentence.

    A database that does not answer is no reason to end: the worker waits for it.
    """
    try:
        bridge = runtime.of(app)
        bridge.settings.database()
        if not (app.conf.broker_url or app.conf.broker_read_url):
            logger.warning("no broker is set, so Celery's default is used, amqp://localhost: set BRIDGE_BROKER_URL")
        jobs = [task for task in app.tasks.values() if isinstance(task, JobTask)]
        for task in jobs:
            _ = task.definition  # a bad one is refused now, not when its first message comes
        if not jobs:
            logger.warning("this worker knows no jobs: name their modules in BRIDGE_IMPORTS")
        with bridge.database.connection() as conn:
            check(conn)
        bridge.database.close()
    except DatabaseUnavailable as error:
        logger.warning("%s; the worker starts, and waits for it", error)
    except BridgeError as error:
        sys.exit(f"bridge: {error}")
    return runtime.of(app)


def prepare(app: Celery) -> None:
    """Add the bridge's steps to an app's workers."""
    app.steps["consumer"].add(KeeperStep)
    app.steps["worker"].add(DispatcherStep)


@signals.import_modules.connect(weak=False)
def _load_modules(sender: Any = None, **_: object) -> None:
    """A worker's first act is to import the job modules: what is ours to refuse ends it with one sentence."""
    if runtime.is_installed(sender) and sender.loader.worker_initialized:
        try:
            load_modules(sender)
        except BridgeError as error:
            sys.exit(f"bridge: {error}")


_excluded_queues: dict[int, list[str]] = {}
"""By worker, what -X says, of those that were not told by -Q what to consume."""


@signals.celeryd_init.connect(weak=False)
def _before_init(instance: Any = None, options: Any = None, **_: object) -> None:
    """Before -Q is applied, and before the first connection: remember what was chosen, guard the broker."""
    if runtime.is_installed(instance.app):
        envelope.use()
        if not (options or {}).get("queues"):
            _excluded_queues[id(instance)] = str_to_list((options or {}).get("exclude_queues") or "")


@signals.worker_init.connect(weak=False)
def _add_queues(sender: Any = None, **_: object) -> None:
    """After the job modules are imported: without -Q, consume `default` and the queue of every job, except -X."""
    app = sender.app
    excluded = _excluded_queues.pop(id(sender), None)
    if not runtime.is_installed(app) or excluded is None:
        return
    tenant, queues = runtime.of(app).settings.tenant, app.amqp.queues
    names = {"default", *(task.job_queue for task in app.tasks.values() if isinstance(task, JobTask))}
    for name in sorted(queue_name(tenant, name) for name in names):
        # as a dispatcher declares it: RabbitMQ refuses one queue of two types
        queues.select_add(queues[name] if queues.create_missing or name in queues else name)
    if app.main == "bridge" and tenant != "default":
        queues.deselect("default")  # the default app's own queue: tickets there are another tenant's
    queues.deselect(excluded)


@signals.task_unknown.connect(weak=False)
def _unknown(sender: Any = None, message: Any = None, name: str = "", **_: object) -> None:
    """A message for a task that is not registered: if it is a ticket, its row must hear of it."""
    if isinstance(name, str) and runtime.is_installed(getattr(sender, "app", None)):
        _to_keeper(sender, message, name)


def _to_keeper(consumer: Any, message: Any, name: str) -> None:
    """Let the row of a ticket hear that nobody here knows its job, and the monitors if that ends it."""
    bridge = runtime.of(consumer.app)
    try:
        ticket = Ticket.parse(message.payload[0])
    except Exception as error:  # a plain Celery task's message, or junk: Celery has logged it
        logger.debug("unknown task %s is no ticket (%s)", name, type(error).__name__)
    else:
        bridge.keeper.unknown(ticket, name)
        if bridge.settings.unknown_job == "fail" and consumer.event_dispatcher:
            why = f"no job named {name!r} is registered"
            consumer.event_dispatcher.send("task-failed", uuid=str(ticket.job_id), exception=why, traceback="")
