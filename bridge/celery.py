"""The composition root: what is constructed is constructed here. Also where `celery -A bridge` finds its app."""

from __future__ import annotations

import logging
import os
import threading
from importlib.util import find_spec
from typing import Any, cast

from celery import Celery
from celery.utils.imports import cwd_in_path

from bridge import pool, runtime, worker
from bridge.database import Database
from bridge.dispatcher import Dispatcher
from bridge.encoding import safe_text
from bridge.errors import ConfigurationError, SettingError, UnknownJob
from bridge.keeper import Keeper
from bridge.listener import Listener
from bridge.progress import Heart
from bridge.publishing import CeleryPublisher
from bridge.records import Definition
from bridge.runner import Runner
from bridge.settings import Settings, broker_url, modules
from bridge.submission import Submission
from bridge.task import JobTask, load_modules

logger = logging.getLogger(__name__)

CHANNEL = "bridge_due"
PRODUCER_CONNECTIONS = 8

_BELOW_THE_USERS_OWN = {
    "worker_prefetch_multiplier": 1,  # a reserved ticket waits for this worker alone
    "broker_connection_retry_on_startup": True,
    "worker_cancel_long_running_tasks_on_connection_loss": False,  # the run goes on; its row is the truth
    "worker_deduplicate_successful_tasks": False,  # a retry has the id of the run before it
}

_lock = threading.Lock()
_default: list[Celery] = []


def install(app: Celery) -> Celery:
    """See `bridge.install`."""
    if not isinstance(app, Celery):
        raise ConfigurationError(f"install takes a Celery app, not a {type(app).__name__}")
    if not runtime.is_installed(app):
        worker.prepare(app)
        app.on_after_configure.connect(_lay_below, weak=False)
        if cast(Any, app).configured:
            _lay_below(sender=app)
        runtime.install(app, lambda: build(app))
    return app


def default() -> Celery:
    """The default app, made and installed on first use."""
    with _lock:
        if not _default:
            app = Celery("bridge", set_as_current=False)
            app.conf.task_default_queue = "default"
            name = os.environ.get("CELERY_CONFIG_MODULE") or "celeryconfig"
            if _exists(name):
                app.config_from_object(name)
            _default.append(app)
        return install(_default[0])


def build(app: Celery) -> runtime.Bridge:
    """Read the settings and wire the verbs of an app. Connects to nothing.

    Raises:
        SettingError: a setting is bad.
    """
    settings = Settings.load(os.environ, app.conf)
    _point_at_broker(app)
    database = Database(settings.database, size=PRODUCER_CONNECTIONS)

    def new_dispatcher() -> Dispatcher:
        listener = None
        if settings.listen_url != "off":
            listener = Listener(Database(settings.listen_url or settings.database, name="bridge-listener"), CHANNEL)
        own = Database(settings.database, name="bridge-dispatcher")
        return Dispatcher(own, settings, CeleryPublisher(app, settings.tenant), listener)

    return runtime.Bridge(
        app=app,
        settings=settings,
        database=database,
        submission=Submission(database, settings, lambda name: definition(app, name)),
        runner=Runner(database, settings, pool.ends_run),
        heart=Heart(database, settings),
        keeper=Keeper(Database(settings.database, name="bridge-keeper", lock_timeout="500ms"), settings, pool.alive),
        new_dispatcher=new_dispatcher,
    )


def definition(app: Celery, name: str) -> Definition:
    """The job of that name in an app's registry, its job modules imported first.

    Raises:
        UnknownJob: there is none.
        ConfigurationError: a job module does not exist.
    """
    task = app.tasks.get(name) if isinstance(name, str) else None
    if task is None and isinstance(name, str):
        load_modules(app)
        app.loader.import_default_modules()  # and what autodiscover_tasks waits to be asked for
        task = app.tasks.get(name)
    if not isinstance(task, JobTask):
        known = sorted(each for each, found in app.tasks.items() if isinstance(found, JobTask))
        raise UnknownJob(
            f"No job named {safe_text(name, limit=80)!r} is registered in this process. "
            f"Known: {', '.join(known) or 'none'}. Import its module, or name the module in BRIDGE_IMPORTS."
        )
    return task.definition


def _lay_below(sender: Celery, **_: object) -> None:
    """Our defaults go between the user's configuration and Celery's defaults: add_defaults would beat the user's."""
    maps = cast(list[Any], sender.conf.maps)
    if not any(each is _BELOW_THE_USERS_OWN for each in maps):
        maps.insert(len(maps) - 1, _BELOW_THE_USERS_OWN)
    try:
        _point_at_broker(sender)
    except SettingError as error:  # raised again by whoever builds the Bridge; Celery's signals only log errors
        logger.error("%s", error)
    try:
        wanted = modules(os.environ.get("BRIDGE_IMPORTS", ""))
    except ValueError:
        wanted = ()  # refused by name when the settings are read
    sender.conf.imports = tuple(dict.fromkeys((*sender.conf.imports, *wanted)))


def _point_at_broker(app: Celery) -> None:
    """BRIDGE_BROKER_URL is the broker of everything that this app does, `celery flower`, `inspect` and `purge` too."""
    url = os.environ.get("BRIDGE_BROKER_URL")
    if not url:
        return
    try:
        url = broker_url(url)
    except ValueError as error:
        raise SettingError(f"BRIDGE_BROKER_URL: its value {error}.") from None
    for name in ("CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL"):
        if os.environ.get(name):
            raise SettingError(f"BRIDGE_BROKER_URL and {name} are both set, and Celery would follow {name}: unset one.")
    conf: Any = app.conf
    # broker_url too: what Celery adds for quorum queues asks for that one alone
    conf.broker_url = conf.broker_read_url = conf.broker_write_url = url


def _exists(module: str) -> bool:
    """Is there a module of that name, here or on the path? One that is there and broken is the user's to see."""
    with cwd_in_path():
        try:
            return find_spec(module) is not None
        except ModuleNotFoundError:
            return False


def __getattr__(name: str) -> Any:
    """`bridge.celery.app`, which Celery looks for: the default app, made when asked for."""
    if name == "app":
        return default()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
