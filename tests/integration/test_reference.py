"""The reference rows R1 to R20: the same behaviour in process and on a real prefork worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol
from uuid import UUID, uuid4

import psycopg
import pytest
from prometheus_client import REGISTRY
from psycopg.conninfo import make_conninfo

import bridge
from bridge import ledger, runtime
from bridge.embedded import Servers
from bridge.records import Run, Ticket, new_id
from bridge.runner import Verdict
from tests.conftest import broker_of, clone
from tests.support import Process, Side, Stack, broker, send, until

ECHO = {"object": "snapshot", "deleted_at": "2026-01-01T00:00:00+00:00", "id": "0199b1a7-0000-7000-8000-000000000000"}
RETRY_ERROR = {"type": "retry", "code": "failed", "hint": "transient failure", "ex_type": "retry"}


def run_here(one: runtime.Bridge, side: Side, job_id: UUID, ticket: list[str] | None = None) -> Verdict:
    """Run a row's ticket in this process, as a worker's child does."""
    name = side.row(job_id)["name"]
    definition = one.submission.definition(name)
    with runtime.running(one):
        return one.runner.run(Ticket.parse(ticket or side.ticket(job_id)), Run(new_id(), "here"), definition)


class Deliver(Protocol):
    """Deliver a row's ticket once, and return when the delivery has been dealt with."""

    side: Side

    def __call__(self, job_id: UUID, ticket: list[str] | None = None) -> None: ...


@dataclass
class Here:
    """In this process, as a worker's child does it."""

    side: Side
    one: runtime.Bridge

    def __call__(self, job_id: UUID, ticket: list[str] | None = None) -> None:
        run_here(self.one, self.side, job_id, ticket)


@dataclass
class There:
    """On a real prefork worker. Tickets are pushed by hand: a dispatcher would hand the rows over too."""

    side: Side
    stack: Stack
    worker: Process

    def __call__(self, job_id: UUID, ticket: list[str] | None = None) -> None:
        before = self.dealt(job_id)
        send(
            self.stack.broker_url, self.side.row(job_id)["name"], ticket or self.side.ticket(job_id), queue="reference"
        )
        until(lambda: self.dealt(job_id) > before, what=lambda: self.worker.tail)

    def dealt(self, job_id: UUID) -> int:
        # Celery's line when a task ends: "Task name[id] succeeded", "retry", "raised expected", "ignored"
        return sum(f"[{job_id}] " in line and "received" not in line for line in self.worker.log.splitlines())


@pytest.fixture(scope="module")
def there(
    admin_url: str, template: str, servers: Servers | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[There]:
    """One worker for all rows, on a database and a queue of its own."""
    name = f"bridge_reference_{uuid4().hex[:8]}"
    broker_url = broker_of(servers)
    with psycopg.connect(admin_url, autocommit=True) as admin:
        clone(admin, name, template)
        url = make_conninfo(admin_url, dbname=name)
        folder = tmp_path_factory.mktemp("reference")
        with Stack(url, broker_url, folder) as stack, psycopg.connect(url, autocommit=True) as conn:
            worker = stack.worker("-Q", "reference", concurrency=1, BRIDGE_DISPATCHER="standalone")
            yield There(Side(conn), stack, worker)
            assert worker.end() == 0
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["in-process", "prefork"])
def deliver(request: pytest.FixtureRequest) -> Deliver:
    """Both ways."""
    if request.param == "in-process":
        return Here(request.getfixturevalue("side"), request.getfixturevalue("one"))
    found: There = request.getfixturevalue("there")
    return found


def test_r1_handler_gets_decoded_typed_params(deliver: Deliver) -> None:
    side = deliver.side
    job_id = side.insert(params=ECHO)
    deliver(job_id)
    (call,) = side.received(job_id)
    assert "<Kind.SNAPSHOT: 'snapshot'>" in call["params"]
    assert "datetime.datetime(2026, 1, 1, 0, 0" in call["params"]
    assert "UUID('0199b1a7-0000-7000-8000-000000000000')" in call["params"]
    row = side.row(job_id)
    assert row["status"] == "completed"
    assert row["started_at"] is not None
    assert row["completed_at"] is not None
    assert row["error"] is None


def test_r2_context_has_exactly_the_five_fields(deliver: Deliver) -> None:
    side = deliver.side
    job_id = side.insert(params=ECHO, label="runner-label")
    deliver(job_id)
    (call,) = side.received(job_id)
    assert call["context"] == {
        "id": str(job_id),
        "name": "echo",
        "label": "runner-label",
        "resource_id": None,
        "profile_id": None,
    }


def sample(metric: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"{metric}_count", labels) or 0.0


def test_r3_one_observation_of_each_metric(one: runtime.Bridge, side: Side) -> None:
    def look() -> list[float]:
        return [
            sample("bridge_jobs_queue_wait_seconds", name="echo", queue="test"),
            sample("bridge_jobs_execution_seconds", name="echo", queue="test"),
            sample("bridge_jobs_total_seconds", name="echo", queue="test", outcome="completed"),
            sample("tasks_timing_seconds", name="echo"),
        ]

    before = look()
    run_here(one, side, side.insert(params=ECHO))
    assert [after - old for after, old in zip(look(), before, strict=True)] == [1, 1, 1, 1]


def test_r4_cancelled_job_is_skipped(deliver: Deliver) -> None:
    side = deliver.side
    job_id = side.insert(params=ECHO)
    side.conn.execute("UPDATE job SET status = 'cancelled' WHERE id = %s", (job_id,))
    before = side.row(job_id)
    deliver(job_id)
    assert side.row(job_id) == before
    assert before["started_at"] is None
    assert side.received(job_id) == []


def test_r5_retry_with_backoff_respects_max_retries(deliver: Deliver) -> None:
    side = deliver.side
    job_id = side.insert("again", params={"delay": 1000}, max_retries=1)
    deliver(job_id)
    row = side.row(job_id)
    assert (row["status"], row["retry_num"], row["error"]) == ("retry", 1, RETRY_ERROR)
    assert row["scheduled_at"] > row["modified_at"]
    deliver(job_id)
    row = side.row(job_id)
    assert (row["status"], row["retry_num"], row["error"]) == ("failed", 1, RETRY_ERROR)
    assert row["completed_at"] is None


def test_r6_delay_as_plain_milliseconds(deliver: Deliver) -> None:
    side = deliver.side
    job_id = side.insert("again", params={"delay": 5000})
    deliver(job_id)
    row = side.row(job_id)
    assert (row["status"], row["retry_num"]) == ("retry", 1)
    assert 4 < (row["scheduled_at"] - row["modified_at"]).total_seconds() < 6


def test_r7_noop_retry_at_zero_uses_the_base_delay(deliver: Deliver) -> None:
    side = deliver.side
    job_id = side.insert("again", params={"delay": 5000, "strategy": "noop"})
    deliver(job_id)
    row = side.row(job_id)
    assert (row["status"], row["retry_num"]) == ("retry", 0)
    assert 4 < (row["scheduled_at"] - row["modified_at"]).total_seconds() < 6


def test_r8_ordinary_exception_fails_without_retries_left(deliver: Deliver) -> None:
    side = deliver.side
    job_id = side.insert("raises", params={"what": "ValueError"}, max_retries=0)
    deliver(job_id)
    row = side.row(job_id)
    assert row["status"] == "failed"
    assert row["error"] == {"type": "internal", "code": "failed", "hint": "fatal", "ex_type": "ValueError"}


def test_r9_terminal_write_does_not_overwrite_an_abort(deliver: Deliver) -> None:
    side = deliver.side
    job_id = side.insert("aborts-itself")
    deliver(job_id)
    row = side.row(job_id)
    assert row["status"] == "aborted"
    assert row["error"]["code"] == "orphan"
    assert row["completed_at"] is None


def test_r10_claim_requires_the_current_scheduled_at(one: runtime.Bridge, side: Side) -> None:
    job_id = side.insert(params=ECHO, status="scheduled")
    ticket = Ticket.parse(side.ticket(job_id))
    stale = Ticket(job_id, ticket.scheduled_at - timedelta(minutes=6))
    how = {"name": "echo", "tenant": "default", "lease": timedelta(minutes=3), "retry_lost": False}
    with one.database.connection() as conn:
        assert ledger.claim(conn, stale, Run(new_id(), "w"), **how) is None
        assert side.status(job_id) == "scheduled"
        claimed = ledger.claim(conn, ticket, Run(new_id(), "w"), **how)
    assert claimed is not None
    assert claimed.id == job_id
    assert side.status(job_id) == "running"


def test_r11_stale_ticket_is_skipped_after_a_reschedule(deliver: Deliver) -> None:
    side = deliver.side
    job_id = side.insert(params=ECHO)
    stale = side.ticket(job_id)
    side.conn.execute(
        "UPDATE job SET status = 'scheduled', scheduled_at = scheduled_at + interval '6 minutes' WHERE id = %s",
        (job_id,),
    )
    deliver(job_id, stale)
    assert side.received(job_id) == []
    row = side.row(job_id)
    assert (row["status"], row["started_at"]) == ("scheduled", None)
    deliver(job_id)
    assert len(side.received(job_id)) == 1
    assert side.status(job_id) == "completed"


def test_r12_unknown_job_name_fails_fast(stack: Stack, side: Side) -> None:
    stack.worker(concurrency=1, BRIDGE_DISPATCHER="standalone")
    job_id = side.insert("no-such-job", max_retries=3)
    send(stack.broker_url, "no-such-job", side.ticket(job_id))
    until(lambda: side.status(job_id) == "failed")
    row = side.row(job_id)
    assert (row["retry_num"], row["completed_at"]) == (0, None)
    assert row["error"] == {
        "type": "not-found",
        "code": "no-job-definition",
        "hint": "no-such-job",
        "ex_type": "not-found",
    }
    assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "failed"})]


def test_r13_schema_violation_fails_fast(deliver: Deliver) -> None:
    side = deliver.side
    job_id = side.insert(params={**ECHO, "id": "secret-but-no-uuid"}, max_retries=3)
    deliver(job_id)
    row = side.row(job_id)
    assert (row["status"], row["retry_num"], row["completed_at"]) == ("failed", 0, None)
    assert row["error"] == {"type": "assertion", "code": "data-validation", "hint": "id", "ex_type": "assertion"}
    assert side.received(job_id) == []


def test_r14_invoke_runs_in_process_with_decoded_params(app: Any, side: Side) -> None:
    job_id = uuid4()
    result = bridge.invoke("echo", ECHO, job_id=job_id)
    assert result["id"] == UUID(ECHO["id"])
    assert result["deleted_at"] == datetime(2026, 1, 1, tzinfo=UTC)
    (call,) = side.received(job_id)
    assert call["params"] == repr(result)
    assert side.rows("SELECT FROM job") == []


MALFORMED = {
    "not-a-uuid": ["not-a-uuid", "2026-01-01T00:00:00+00:00"],
    "not-an-instant": [str(uuid4()), "not-an-instant"],
    "no-zone": [str(uuid4()), "2026-01-01T00:00:00"],
    "one-argument": [str(uuid4())],
    "three-arguments": [str(uuid4()), "2026-01-01T00:00:00+00:00", "more"],
    "no-arguments": [],
    "a-number": 7,
    "text": "ab",
    "null": None,
    "an-object": {"id": str(uuid4())},
    "numbers": [1, 2],
}


def test_r15_malformed_payloads_are_skipped(stack: Stack, side: Side) -> None:
    worker = stack.worker(concurrency=1, BRIDGE_DISPATCHER="standalone")
    for args in MALFORMED.values():
        send(stack.broker_url, "plain", args, task_id=str(uuid4()))
    job_id = side.insert("plain")
    send(stack.broker_url, "plain", side.ticket(job_id), task_id=str(uuid4()))  # a header of another id
    send(stack.broker_url, "plain", side.ticket(job_id), kwargs={"more": 1})
    until(lambda: worker.log.count("is no ticket") == len(MALFORMED) + 2, what=lambda: worker.tail)
    assert side.rows("SELECT FROM received") == []
    assert side.row(job_id)["started_at"] is None
    send(stack.broker_url, "plain", side.ticket(job_id))
    until(lambda: side.status(job_id) == "completed", what="the worker lives on")
    assert worker.end() == 0


NO_MESSAGE = [b"not-json", b"\xff\xfe", b"[1, 2]", b"{}", b"null", b'{"body": "x"}', b'{"properties": {}}']
BAD_CODEC = {"body": "x", "properties": {"delivery_tag": "1", "body_encoding": "zip", "delivery_info": {}}}


def test_r15_raw_items_on_the_list_are_skipped(stack: Stack, side: Side) -> None:
    """What is no envelope at all; it kills a plain Celery worker."""
    worker = stack.worker(concurrency=1, BRIDGE_DISPATCHER="standalone")
    with broker(stack.broker_url) as connection:
        if connection.transport.driver_type == "redis":
            for item in (*NO_MESSAGE, json.dumps(BAD_CODEC).encode()):
                connection.channel().client.lpush("test", item)
        # a whole envelope around a body that does not decode, which every broker can carry
        headers = {"task": "plain", "id": str(uuid4()), "lang": "py"}
        connection.Producer().publish(
            b"not-json", "test", content_type="application/json", content_encoding="utf-8", headers=headers
        )
    job_id = side.insert("plain")
    send(stack.broker_url, "plain", side.ticket(job_id))
    until(lambda: side.status(job_id) == "completed", what=lambda: worker.tail)
    assert len(side.rows("SELECT FROM received")) == 1
    assert worker.end() == 0


@pytest.mark.parametrize("typed", [False, True], ids=["mapping", "Completion"])
def test_r16_envelope_splits(one: runtime.Bridge, side: Side, typed: bool) -> None:
    resource = uuid4()
    job_id = side.insert("envelope", params={"resource_id": str(resource), "typed": typed})
    run_here(one, side, job_id)
    row = side.row(job_id)
    assert (row["status"], row["result"], row["resource_id"]) == ("completed", {"business": 1}, resource)
    assert side.events(job_id)[1:] == [("end", {"outcome": "completed"})]


def test_r17_events_of_a_success(deliver: Deliver) -> None:
    side = deliver.side
    job_id = side.insert(params=ECHO)
    deliver(job_id)
    assert side.events(job_id) == [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]


def test_r18_events_of_a_retry(deliver: Deliver) -> None:
    side = deliver.side
    job_id = side.insert("again", params={"delay": 1})
    deliver(job_id)
    assert side.events(job_id) == [("start", {"attempt": 1}), ("retry", {"attempt": 2, "reason": "backoff"})]


def test_r19_events_of_a_noop(deliver: Deliver) -> None:
    side = deliver.side
    job_id = side.insert("again", params={"delay": 1, "strategy": "noop"})
    deliver(job_id)
    assert side.events(job_id) == [("start", {"attempt": 1}), ("retry", {"attempt": 1, "reason": "noop"})]
    assert side.row(job_id)["retry_num"] == 0


def test_r20_deleting_a_job_deletes_its_events(one: runtime.Bridge, side: Side) -> None:
    job_id = side.insert(params=ECHO)
    run_here(one, side, job_id)
    assert len(side.events(job_id)) == 2
    side.conn.execute("DELETE FROM job WHERE id = %s", (job_id,))
    assert side.events(job_id) == []
