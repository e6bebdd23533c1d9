from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading

import pytest

import bridge
from bridge import runtime
from bridge.errors import ConfigurationError, DuplicateJob, SettingError


def pay(context, params):
    return params


def no_default():
    pytest.fail("the default app was made")


def declared(name, handler):
    registered = []
    runtime.declare(runtime.Declared(name, handler, registered.append))
    return registered


def test_the_installed_app_is_the_current_one(make_app):
    app = bridge.install(make_app())
    found = runtime.current(no_default)
    assert found.app is app
    assert found is runtime.of(app)


def test_installing_twice_is_once(make_app, record):
    app = make_app()
    assert bridge.install(bridge.install(app)) is app
    assert len(record.installed) == 1
    assert runtime.is_installed(app)


def test_two_installed_apps_and_no_choice_is_an_error_that_says_so(make_app):
    for name in ("shop", "mail"):
        bridge.install(make_app(name))
    with pytest.raises(ConfigurationError, match="2 Celery apps are installed, and nothing says which is meant"):
        runtime.current(no_default)


def test_the_app_of_the_running_job_is_the_current_one(make_app):
    shop, _ = bridge.install(make_app("shop")), bridge.install(make_app("mail"))
    with runtime.running(runtime.of(shop)):
        assert runtime.current(no_default).app is shop
    with pytest.raises(ConfigurationError):
        runtime.current(no_default)


def test_without_an_installed_app_the_default_one_is_made_on_first_use(record):
    found = bridge.celery.default
    assert record.installed == []
    assert runtime.current(found).app is found()
    assert len(record.installed) == 1


def test_a_thread_sees_the_installed_app(make_app):
    app, seen = bridge.install(make_app()), []
    thread = threading.Thread(target=lambda: seen.append(runtime.current(no_default).app))
    thread.start()
    thread.join()
    assert seen == [app]


def test_an_app_that_is_not_installed_has_no_bridge(make_app):
    with pytest.raises(ConfigurationError, match="is not installed"):
        runtime.of(make_app())


def test_installing_reads_no_setting_and_the_first_use_does(make_app, monkeypatch):
    monkeypatch.setenv("BRIDGE_LEASE", "soon")
    app = bridge.install(make_app())
    with pytest.raises(SettingError, match="BRIDGE_LEASE"):
        runtime.of(app)


def test_a_job_becomes_a_task_of_apps_installed_before_and_after(make_app):
    before, after = bridge.install(make_app("before")), make_app("after")
    registered = declared("shop.pay", pay)
    bridge.install(after)
    assert registered == [before, after]


def test_two_handlers_of_one_name_are_refused_and_both_are_named(record):
    declared("shop.pay", pay)
    with pytest.raises(DuplicateJob, match=r"'shop.pay': .*\.pay and .*no_default\. Rename one"):
        declared("shop.pay", no_default)
    assert record.declared["shop.pay"].handler is pay


def test_two_handlers_that_are_written_differently_in_one_place_are_refused(record):
    declared("shop.pay", lambda context, params: 1)
    with pytest.raises(DuplicateJob):
        declared("shop.pay", lambda context, params: 2)


def test_the_same_handler_twice_is_fine(record):
    declared("shop.pay", pay)
    declared("shop.pay", pay)
    assert list(record.declared) == ["shop.pay"]


IMPORT = """
    import json, os, socket, sys, threading
    import alembic.command, celery, kombu, marshmallow, prometheus_client, psycopg, sqlalchemy  # they may read theirs
    from celery import _state
    import celery.worker.request, celery.worker.strategy, celery.worker.components

    assert "bridge" not in sys.modules
    read, connected = [], []
    plain = os._Environ.__getitem__

    def watched(environ, key):
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__", "").split(".")[0] == "bridge":
                read.append(key)
            frame = frame.f_back
        return plain(environ, key)

    os._Environ.__getitem__ = watched
    sys.addaudithook(lambda event, args: connected.append(event) if event.startswith("socket.") else None)

    import bridge, bridge.celery

    @bridge.job("shop.pay")
    def pay(context, params): ...

    pay(None, {})
    print(json.dumps({
        "read": [key for key in read if key.startswith(("BRIDGE", "CELERY", "PG"))],
        "connected": connected,
        "threads": threading.active_count(),
        "current": repr(_state._tls.current_app or _state.default_app),
        "installed": len(bridge.runtime._record.installed) + len(bridge.celery._default),
    }))
"""


@pytest.fixture(scope="module")
def imported():
    """What a fresh process saw while it imported the bridge and declared a job."""
    environ = {"BRIDGE_LEASE": "soon", "BRIDGE_DATABASE_URL": "no address", "PATH": ""}
    code = textwrap.dedent(IMPORT)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=environ, capture_output=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("what", "expected"), [("read", []), ("connected", []), ("threads", 1), ("current", "None"), ("installed", 0)]
)
def test_importing_the_bridge_and_declaring_a_job_does_nothing(imported, what, expected):
    assert imported[what] == expected
