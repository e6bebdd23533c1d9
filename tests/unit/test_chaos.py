"""The chaos run's own verdict: it must be able to say lost, double and illegal."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from bridge.records import new_id
from tests.chaos.verdict import is_double, is_illegal, is_lost, runs

AT = datetime(2026, 1, 1, tzinfo=UTC)
JOB, ONE, TWO = new_id(), new_id(), new_id()


def told(*said):
    rows = [(JOB, run, what, AT + timedelta(seconds=second)) for run, what, second in said]
    return runs(rows).get(JOB, [])


ENDED = told((ONE, "start", 0), (ONE, "on", 1), (ONE, "end", 2))
DOUBLES = {
    "one run": (ENDED, False),
    "killed, then run again": (told((ONE, "start", 0), (ONE, "on", 1), (TWO, "start", 2), (TWO, "end", 3)), False),
    "one run started twice": (told((ONE, "start", 0), (ONE, "start", 1), (ONE, "end", 2)), True),
    "two runs at once": (told((ONE, "start", 0), (TWO, "start", 1), (ONE, "on", 2), (TWO, "end", 3)), True),
}


@pytest.mark.parametrize(("runs", "double"), DOUBLES.values(), ids=DOUBLES.keys())
def test_double(runs, double):
    assert is_double(runs) is double


@pytest.mark.parametrize(
    ("status", "runs", "lost"),
    [
        ("completed", ENDED, False),
        ("completed", [], True),
        ("failed", [], True),
        ("cancelled", [], False),
        ("aborted", [], False),
        ("scheduled", ENDED, True),
        (None, ENDED, True),
    ],
)
def test_lost(status, runs, lost):
    assert is_lost(status, runs) is lost


def start(attempt):
    return ("start", {"attempt": attempt})


def again(attempt, reason="backoff"):
    return ("retry", {"attempt": attempt, "reason": reason})


def end(outcome):
    return ("end", {"outcome": outcome})


LEGAL = {
    "new": ("new", []),
    "running": ("running", [start(1), ("progress", {"current": 1})]),
    "completed": ("completed", [start(1), end("completed")]),
    "never started": ("cancelled", [end("cancelled")]),
    "again": ("failed", [start(1), again(2), start(2), again(2, "noop"), start(2), again(3, "lost"), end("failed")]),
}
ILLEGAL = {
    "no end": ("completed", [start(1)]),
    "another end": ("completed", [start(1), end("failed")]),
    "two ends": ("completed", [start(1), end("completed"), end("completed")]),
    "an end and no terminal status": ("running", [start(1), end("completed")]),
    "something after the end": ("completed", [start(1), end("completed"), ("progress", {"current": 1})]),
    "two starts in a row": ("completed", [start(1), start(1), end("completed")]),
    "a retry without start": ("completed", [again(2), start(2), end("completed")]),
    "an end without start": ("completed", [end("completed")]),
    "an attempt counted twice": ("completed", [start(1), again(3), start(3), end("completed")]),
    "an attempt not counted": ("completed", [start(1), again(2), start(1), end("completed")]),
}


@pytest.mark.parametrize(("status", "events"), LEGAL.values(), ids=LEGAL.keys())
def test_legal(status, events):
    assert not is_illegal(status, events)


@pytest.mark.parametrize(("status", "events"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_illegal(status, events):
    assert is_illegal(status, events)
