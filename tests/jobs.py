"""The jobs that tests run. Each writes down what it was called with, in table `received`."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from enum import Enum
from pathlib import Path
from typing import Any

import psycopg
from marshmallow import Schema, fields

from bridge import Completion, Context, Retry, finish, heartbeat, job

_tick = threading.Event()


class Kind(Enum):
    """What is echoed."""

    SNAPSHOT = "snapshot"


class EchoParams(Schema):
    """Typed params."""

    object = fields.Enum(Kind, by_value=True, required=True)
    deleted_at = fields.AwareDateTime(required=True)
    id = fields.UUID(required=True)


def note(context: Context, params: Any) -> None:
    """Write down a call, in a transaction of its own."""
    said = {key: None if (v := getattr(context, key)) is None else str(v) for key in context.__slots__}
    with psycopg.connect(os.environ["BRIDGE_DATABASE_URL"], autocommit=True) as conn:
        conn.execute(
            "INSERT INTO received (job_id, context, params) VALUES (%s, %s, %s)",
            (context.id, json.dumps(said), repr(params)),
        )


@job("echo", schema=EchoParams, queue="test")
def echo(context: Context, params: dict[str, Any]) -> Any:
    note(context, params)
    return params


@job("plain", queue="test")
def plain(context: Context, params: dict[str, Any]) -> Any:
    note(context, params)
    return params


@job("quick", queue="test")
def quick(context: Context, params: dict[str, Any]) -> None:
    """Leaves no trace of its own."""


@job("again", queue="test")
def again(context: Context, params: dict[str, Any]) -> None:
    """Asks for a retry as params say: delay in ms, strategy."""
    note(context, params)
    raise Retry("transient failure", delay=params.get("delay"), strategy=params.get("strategy", "backoff"))


@job("flaky", queue="test")
def flaky(context: Context, params: dict[str, Any]) -> str:
    """Fails as often as params say, then succeeds."""
    note(context, params)
    with psycopg.connect(os.environ["BRIDGE_DATABASE_URL"]) as conn:
        row = conn.execute("SELECT count(*) FROM received WHERE job_id = %s", (context.id,)).fetchone()
    if row and row[0] <= params["times"]:
        raise Retry("transient failure", delay=params.get("delay", 50))
    return "done"


@job("raises", queue="test", max_retries=0)
def raises(context: Context, params: dict[str, Any]) -> None:
    note(context, params)
    raise {"ValueError": ValueError, "SystemExit": SystemExit, "MemoryError": MemoryError}[params["what"]]("fatal")


@job("envelope", queue="test")
def envelope(context: Context, params: dict[str, Any]) -> Any:
    note(context, params)
    if params.get("typed"):
        return Completion({"business": 1}, resource_id=params["resource_id"])
    return {"result": {"business": 1}, "resource_id": params["resource_id"]}


@job("naps", queue="test")
def naps(context: Context, params: dict[str, Any]) -> str:
    """Takes its time, in small bites."""
    note(context, params)
    end = time.monotonic() + params["seconds"]
    while time.monotonic() < end:
        _tick.wait(0.02)
    return "rested"


@job("held", queue="test")
def held(context: Context, params: dict[str, Any]) -> str:
    """Runs until the test makes the file that params name."""
    note(context, params)
    while not Path(params["until"]).exists():
        _tick.wait(0.02)
    return "let go"


@job("finishes", queue="test")
def finishes(context: Context, params: dict[str, Any]) -> None:
    """Has its effect in the transaction of its finish, and waits before or after the commit."""
    note(context, params)
    with psycopg.connect(os.environ["BRIDGE_DATABASE_URL"]) as conn:
        conn.execute("INSERT INTO effect VALUES ('there')")
        finish(conn, "done")
        if params["committed"]:
            conn.commit()
        Path(f"{params['until']}.there").touch()
        while not Path(params["until"]).exists():
            _tick.wait(0.02)


@job("beats", queue="test", max_retries=0)
def beats(context: Context, params: dict[str, Any]) -> None:
    """Heartbeats until it is told that its row is gone."""
    note(context, params)
    while True:
        heartbeat({"current": 1}, force=True)
        _tick.wait(0.02)


class Stubborn(Exception):
    """Cannot be rebuilt from its args, copied or shown."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle")


class Below(BaseException):
    """No Exception."""


def anything() -> dict[str, BaseException]:
    """What a handler may raise, by name."""

    class Local(Exception):
        pass

    return {
        "stubborn": Stubborn(1, 2),
        "local": Local("here"),
        "below": Below("base"),
        "group": ExceptionGroup("many", [ValueError(1), TypeError(2)]),
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt("now"),
        "generator": GeneratorExit("closed"),
        "memory": MemoryError("full"),
        "large": ValueError("x" * 10_000_000),
        "nul": ValueError("a\0b"),
        "surrogate": ValueError("a\udc80b"),
        "empty": ValueError(),
    }


@job("raises-anything", queue="test")
def raises_anything(context: Context, params: dict[str, Any]) -> None:
    """Raises what params name."""
    note(context, params)
    if params["what"] == "recursion":
        raises_anything(context, params)
    raise anything()[params["what"]]


@job("waits-in-sql", queue="test", max_retries=0, soft_time_limit=1)
def waits_in_sql(context: Context, params: dict[str, Any]) -> None:
    """Runs into its soft time limit inside a statement of its own."""
    note(context, params)
    with psycopg.connect(os.environ["BRIDGE_DATABASE_URL"]) as conn:
        conn.execute("SELECT pg_sleep(20)")


@job("changes-its-params", queue="test", max_retries=3)
def changes_its_params(context: Context, params: dict[str, Any]) -> None:
    """Spoils what it was given, and asks for a retry."""
    note(context, params)
    params["list"].append("spoilt")
    raise Retry("again", delay=10)


@job("lost-again", queue="test", retry_lost=True, max_retries=1)
def lost_again(context: Context, params: dict[str, Any]) -> None:
    """Kills its process."""
    note(context, params)
    os.kill(os.getpid(), 9)


@job("dies", queue="test")
def dies(context: Context, params: dict[str, Any]) -> None:
    """Ends its process in the way that params say."""
    note(context, params)
    if params["how"] == "exit":
        os._exit(3)
    os.kill(os.getpid(), params["how"])


@job("starves", queue="test", max_retries=0)
def starves(context: Context, params: dict[str, Any]) -> None:
    """Leaves its process little memory, as a leak does."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 20_000_000, -1))


@job("limited", queue="test", max_retries=0, time_limit=2)
def limited(context: Context, params: dict[str, Any]) -> None:
    """Runs into its hard time limit."""
    note(context, params)
    while True:
        _tick.wait(0.05)


@job("soft-limited", queue="test", max_retries=0, soft_time_limit=1)
def soft_limited(context: Context, params: dict[str, Any]) -> None:
    """Runs into its soft time limit, unless params say stop."""
    note(context, params)
    while not params.get("stop"):
        _tick.wait(0.05)


@job("aborts-itself", queue="test")
def aborts_itself(context: Context, params: dict[str, Any]) -> str:
    """What a dispatcher does to a row whose lease is over, while the handler runs."""
    note(context, params)
    error = {"type": "internal", "code": "orphan", "hint": "job execution lease expired", "ex_type": "orphan"}
    with psycopg.connect(os.environ["BRIDGE_DATABASE_URL"], autocommit=True) as conn:
        conn.execute("UPDATE job SET status = 'aborted', error = %s WHERE id = %s", (json.dumps(error), context.id))
    return "ok"


@job("reports", queue="test")
def reports(context: Context, params: dict[str, Any]) -> list[int | None]:
    """Reports progress, as often as params say."""
    note(context, params)
    return [
        heartbeat({"current": i, "total": params["times"], "stage": "work"}, force=params.get("force", False))
        for i in range(1, params["times"] + 1)
    ]


@job("calls-another", queue="test")
def calls_another(context: Context, params: dict[str, Any]) -> Any:
    """Calls decorated handlers as plain functions, itself among them."""
    if params.get("inner"):
        return "inner"
    return [plain(context, {"called": "directly"}), calls_another(context, {"inner": True})]
