"""Writes in doubt: the server has carried them out, and the answer never comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery

import bridge
from bridge import runtime
from bridge.errors import DatabaseUnavailable
from bridge.records import Definition, Run, Ticket, new_id
from bridge.runner import Verdict
from tests.proxy import Proxy
from tests.support import Side, Stack, until

COMPLETED = [("start", {"attempt": 1}), ("end", {"outcome": "completed"})]


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    """Between the app and its database; the test's own look goes around it."""
    made = Proxy.of_postgres(database_url)
    yield made
    made.close()


@pytest.fixture
def one(proxy: Proxy, database_url: str, broker_url: str, monkeypatch: pytest.MonkeyPatch) -> runtime.Bridge:
    """An app whose database is reached through the proxy."""
    monkeypatch.setenv("BRIDGE_DATABASE_URL", proxy.address(database_url))
    monkeypatch.setenv("BRIDGE_BROKER_URL", broker_url)
    return runtime.of(bridge.install(Celery("doubt", set_as_current=False)))


def run(one: runtime.Bridge, side: Side, body: Callable[..., Any], **columns: Any) -> tuple[dict[str, Any], Verdict]:
    """Run a row once in this process, with that handler."""
    calls: list[bridge.Context] = []

    def handler(context: bridge.Context, params: dict[str, Any]) -> Any:
        calls.append(context)
        return body(context, params)

    job_id = side.insert("doubtful", **columns)
    definition = Definition(name="doubtful", handler=handler, load=lambda text: {}, dump=str)
    with runtime.running(one):
        verdict = one.runner.run(Ticket.parse(side.ticket(job_id)), Run(new_id(), "here"), definition)
    assert len(calls) == 1, "the handler runs once, whatever is lost"
    return side.row(job_id), verdict


def test_a_claim_in_doubt_is_not_skipped(one: runtime.Bridge, side: Side, proxy: Proxy) -> None:
    cut = proxy.cut("-- claim:", times=3)
    row, verdict = run(one, side, lambda *_: "done")
    assert cut.happened == 3
    assert (row["status"], verdict.ran) == ("completed", True)
    assert side.events(row["id"]) == COMPLETED


def raises(*_: object) -> None:
    raise bridge.Retry("later", delay=60_000)


def fails(*_: object) -> None:
    raise ValueError("no")


SETTLED: dict[str, tuple[str, Callable[..., Any], dict[str, Any], list[tuple[str, dict[str, Any]]]]] = {
    "complete": ("-- complete:", lambda *_: "done", {}, [("end", {"outcome": "completed"})]),
    "fail": ("-- end:", fails, {"max_retries": 0}, [("end", {"outcome": "failed"})]),
    "retry": ("-- retry:", raises, {}, [("retry", {"attempt": 2, "reason": "backoff"})]),
}


@pytest.mark.parametrize(("text", "body", "columns", "events"), SETTLED.values(), ids=SETTLED.keys())
def test_an_outcome_in_doubt_is_not_repeated(
    one: runtime.Bridge, side: Side, proxy: Proxy, text: str, body: Any, columns: Any, events: Any
) -> None:
    cut = proxy.cut(text, times=2)
    row, verdict = run(one, side, body, **columns)
    assert cut.happened == 2
    assert side.events(row["id"]) == [("start", {"attempt": 1}), *events]
    assert verdict.status == row["status"]
    assert row["retry_num"] == int(text == "-- retry:")


def test_an_outcome_in_doubt_whose_row_has_moved_on_stays_a_success(
    one: runtime.Bridge, side: Side, proxy: Proxy, database_url: str
) -> None:
    """The retry was written; before it is repeated the next run is over."""
    cut = proxy.cut("-- retry:")

    def body(context: bridge.Context, params: object) -> None:
        side.conn.execute(
            "CREATE FUNCTION move() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN NEW.status := 'completed'; RETURN NEW; END $$;"
            "CREATE TRIGGER move BEFORE UPDATE ON job FOR EACH ROW WHEN (NEW.status = 'retry') EXECUTE FUNCTION move()"
        )
        raises()

    row, verdict = run(one, side, body)
    assert cut.happened == 1
    assert (row["status"], verdict.status) == ("completed", "completed")


@pytest.mark.parametrize("how", ["submit", "submit_many", "unique", "dedupe"])
def test_a_submit_in_doubt_is_not_doubled(one: runtime.Bridge, side: Side, proxy: Proxy, how: str) -> None:
    cut = proxy.cut(
        "-- insert_many:" if how == "submit_many" else "-- insert:",
        then="COMMIT" if how in ("unique", "dedupe") else "",
    )
    if how == "submit_many":
        ids = bridge.submit_many("plain", [{}, {}])
    else:
        options: dict[str, Any] = {
            "submit": {},
            "unique": {"unique_key": "one", "on_conflict": "raise"},
            "dedupe": {"dedupe": True, "delay": 60_000},
        }[how]
        ids = [bridge.submit("plain", {}, **options)]
    assert cut.happened == 1
    assert sorted(row["id"] for row in side.rows("SELECT id FROM job")) == sorted(ids)


def test_a_submit_that_is_never_answered_says_so(one: runtime.Bridge, proxy: Proxy) -> None:
    proxy.cut("-- insert:", times=2)
    with pytest.raises(DatabaseUnavailable):
        bridge.submit("plain", {})


def test_a_finish_whose_commit_is_in_doubt_counts_as_it_was(
    one: runtime.Bridge, side: Side, proxy: Proxy, database_url: str
) -> None:
    side.conn.execute("CREATE TABLE effect (what text)")
    cut = proxy.cut("-- complete:", then="COMMIT")

    def body(*_: object) -> None:
        with psycopg.connect(proxy.address(database_url)) as conn:
            conn.execute("INSERT INTO effect VALUES ('there')")
            bridge.finish(conn, "done")

    row, verdict = run(one, side, body)
    assert cut.happened == 1
    assert (row["status"], row["result"], verdict.status) == ("completed", "done", "completed")
    assert side.events(row["id"]) == COMPLETED
    assert len(side.rows("SELECT FROM effect")) == 1


def test_a_heartbeat_in_doubt_is_the_workers_trouble(one: runtime.Bridge, side: Side, proxy: Proxy) -> None:
    cut = proxy.cut("-- heartbeat:")

    def body(*_: object) -> list[int | None]:
        return [bridge.heartbeat({"current": n}, force=True) for n in range(2)]

    row, _ = run(one, side, body)
    assert cut.happened == 1
    assert (row["status"], row["result"]) == ("completed", [0, 1])


def test_a_dispatch_in_doubt_is_not_doubled(stack: Stack, side: Side, proxy: Proxy) -> None:
    stack.dispatcher(BRIDGE_DATABASE_URL=proxy.address(stack.database_url))
    worker = stack.worker(BRIDGE_DISPATCHER="standalone")
    for _ in range(5):
        cut = proxy.cut("-- dispatch:", then="COMMIT")
        ids = [side.insert("plain") for _ in range(5)]
        until(lambda ids=ids: {side.status(each) for each in ids} == {"completed"}, what=lambda: worker.tail)
        assert cut.happened == 1
        for job_id in ids:
            assert side.events(job_id) == COMPLETED
            assert len(side.received(job_id)) == 1


def test_everything_in_doubt_on_a_real_worker(stack: Stack, side: Side, proxy: Proxy) -> None:
    worker = stack.worker(BRIDGE_DATABASE_URL=proxy.address(stack.database_url))
    cuts = [proxy.cut(text, times=10) for text in ("-- claim:", "-- complete:", "-- renew:", "-- backlog:")]
    ids = [side.insert("plain") for _ in range(60)]
    until(lambda: side.counts() == {"completed": 60}, seconds=60, what=lambda: f"{side.counts()}\n{worker.tail}")
    assert [cut.happened for cut in cuts[:2]] == [10, 10]
    for job_id in ids:
        assert side.events(job_id) == COMPLETED
        assert len(side.received(job_id)) == 1
