"""Submit: in the caller's transaction or its own, all or nothing, refused before anything is written."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from celery import Celery
from marshmallow import Schema, fields
from psycopg.conninfo import make_conninfo

import bridge
from bridge import runtime
from bridge.database import Database
from bridge.errors import DatabaseError, DatabaseUnavailable, InvalidJob, InvalidParams, UnknownJob
from tests.jobs import Kind
from tests.support import ROOT, Side, Stack, until


def deep(levels: int, value: object = 1) -> object:
    """A value in that many lists."""
    for _ in range(levels):
        value = [value]
    return value


TYPED = {"object": Kind.SNAPSHOT, "deleted_at": datetime(2026, 1, 1, tzinfo=UTC), "id": uuid4()}


def test_submit_writes_the_row_that_was_asked_for(app: Celery, side: Side) -> None:
    profile, resource = uuid4(), uuid4()
    job_id = bridge.submit(
        "echo",
        TYPED,
        delay=timedelta(minutes=1),
        queue="other",
        label="mine",
        priority=7,
        max_retries=9,
        profile_id=profile,
        resource_id=str(resource),
        expires_in=timedelta(days=1),
    )
    row = side.row(job_id)
    assert row["params"] == {"object": "snapshot", "deleted_at": "2026-01-01T00:00:00+00:00", "id": str(TYPED["id"])}
    assert (row["status"], row["queue"], row["label"], row["priority"]) == ("new", "other", "mine", 7)
    assert (row["max_retries"], row["profile_id"], row["resource_id"]) == (9, profile, resource)
    assert 59 < (row["scheduled_at"] - row["created_at"]).total_seconds() < 61
    assert 86390 < (row["expires_at"] - row["created_at"]).total_seconds() < 86410
    assert row["scheduled_at"].microsecond % 1000 == 0
    job = bridge.get_job(job_id)
    assert job is not None
    assert (job.id, bridge.user_status(job), job.params) == (job_id, "pending", row["params"])


def test_submit_takes_the_jobs_own_defaults(app: Celery, side: Side) -> None:
    row = side.row(bridge.submit("raises", {"what": "ValueError"}))
    assert (row["queue"], row["priority"], row["max_retries"]) == ("test", 100, 0)


def test_c14_visible_on_commit_and_never_before(app: Celery, side: Side, database_url: str) -> None:
    with psycopg.connect(database_url) as caller:
        job_id = bridge.submit("plain", {}, conn=caller)
        assert side.rows("SELECT FROM job WHERE id = %s", job_id) == []
        caller.commit()
    assert side.status(job_id) == "new"


def test_c15_rolled_back_never_happened(app: Celery, side: Side, database_url: str) -> None:
    with psycopg.connect(database_url) as caller:
        bridge.submit("plain", {}, conn=caller)
        bridge.submit_many("plain", [{}, {}], conn=caller)
        caller.rollback()
        with caller.transaction():
            try:
                with caller.transaction():
                    bridge.submit("plain", {"which": "A"}, conn=caller)
                    raise psycopg.Rollback
            except psycopg.Rollback:
                pass
            kept = bridge.submit("plain", {"which": "B"}, conn=caller)
    assert [row["id"] for row in side.rows("SELECT id FROM job")] == [kept]


JOINED: dict[str, Callable[[psycopg.Connection, UUID], object]] = {
    "submit": lambda conn, _: bridge.submit("plain", {}, conn=conn),
    "submit deduped": lambda conn, _: bridge.submit("plain", {}, delay=60_000, dedupe=True, conn=conn),
    "submit_many": lambda conn, _: bridge.submit_many("plain", [{}, {}], conn=conn),
    "cancel": lambda conn, job_id: bridge.cancel(job_id, conn=conn),
}


@pytest.mark.parametrize("verb", JOINED.values(), ids=JOINED.keys())
def test_what_joins_a_transaction_commits_nothing_though_it_is_the_first_statement(
    app: Celery, side: Side, database_url: str, verb: Callable[[psycopg.Connection, UUID], object]
) -> None:
    there = side.insert("plain", scheduled_at=datetime.now(UTC) + timedelta(hours=1))
    with psycopg.connect(database_url) as caller:
        verb(caller, there)
        assert caller.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        caller.rollback()
    assert [(row["id"], row["status"]) for row in side.rows("SELECT id, status FROM job")] == [(there, "new")]


@pytest.mark.parametrize("verb", JOINED.values(), ids=JOINED.keys())
def test_a_pipeline_is_refused_because_it_answers_late(
    app: Celery, side: Side, database_url: str, verb: Callable[[psycopg.Connection, UUID], object]
) -> None:
    there = side.insert("plain", status="running")
    with psycopg.connect(database_url) as caller, caller.pipeline(), pytest.raises(InvalidJob, match="pipeline mode"):
        verb(caller, there)
    assert [row["id"] for row in side.rows("SELECT id FROM job")] == [there]


def test_options_of_the_address_are_kept_beside_ours(one: runtime.Bridge, database_url: str) -> None:
    made = Database(make_conninfo(database_url, options="-c search_path=public,pg_temp -c lock_timeout=30s"))
    with made.connection() as conn:
        asked = [conn.execute(f"SHOW {each}").fetchone() for each in ("search_path", "lock_timeout")]
        assert asked == [("public,pg_temp",), ("30s",)]
    assert not made.pooled
    made.close()


def test_what_celery_discovers_is_known_to_a_producer(
    app: Celery, side: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "discovered").mkdir()
    (tmp_path / "discovered" / "__init__.py").touch()
    (tmp_path / "discovered" / "tasks.py").write_text(
        "import bridge\n@bridge.job('discovered.hello')\ndef hello(context, params): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    app.autodiscover_tasks(["discovered"])
    assert side.status(bridge.submit("discovered.hello", {})) == "new"


@pytest.mark.parametrize("isolation", [2, 3, 4], ids=["read-committed", "repeatable-read", "serializable"])
def test_submit_joins_whatever_isolation_the_caller_has(
    app: Celery, side: Side, database_url: str, isolation: int
) -> None:
    with psycopg.connect(database_url) as caller:
        caller.isolation_level = psycopg.IsolationLevel(isolation)
        job_id = bridge.submit("plain", {}, conn=caller)
    assert side.status(job_id) == "new"


def test_submit_many_is_all_or_nothing(app: Celery, side: Side) -> None:
    with pytest.raises(InvalidParams, match="number 1"):
        bridge.submit_many("plain", [{"a": 1}, {"a": float("nan")}])
    assert side.rows("SELECT FROM job") == []
    ids = bridge.submit_many("plain", [{"n": n} for n in range(500)], delay=60_000)
    assert [row["params"]["n"] for row in side.rows("SELECT params FROM job ORDER BY array_position(%s, id)", ids)] == [
        *range(500)
    ]
    assert bridge.submit_many("plain", []) == []


BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "negative delay": {"delay": -1},
    "delay in seconds as a float": {"delay": 1.5},
    "delay beyond ten years": {"delay": timedelta(days=4000)},
    "queue that is empty": {"queue": ""},
    "queue with a space": {"queue": "a b"},
    "queue of 10 kB": {"queue": "q" * 10_000},
    "label with NUL": {"label": "a\0b"},
    "label with a surrogate": {"label": "\ud800"},
    "label that is no text": {"label": None},
    "label of 10 kB": {"label": "l" * 10_000},
    "priority as text": {"priority": "high"},
    "priority beyond": {"priority": 10**9},
    "negative retries": {"max_retries": -1},
    "owner that is no uuid": {"profile_id": "me"},
    "resource that is no uuid": {"resource_id": 7},
    "negative expiry": {"expires_in": -5},
    "dedupe that is a key": {"dedupe": "orders"},
}


@pytest.mark.parametrize("options", BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_a_bad_option_is_refused_by_name_and_the_transaction_goes_on(
    app: Celery, side: Side, database_url: str, options: dict[str, Any]
) -> None:
    with psycopg.connect(database_url) as caller:
        with pytest.raises(InvalidJob, match=next(iter(options))):
            bridge.submit("plain", {}, conn=caller, **options)
        kept = bridge.submit("plain", {}, conn=caller)
    assert [row["id"] for row in side.rows("SELECT id FROM job")] == [kept]


@pytest.mark.parametrize("params", [object(), int, Decimal(1), datetime(2026, 1, 1, tzinfo=UTC), bytearray(b"x")])
def test_what_has_none_of_the_fields_is_refused_though_none_is_required(
    app: Celery, side: Side, params: object
) -> None:
    class Loose(Schema):
        a = fields.Integer()

    bridge.job("loose", schema=Loose)(deep)
    with pytest.raises(InvalidParams, match=r"none of the fields of Loose: a"):
        bridge.submit("loose", params)
    assert side.rows("SELECT FROM job") == []


def test_a_list_that_cannot_be_walked_twice_is_refused(app: Celery, side: Side) -> None:
    class Inner(Schema):
        x = fields.Integer()

    class Lists(Schema):
        many = fields.List(fields.Nested(Inner))
        pair = fields.Tuple((fields.DateTime(), fields.Integer()))

    bridge.job("lists", schema=Lists)(deep)
    for bad in ({1}, ({"x": 1, "y": 2} for _ in range(2)), "text"):
        with pytest.raises(InvalidParams, match="many: give a list or a tuple"):
            bridge.submit("lists", {"many": bad})
    with pytest.raises(InvalidParams, match=r"many\[0\]\.y: no such field"):
        bridge.submit("lists", {"many": [{"x": 1, "y": 2}]})
    with pytest.raises(InvalidParams, match=r"pair\[0\]: a datetime without zone"):
        bridge.submit("lists", {"pair": (datetime(2026, 1, 1), 1)})  # noqa: DTZ001  # the point of it
    bridge.submit("lists", {"many": [{"x": 1}], "pair": (datetime(2026, 1, 1, tzinfo=UTC), 1)})
    assert side.rows("SELECT params->'many' AS many FROM job") == [{"many": [{"x": 1}]}]


def test_a_connection_of_another_encoding_is_an_error_of_ours(app: Celery, database_url: str) -> None:
    with psycopg.connect(database_url, client_encoding="latin1") as caller:
        with pytest.raises(DatabaseError, match="client_encoding"):
            bridge.submit("plain", {"a": "€"}, conn=caller)
        bridge.submit("plain", {"a": "ä"}, conn=caller)


HOSTILE: dict[str, Callable[[Any], object]] = {
    "priority": lambda value: bridge.submit("plain", {}, priority=value),
    "queue": lambda value: bridge.submit("plain", {}, queue=value),
    "name": lambda value: bridge.submit(value, {}),
    "job name": lambda value: bridge.job(value)(deep),
    "id": lambda value: bridge.cancel(value),
    "profile": lambda value: bridge.submit("plain", {}, profile_id=value),
    "many": lambda value: bridge.submit_many("plain", value),
    "context": lambda value: bridge.invoke("plain", {}, context=value),
    "retry_lost": lambda value: bridge.job("hostile", retry_lost=value)(deep),
}


class Wordless:
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("call", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("value", [10**5000, Wordless(), ["x"]], ids=["huge", "wordless", "list"])
def test_what_cannot_even_be_shown_is_refused(app: Celery, side: Side, call: Any, value: object) -> None:
    if call is HOSTILE["many"] and isinstance(value, list):
        return  # a list of params it is, and bad ones
    with pytest.raises(InvalidJob):
        call(value)
    assert side.rows("SELECT FROM job") == []


BAD_PARAMS: dict[str, tuple[object, str]] = {
    "10 MB": ({"a": "x" * 10_000_000}, "larger than 4 MiB"),
    "5,000 levels": ({"a": deep(5000)}, "deeper than 100 levels"),
    "NaN": ({"a": [float("nan")]}, r"params\.a.* NaN"),
    "an integer beyond 64 bits": ({"a": 2**63}, r"params\.a holds an integer beyond 64 bits"),
    "NUL": ({"a": "x\0"}, r"params\.a holds a NUL"),
    "NUL in a key": ({"a\0": 1}, "a key of params holds a NUL"),
    "a lone surrogate": ({"a": "\udc80"}, r"params\.a holds a lone surrogate"),
    "a datetime without schema": ({"a": datetime(2026, 1, 1, tzinfo=UTC)}, r"params\.a is a datetime"),
    "a list": ([1], "params is a list"),
    "text": ("{}", "params is a str"),
}


@pytest.mark.parametrize(("params", "sentence"), BAD_PARAMS.values(), ids=BAD_PARAMS.keys())
def test_bad_params_are_refused_by_name_and_the_transaction_goes_on(
    app: Celery, side: Side, database_url: str, params: object, sentence: str
) -> None:
    with psycopg.connect(database_url) as caller:
        with pytest.raises(InvalidParams, match=sentence):
            bridge.submit("plain", params, conn=caller)
        kept = bridge.submit("plain", {}, conn=caller)
    assert [row["id"] for row in side.rows("SELECT id FROM job")] == [kept]


@pytest.mark.parametrize("name", ["", "x" * 10_000, "a\0", "\ud800", "a b", None, 7], ids=ascii)
def test_a_name_that_cannot_be_a_jobs_is_refused_wherever_it_is_said(app: Celery, side: Side, name: Any) -> None:
    with pytest.raises(UnknownJob):
        bridge.submit(name)
    with pytest.raises(InvalidJob, match="A job's name is 1 to 200 printable characters"):
        bridge.job(name)(deep)
    assert side.rows("SELECT FROM job") == []


def test_a_time_without_zone_is_refused_by_field(app: Celery, side: Side) -> None:
    with pytest.raises(InvalidParams, match="deleted_at"):
        bridge.submit("echo", {**TYPED, "deleted_at": datetime(2026, 1, 1)})  # noqa: DTZ001  # the point of it
    assert side.rows("SELECT FROM job") == []


def test_an_unknown_name_is_refused_and_says_what_is_known(app: Celery, side: Side) -> None:
    with pytest.raises(UnknownJob, match=r"'no-such-job'.*Known: .*echo"):
        bridge.submit("no-such-job", {})
    assert side.rows("SELECT FROM job") == []


def test_unknown_and_bad_params_are_refused_by_field(app: Celery, side: Side) -> None:
    with pytest.raises(InvalidParams, match="typo: no such field"):
        bridge.submit("echo", {**TYPED, "typo": 1})
    with pytest.raises(InvalidParams, match="id"):
        bridge.submit("echo", {"object": Kind.SNAPSHOT, "deleted_at": TYPED["deleted_at"]})
    assert side.rows("SELECT FROM job") == []


def test_conn_of_another_kind_is_refused(app: Celery) -> None:
    with pytest.raises(TypeError, match=r"psycopg\.Connection"):
        bridge.submit("plain", {}, conn="postgresql://")


def test_dedupe_replaces_what_waits_and_leaves_what_is_due(app: Celery, side: Side) -> None:
    due = bridge.submit("plain", {}, label="l")
    for _ in range(3):
        last = bridge.submit("plain", {}, label="l", delay=60_000, dedupe=True)
    other = bridge.submit("plain", {}, label="m", delay=60_000)
    assert {row["id"] for row in side.rows("SELECT id FROM job")} == {due, last, other}


def test_dedupe_under_race_leaves_one_row(app: Celery, side: Side) -> None:
    barrier = threading.Barrier(6)

    def race() -> None:
        barrier.wait()
        for _ in range(10):
            bridge.submit("plain", {}, delay=60_000, dedupe=True)

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(side.rows("SELECT FROM job")) == 1


def test_dedupe_in_a_snapshot_is_refused(app: Celery, database_url: str) -> None:
    with psycopg.connect(database_url) as caller:
        caller.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(InvalidJob, match="READ COMMITTED"):
            bridge.submit("plain", {}, dedupe=True, conn=caller)


def test_cancel_ends_what_is_pending_and_nothing_else(app: Celery, side: Side, database_url: str) -> None:
    job_id = bridge.submit("plain", {})
    with psycopg.connect(database_url) as caller:
        assert bridge.cancel(job_id, conn=caller) == 1
        caller.rollback()
    assert side.status(job_id) == "new"
    assert [bridge.cancel(job_id), bridge.cancel(job_id), bridge.cancel(uuid4())] == [1, 0, 0]
    assert [(event.kind, event.payload, event.actor) for event in bridge.get_events(job_id)] == [
        ("end", {"outcome": "cancelled"}, "operator")
    ]
    running = side.insert("plain", status="running")
    assert bridge.cancel(running) == 0
    with pytest.raises(InvalidJob, match="not a uuid"):
        bridge.cancel("no-uuid")


def test_get_of_nothing_is_nothing(app: Celery) -> None:
    assert bridge.get_job(uuid4()) is None
    assert bridge.get_events(uuid4()) == []


def test_heartbeat_outside_a_job_is_none(app: Celery) -> None:
    assert bridge.heartbeat({"current": 1}) is None
    with pytest.raises(ValueError, match=r"progress\.current"):
        bridge.heartbeat({"current": -1})


def test_heartbeat_by_id_renews_a_running_row_only(app: Celery, side: Side) -> None:
    running, ended = side.insert("plain", status="running"), side.insert("plain", status="failed")
    assert bridge.heartbeat({"current": 1, "total": 2}, job_id=running) == 2
    assert bridge.heartbeat(job_id=ended) == 0
    assert side.row(running)["lease_until"] is not None
    assert side.row(ended)["lease_until"] is None


def test_asubmit_does_not_block_and_takes_no_conn(app: Celery, side: Side, conn: psycopg.Connection) -> None:
    async def many() -> list[UUID]:
        return await asyncio.gather(*(bridge.asubmit("plain", {"n": n}) for n in range(20)))

    ids = asyncio.run(many())
    assert len(side.rows("SELECT FROM job WHERE id = ANY(%s)", ids)) == 20
    with pytest.raises(TypeError, match="conn"):
        asyncio.run(bridge.asubmit("plain", {}, conn=conn))


def test_c16_a_forked_child_opens_its_own_connection(app: Celery, side: Side) -> None:
    bridge.submit("plain", {"who": "parent"})
    pids = []
    for _ in range(3):
        if not (pid := os.fork()):
            try:
                for _ in range(5):
                    bridge.submit("plain", {"who": "child"})
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    bridge.submit("plain", {"who": "parent"})
    assert len(side.rows("SELECT FROM job")) == 17


def test_the_first_use_from_many_threads_at_once(app: Celery, side: Side) -> None:
    barrier = threading.Barrier(12)
    failed: list[BaseException] = []

    def first() -> None:
        barrier.wait()
        try:
            for _ in range(5):
                bridge.submit("plain", {})
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=first) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(side.rows("SELECT FROM job")) == 60


def test_a_module_that_submits_while_it_is_imported(stack: Stack, side: Side, tmp_path: Path) -> None:
    """In a producer, and in a worker before it forks: no child shares the connection."""
    (tmp_path / "eager.py").write_text(
        "import bridge\n"
        "@bridge.job('eager', queue='test')\n"
        "def eager(context, params):\n"
        "    return bridge.submit('quick', {})\n"
        "bridge.submit('eager', {})\n"
    )
    settings = {"BRIDGE_IMPORTS": "tests.jobs,eager", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    producer = stack.start(["-c", "import eager"], **settings)
    assert producer.popen.wait(30) == 0, producer.log
    worker = stack.worker(**settings)
    until(lambda: side.counts() == {"completed": 4}, what=lambda: worker.tail)
    assert len(side.rows("SELECT FROM job WHERE name = 'quick'")) == 2


def test_submit_asks_no_broker(stack: Stack, side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_DATABASE_URL", stack.database_url)
    monkeypatch.setenv("BRIDGE_BROKER_URL", "redis://localhost:1/0")
    bridge.install(Celery("no broker", set_as_current=False))
    assert side.status(bridge.submit("plain", {})) == "new"


def test_submit_survives_a_killed_session(app: Celery, side: Side) -> None:
    bridge.submit("plain", {})
    side.conn.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'bridge' AND datname = current_database()"
    )
    bridge.submit("plain", {})
    assert len(side.rows("SELECT FROM job")) == 2


def test_c40_a_database_that_is_not_there_is_a_prompt_error(
    app: Celery, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("BRIDGE_DATABASE_URL", f"postgresql://someone:hush@/nowhere?host={tmp_path}")
    with pytest.raises(DatabaseUnavailable, match="cannot be reached") as caught:
        bridge.submit("plain", {})
    assert "hush" not in str(caught.value)


def test_plain_sql_wakes_a_sleeping_dispatcher_and_no_busy_one(side: Side, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as listener:
        listener.execute("LISTEN bridge_due")

        def heard() -> int:
            return len([*listener.notifies(timeout=0.2)])

        side.insert("plain")
        assert heard() == 1, "no mark means notify"
        mark = "INSERT INTO bridge_dispatcher (id, tenant, asleep) VALUES (gen_random_uuid(), 'default', %s)"
        side.conn.execute(mark, (False,))
        side.insert("plain")
        assert heard() == 0, "all are awake"
        side.conn.execute(mark, (True,))
        side.insert("plain")
        until(lambda: heard() == 1, what="somebody sleeps")
