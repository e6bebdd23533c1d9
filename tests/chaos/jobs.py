"""The jobs of the chaos run. Each tells a witness, a database that no fault touches, when its body runs."""

from __future__ import annotations

import os
import random
import time
from typing import Any
from uuid import UUID

import psycopg

from bridge import Context, Retry, finish, job
from bridge.progress import _current

_witness: dict[int, psycopg.Connection] = {}


def tell(job_id: UUID, run: UUID, what: str) -> None:
    """Write down that a body starts, goes on or ends."""
    pid = os.getpid()
    if pid not in _witness:
        _witness.clear()
        _witness[pid] = psycopg.connect(os.environ["CHAOS_WITNESS"], autocommit=True)
    _witness[pid].execute("INSERT INTO body (job_id, run, what) VALUES (%s, %s, %s)", (job_id, run, what))


def body(job_id: UUID, run: UUID, seconds: float) -> None:
    """Start, go on, end."""
    tell(job_id, run, "start")
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))
        tell(job_id, run, "on")
    tell(job_id, run, "end")


def work(context: Context, seconds: float) -> None:
    """The body of a job of ours."""
    current = _current.get()
    assert current is not None
    body(context.id, current.run.id, seconds)


@job("steady", max_retries=100, retry_lost=True)
def steady(context: Context, params: dict[str, Any]) -> str:
    work(context, params["seconds"])
    return "done"


@job("flaky", max_retries=100, retry_lost=True)
def flaky(context: Context, params: dict[str, Any]) -> str:
    work(context, params["seconds"])
    if random.random() < 0.3:
        raise Retry("not yet", delay=200)
    if random.random() < 0.1:
        raise ValueError("an error")
    return "done"


@job("once", max_retries=100)
def once(context: Context, params: dict[str, Any]) -> str:
    """Not to be repeated when its process dies."""
    work(context, params["seconds"])
    return "done"


@job("books", max_retries=100, retry_lost=True)
def books(context: Context, params: dict[str, Any]) -> None:
    """Has an effect that commits together with its end."""
    work(context, params["seconds"])
    with psycopg.connect(os.environ["BRIDGE_DATABASE_URL"], connect_timeout=5) as conn:
        conn.execute("INSERT INTO effect (job_id) VALUES (%s)", (context.id,))
        finish(conn, "booked")


@job("fails", max_retries=1, retry_lost=True)
def fails(context: Context, params: dict[str, Any]) -> None:
    work(context, params["seconds"])
    raise ValueError("always")


KINDS = (*["steady"] * 10, *["flaky"] * 3, *["once"] * 3, *["books"] * 3, "fails")
