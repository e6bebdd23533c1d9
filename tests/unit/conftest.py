"""What the unit tests share. No server is needed here, nothing connects, nothing sleeps."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from uuid import UUID

import celery
import pytest
from hypothesis import settings

import bridge.celery
from bridge import runtime
from bridge.records import Definition, Job

settings.register_profile("unit", deadline=None, max_examples=50)
settings.load_profile("unit")

_AT = datetime(2026, 11, 30, 12, tzinfo=UTC)
_ROW = {
    **dict.fromkeys(Job.__dataclass_fields__),
    "id": UUID("0199b1a7-0000-7000-8000-000000000001"),
    "tenant": "default",
    "name": "shop.pay",
    "queue": "default",
    "label": "",
    "params_text": "{}",
    "priority": 100,
    "max_retries": 3,
    "retry_num": 0,
    "status": "running",
    "scheduled_at": _AT,
    "created_at": _AT,
    "modified_at": _AT,
    "retry_lost": False,
}


@pytest.fixture(scope="session")
def make_job():
    """A running Job; keywords replace columns."""
    return lambda **columns: Job(**{**_ROW, **columns})


@pytest.fixture(scope="session")
def make_definition():
    """A Definition of plain JSON params; keywords replace its values."""

    def make(**values):
        given = {"name": "shop.pay", "handler": lambda context, params: None, "load": lambda text: {}, "dump": str}
        return Definition(**{**given, **values})

    return make


@pytest.fixture
def record(monkeypatch):
    """An empty record of apps and jobs, no default app and no variable of ours, for one test."""
    for key in [each for each in os.environ if each.startswith(("BRIDGE_", "CELERY_"))]:
        monkeypatch.delenv(key)
    fresh = runtime._Record()
    monkeypatch.setattr(runtime, "_record", fresh)
    monkeypatch.setattr(bridge.celery, "_default", [])
    return fresh


@pytest.fixture
def make_app(record):
    """Celery apps of this test; none becomes Celery's current one."""
    apps = []

    def make(name="shop"):
        apps.append(celery.Celery(name, broker="memory://", set_as_current=False))
        return apps[-1]

    yield make
    for app in apps:
        app.close()
