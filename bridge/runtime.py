"""A Bridge is one Celery app's wired verbs; this module records which there are, and says which one is current."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from bridge.database import Database
from bridge.dispatcher import Dispatcher
from bridge.errors import ConfigurationError, DuplicateJob
from bridge.keeper import Keeper
from bridge.progress import Heart
from bridge.runner import Runner
from bridge.settings import Settings
from bridge.submission import Submission


@dataclass(frozen=True, slots=True)
class Bridge:
    """The verbs, wired for one Celery app (`app`, which nothing below the Celery edge looks into)."""

    app: Any
    settings: Settings
    database: Database
    submission: Submission
    runner: Runner
    heart: Heart
    keeper: Keeper
    new_dispatcher: Callable[[], Dispatcher]


@dataclass(frozen=True, slots=True)
class Declared:
    """A handler with @job on it, and how it becomes a task of an app."""

    name: str
    handler: Callable[..., Any]
    register: Callable[[Any], None]


@dataclass(slots=True)
class _Installed:
    app: Any
    build: Callable[[], Bridge]
    bridge: Bridge | None = None


@dataclass(slots=True)
class _Record:
    """What this process knows. The one mutable global: Celery's own current app is one per thread."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    installed: list[_Installed] = field(default_factory=list)
    declared: dict[str, Declared] = field(default_factory=dict)


_record = _Record()
_running: ContextVar[Bridge | None] = ContextVar("bridge_running", default=None)


def install(app: Any, build: Callable[[], Bridge]) -> None:
    """Record an app; its Bridge is built on first use. Twice is once."""
    with _record.lock:
        if all(each.app is not app for each in _record.installed):
            _record.installed.append(_Installed(app, build))
            for declared in _record.declared.values():
                declared.register(app)


def uninstall(app: Any) -> None:
    """Forget an app, for tests and for a process that replaces its app."""
    with _record.lock:
        for each in [each for each in _record.installed if each.app is app]:
            _record.installed.remove(each)
            if each.bridge is not None:
                each.bridge.database.close()


def declare(declared: Declared) -> None:
    """Record a job; it becomes a task of every installed app, also of those installed later.

    Raises:
        DuplicateJob: another handler has the name.
    """
    with _record.lock:
        known = _record.declared.get(declared.name)
        if known is not None and not _same(known.handler, declared.handler):
            raise DuplicateJob(
                f"Two handlers are named {declared.name!r}: {_place(known.handler)} and {_place(declared.handler)}. "
                "Rename one."
            )
        _record.declared[declared.name] = declared
        for each in _record.installed:
            declared.register(each.app)


def is_installed(app: Any) -> bool:
    """Has `install(app)` been called?"""
    return any(each.app is app for each in _record.installed)


def of(app: Any) -> Bridge:
    """The Bridge of an installed app, built on first use.

    Raises:
        ConfigurationError: the app was not installed, or a setting is bad.
    """
    with _record.lock:
        for each in _record.installed:
            if each.app is app:
                if each.bridge is None:
                    each.bridge = each.build()
                return each.bridge
    raise ConfigurationError(f"The Celery app {app!r} is not installed: call bridge.install(app) where it is made")


def current(default: Callable[[], Any]) -> Bridge:
    """The Bridge of the job running now, else of the installed app, else of the default app.

    Args:
        default: makes and installs the default app.

    Raises:
        ConfigurationError: two apps are installed, and nothing says which is meant.
    """
    if (running := _running.get()) is not None:
        return running
    with _record.lock:
        installed = list(_record.installed)
    if len(installed) > 1:
        raise ConfigurationError(
            f"{len(installed)} Celery apps are installed, and nothing says which is meant: "
            "call this from one of their jobs, or install only one app in a process"
        )
    return of(installed[0].app if installed else default())


@contextmanager
def running(bridge: Bridge) -> Iterator[None]:
    """Inside the block, that Bridge is the current one."""
    token = _running.set(bridge)
    try:
        yield
    finally:
        _running.reset(token)


def _same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """A module that is reloaded makes the same function once more."""
    return _place(one) == _place(other) and getattr(one, "__code__", None) == getattr(other, "__code__", None)


def _place(handler: Callable[..., Any]) -> str:
    return f"{getattr(handler, '__module__', '?')}.{getattr(handler, '__qualname__', repr(handler))}"
