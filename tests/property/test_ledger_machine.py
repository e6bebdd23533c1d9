"""The real ledger and the table of moves, side by side, driven by whatever Hypothesis thinks of.

Several workers claim with tickets that are new, old or doubled, and write with runs that hold the row or lost it.
The model knows nothing of SQL: it follows `MOVES` and the two guards (ticket, run) as the docs tell them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from psycopg.rows import dict_row

from bridge import ledger
from bridge.lifecycle import MOVES, TERMINAL, RetryReason, Status
from bridge.outcome import Abort, Again, Cancel, Complete, Fail, Outcome, Release
from bridge.records import ErrorReport, Run, Ticket, new_id
from tests.chaos.verdict import is_illegal

ERROR = ErrorReport("internal", "failed", "Error", "no")
LEASE = timedelta(minutes=1)
NAMES = ("a", "b")


@dataclass
class Model:
    """What the documentation says of one row."""

    id: UUID
    status: Status = Status.NEW
    scheduled_at: datetime | None = None
    run: Run | None = None
    retry_num: int = 0
    tickets: list[Ticket] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def may(self, writer: str, run: Run | None) -> bool:
        """Does the writer's statement change the row?"""
        return self.status in MOVES[writer].sources and (run is None or run == self.run)


class Machine(RuleBasedStateMachine):
    """Rules are the writers; after each the whole database is compared with the models."""

    conn: psycopg.Connection
    jobs: Bundle[Model] = Bundle("jobs")
    runs: Bundle[Run] = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[UUID, Model] = {}
        self.conn.execute("DELETE FROM job")

    def row(self, job_id: UUID) -> dict[str, Any]:
        found = self.conn.cursor(row_factory=dict_row).execute("SELECT * FROM job WHERE id = %s", (job_id,)).fetchone()
        assert found is not None
        return found

    def later(self, model: Model) -> None:
        """A row that became claimable again has a strictly later ticket."""
        new = self.row(model.id)["scheduled_at"]
        assert model.scheduled_at is not None
        assert new > model.scheduled_at
        model.scheduled_at = new
        model.tickets.append(Ticket(model.id, new))

    @initialize(target=runs)
    def stranger(self) -> Run:
        return Run(new_id(), "stranger")

    @rule(target=jobs)
    def submit(self) -> Model:
        model = Model(new_id())
        self.conn.execute("INSERT INTO job (id, name) VALUES (%s, 'machine')", (model.id,))
        model.scheduled_at = self.row(model.id)["scheduled_at"]
        assert model.scheduled_at is not None
        model.tickets.append(Ticket(model.id, model.scheduled_at))
        self.models[model.id] = model
        return model

    @rule()
    def dispatch(self) -> None:
        batch = ledger.dispatch(self.conn, "default", tenant="default", batch=100, window=100)
        due = {each.id for each in self.models.values() if each.status in MOVES["dispatch"].sources}
        taken = {row.ticket.job_id for row in batch.rows}
        assert taken <= due
        for job_id in due - taken:
            assert self.row(job_id)["scheduled_at"] > self.row(job_id)["modified_at"], "due, and left"
        for row in batch.rows:
            model = self.models[row.ticket.job_id]
            assert row.ticket == model.tickets[-1], "what is published is the current ticket"
            model.status = Status.SCHEDULED

    @rule(target=runs, model=jobs, which=st.integers(0, 9), worker=st.sampled_from(NAMES))
    def claim(self, model: Model, which: int, worker: str) -> Run:
        """A delivery: of the current ticket, or of an old one, as often as the broker likes."""
        ticket, run = model.tickets[-1 - which % len(model.tickets)], Run(new_id(), worker)
        job = ledger.claim(self.conn, ticket, run, name="machine", tenant="default", lease=LEASE, retry_lost=False)
        current = ticket == model.tickets[-1] and model.status in MOVES["claim"].sources
        assert (job is not None) == current
        if job is not None:
            assert ledger.held(self.conn, model.id, run, tenant="default") is not None
            model.status, model.run = Status.RUNNING, run
            model.events.append(("start", {"attempt": model.retry_num + 1}))
        return run

    def settle(self, model: Model, run: Run | None, writer: str, outcome: Outcome) -> bool:
        changed = ledger.settle(
            self.conn, model.id, outcome, tenant="default", actor="w", run=None if run is None else run.id
        )
        assert changed == int(model.may(writer, run)), (writer, model)
        if changed:
            model.status = MOVES[writer].target
            if model.status in TERMINAL:
                model.events.append(("end", {"outcome": str(model.status)}))
        return bool(changed)

    @rule(model=jobs, run=runs | st.none(), result=st.sampled_from([None, "1", '{"a": 1}']))
    def complete(self, model: Model, run: Run | None, result: str | None) -> None:
        self.settle(model, run, "complete", Complete(result))

    @rule(model=jobs, run=runs | st.none())
    def fail(self, model: Model, run: Run | None) -> None:
        self.settle(model, run, "fail", Fail(ERROR))

    @rule(model=jobs, run=runs)
    def abort(self, model: Model, run: Run) -> None:
        self.settle(model, run, "abort", Abort(ERROR))

    @rule(model=jobs)
    def cancel(self, model: Model) -> None:
        self.settle(model, None, "cancel", Cancel())

    @rule(model=jobs, run=runs, reason=st.sampled_from(RetryReason), delay=st.sampled_from([0, 1, 60_000]))
    def retry(self, model: Model, run: Run, reason: RetryReason, delay: int) -> None:
        if self.settle(model, run, "retry", Again(timedelta(milliseconds=delay), ERROR, reason)):
            model.retry_num += reason is not RetryReason.NOOP
            model.events.append(("retry", {"attempt": model.retry_num + 1, "reason": str(reason)}))
            self.later(model)

    @rule(model=jobs, run=runs)
    def retry_repeated(self, model: Model, run: Run) -> None:
        """Once more after a lost answer: from running only, so that it is not counted twice."""
        may = model.may("retry", run) and model.status is Status.RUNNING
        outcome = Again(timedelta(0), ERROR, RetryReason.BACKOFF)
        changed = ledger.settle(self.conn, model.id, outcome, tenant="default", actor="w", run=run.id, repeated=True)
        assert changed == int(may)
        if changed:
            model.status, model.retry_num = Status.RETRY, model.retry_num + 1
            model.events.append(("retry", {"attempt": model.retry_num + 1, "reason": "backoff"}))
            self.later(model)

    @rule(model=jobs, run=runs)
    def release(self, model: Model, run: Run) -> None:
        if self.settle(model, run, "release", Release()):
            model.events.append(("retry", {"attempt": model.retry_num + 1, "reason": "noop"}))
            self.later(model)

    @rule(model=jobs)
    def reschedule(self, model: Model) -> None:
        changed = ledger.reschedule(self.conn, [model.id], tenant="default")
        assert changed == int(model.may("reschedule", None))
        if changed:
            model.status = Status.NEW
            self.later(model)

    @rule(model=jobs)
    def defer(self, model: Model) -> None:
        changed = ledger.defer(self.conn, model.id, timedelta(0), tenant="default")
        assert changed == int(model.may("defer", None))
        if changed:
            model.status = Status.NEW
            self.later(model)

    @rule(model=jobs, run=runs)
    def heartbeat(self, model: Model, run: Run) -> None:
        beat = ledger.heartbeat(
            self.conn, model.id, tenant="default", actor="w", lease=LEASE, run=run.id, renew=True, progress=None
        )
        assert beat.held == (model.status is Status.RUNNING and run == model.run)

    @invariant()
    def the_database_is_what_the_model_says(self) -> None:
        rows = self.conn.execute("SELECT id, status, retry_num, scheduled_at FROM job").fetchall()
        assert {row[0]: row[1:] for row in rows} == {
            each.id: (each.status, each.retry_num, each.scheduled_at) for each in self.models.values()
        }
        told: dict[UUID, list[Any]] = {each: [] for each in self.models}
        for job_id, kind, payload in self.conn.execute("SELECT job_id, kind, payload FROM job_event ORDER BY id"):
            told[job_id].append((kind, payload))
        assert told == {each.id: each.events for each in self.models.values()}
        # Writers without a run are operators, who may end what never started: the grammar is the workers'.
        for model in self.models.values():
            if model.status is Status.RUNNING:
                assert not is_illegal(model.status, model.events)


@contextmanager
def machine(conn: psycopg.Connection) -> Iterator[type[Machine]]:
    """The machine on a connection."""
    Machine.conn = conn
    yield Machine


@pytest.mark.timeout(600)
def test_the_ledger_follows_the_table_of_moves(conn: psycopg.Connection) -> None:
    """BRIDGE_TEST_EXAMPLES sets how many histories are tried, 60 unless said otherwise, of up to 40 steps."""
    examples, broken = os.environ.get("BRIDGE_TEST_EXAMPLES"), "BRIDGE_TEST_BROKEN" in os.environ
    with machine(conn) as made:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]  # hypothesis
            made,
            settings=settings(
                max_examples=int(examples or 60),
                stateful_step_count=40,
                deadline=None,
                phases=[Phase.generate] if broken else list(Phase),  # shrinking takes minutes
                derandomize=broken or not examples,  # the same histories each time, unless more are asked for
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
