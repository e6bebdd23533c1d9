"""unique_key under race, start_before, and the cancel of a job that runs."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from celery import Celery

import bridge
from bridge import runtime
from bridge.errors import DatabaseUnavailable, InvalidJob, KeyTaken
from tests.integration.test_reference import run_here
from tests.support import Side, Stack, until

SUBMIT = """
import os, sys, time, bridge, tests.jobs
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
for n in range(125):
    print(bridge.submit("plain", {"n": n}, unique_key="one", delay=3_600_000, on_conflict=sys.argv[1]))
"""
ACTIVE = "SELECT id FROM job WHERE unique_key = 'one' AND status IN ('new', 'scheduled', 'running', 'retry')"


@pytest.mark.parametrize("on_conflict", ["return", "replace"])
def test_a_thousand_submits_of_eight_processes_leave_one_active_row(
    stack: Stack, side: Side, tmp_path: Path, on_conflict: str
) -> None:
    go = tmp_path / "go"
    racers = [stack.start(["-c", SUBMIT, on_conflict, str(go)]) for _ in range(8)]
    go.touch()
    for racer in racers:
        assert racer.popen.wait(100) == 0, racer.log
    said = {UUID(line) for racer in racers for line in racer.log.splitlines()}
    (active,) = side.rows(ACTIVE)
    if on_conflict == "return":
        assert said == {active["id"]}
        assert len(side.rows("SELECT FROM job")) == 1
    else:
        assert (len(said), active["id"] in said) == (1000, True)
        assert side.counts() == {"new": 1, "cancelled": 999}
        assert len(side.rows("SELECT FROM job_event WHERE payload->>'outcome' = 'cancelled'")) == 999


def test_a_conflict_returns_raises_or_replaces(app: Celery, side: Side, database_url: str) -> None:
    def submit(on_conflict: Any, **options: Any) -> UUID:
        return bridge.submit("plain", {}, unique_key="one", on_conflict=on_conflict, **options)

    first = submit("raise")
    assert submit("return") == first
    with pytest.raises(KeyTaken, match=r"job .* \(plain, new\) has the unique_key 'one'") as caught:
        submit("raise")
    assert caught.value.job_id == first
    with psycopg.connect(database_url) as caller:
        with pytest.raises(KeyTaken):
            submit("raise", conn=caller)
        beside = bridge.submit("plain", {}, conn=caller)  # the transaction goes on
        second = submit("replace", conn=caller)
        caller.rollback()
    assert (side.status(first), side.rows("SELECT FROM job WHERE id IN (%s, %s)", beside, second)) == ("new", [])
    second = submit("replace")
    assert (side.status(first), side.status(second)) == ("cancelled", "new")
    side.conn.execute("UPDATE job SET status = 'running' WHERE id = %s", (second,))
    assert submit("return") == second
    with pytest.raises(KeyTaken, match="running"):
        submit("replace")
    assert bridge.cancel(second, running=True) == 1
    third = submit("raise")
    assert len({first, second, third}) == 3
    assert bridge.submit("quick", {}, unique_key="one") != third  # a key is one of its job's


def test_a_key_that_ends_between_two_looks_is_taken_again(app: Celery, side: Side) -> None:
    """Somebody ends the active row again and again, while others ask for its key."""
    stop = threading.Event()

    def end() -> None:
        while not stop.is_set():
            side.conn.execute("UPDATE job SET status = 'failed' WHERE status = 'new'")

    ender = threading.Thread(target=end)
    ender.start()
    try:
        ids = {bridge.submit("plain", {}, unique_key="one") for _ in range(200)}
    finally:
        stop.set()
        ender.join()
    assert {row["id"] for row in side.rows("SELECT id FROM job")} == ids


def test_a_unique_submit_repeated_after_a_lost_answer_is_the_same_job(one: runtime.Bridge, side: Side) -> None:
    lost: list[UUID] = []
    write = type(one.submission)._write

    def unanswered(*args: Any) -> UUID:
        found = write(*args)
        if not lost:
            lost.append(found)
            raise DatabaseUnavailable("the answer is lost")
        return found

    for status in ("new", "completed"):
        lost.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(one.submission), "_write", unanswered)
            found = bridge.submit("plain", {}, unique_key=status, on_conflict="raise")
        assert found == lost[0]
        side.conn.execute("UPDATE job SET status = %s WHERE id = %s", (status, found))
    assert len(side.rows("SELECT FROM job")) == 2


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty key": ({"unique_key": ""}, "unique_key is text of 1 to 250 characters"),
    "key of 10 kB": ({"unique_key": "k" * 10_000}, "unique_key is text of 1 to 250"),
    "key with NUL": ({"unique_key": "a\0"}, "unique_key holds a NUL"),
    "key that is none": ({"unique_key": 7}, "unique_key is text"),
    "another conflict": ({"on_conflict": "ignore"}, "on_conflict is 'return', 'raise' or 'replace', not 'ignore'"),
    "a conflict without key": ({"on_conflict": "raise"}, "on_conflict='raise' speaks of a unique_key"),
    "two samenesses": ({"unique_key": "k", "dedupe": True}, "dedupe and unique_key are two ways"),
    "a time without zone": ({"start_before": datetime(2030, 1, 1)}, "start_before has no zone"),  # noqa: DTZ001  # bad
    "a time out of range": ({"start_before": datetime(9999, 1, 1, tzinfo=UTC)}, "start_before lies between"),
    "a negative time": ({"start_before": -1}, "start_before lies between 0 and ten years"),
}


@pytest.mark.parametrize(("options", "sentence"), BAD.values(), ids=BAD.keys())
def test_a_bad_option_is_refused_by_name(app: Celery, side: Side, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidJob, match=sentence):
        bridge.submit("plain", {}, **options)
    assert side.rows("SELECT FROM job") == []


def test_submit_many_takes_no_key(app: Celery) -> None:
    with pytest.raises(InvalidJob, match="no unique_key"):
        bridge.submit_many("plain", [{}], unique_key="one")


def test_a_job_that_is_too_late_is_cancelled_instead_of_started(stack: Stack, side: Side, app: Celery) -> None:
    late = [
        bridge.submit("plain", {}, start_before=datetime.now(UTC) - timedelta(seconds=1)),
        bridge.submit("plain", {}, start_before=1, delay=3_600_000),
    ]
    in_time = bridge.submit("plain", {}, start_before=timedelta(hours=1))
    worker = stack.worker()
    until(lambda: side.status(in_time) == "completed", what=lambda: worker.tail)
    late.append(side.insert("again", params={"delay": 60_000}, start_before=datetime.now(UTC) + timedelta(seconds=5)))
    until(lambda: {side.status(each) for each in late} == {"cancelled"}, what=lambda: worker.tail)
    assert [side.events(each)[-1] for each in late] == [("end", {"outcome": "cancelled"})] * 3
    assert [len(side.received(each)) for each in late] == [0, 0, 1], "the last one ran once, and was to run again"


def test_a_ticket_that_comes_too_late_is_refused_by_the_claim(one: runtime.Bridge, side: Side) -> None:
    """No dispatcher has looked; the delivery itself says so."""
    job_id = side.insert("plain", status="scheduled", start_before=datetime.now(UTC) - timedelta(milliseconds=5))
    verdict = run_here(one, side, job_id)
    assert (verdict.status, verdict.ran) == ("cancelled", False)
    assert side.events(job_id) == [("end", {"outcome": "cancelled"})]
    assert side.received(job_id) == []


def test_a_running_job_that_is_cancelled_meets_interrupted(stack: Stack, side: Side, app: Celery) -> None:
    worker = stack.worker(concurrency=1, BRIDGE_LEASE="3s")
    job_id = side.insert("beats", params={})
    until(lambda: side.received(job_id), what=lambda: worker.tail)
    assert bridge.cancel(job_id) == 0
    assert bridge.cancel(job_id, running=True) == 1
    after = side.insert("plain")
    until(lambda: side.status(after) == "completed", what=lambda: worker.tail)  # the only child is free again
    assert side.status(job_id) == "cancelled"
    assert "interrupted, its row is no longer this run's" in worker.log
    events = side.rows("SELECT kind, payload, actor FROM job_event WHERE job_id = %s AND kind = 'end'", job_id)
    assert events == [{"kind": "end", "payload": {"outcome": "cancelled"}, "actor": "operator"}]


def test_running_is_true_or_false(app: Celery) -> None:
    with pytest.raises(InvalidJob, match="running is True or False"):
        bridge.cancel(UUID(int=1), running="yes")  # type: ignore[arg-type]  # the point of it
