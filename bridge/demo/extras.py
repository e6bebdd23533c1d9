"""Jobs that are unlike the shop's daily ones: a long one, one from plain SQL, and some that must not succeed."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import NAMESPACE_URL, uuid5

import bridge
from bridge.demo.expected import Expected
from bridge.demo.orders import Connection, Jobs, Order
from bridge.demo.report import Steps, as_typed
from bridge.errors import InvalidParams

INSERT_JOB = "INSERT INTO job (name, params) VALUES (%s, %s) RETURNING id"
THINGS = ("Teapot", "Cup", "Tray", "Jug")
GLAZES = ("white", "celadon", "indigo", "rust", "charcoal")
SIZES = range(1, 16)


def submit_catalogue(steps: Steps) -> Jobs:
    """One long job, which says how far it is."""
    names = [f"{thing}, {glaze}, size {size}" for thing in THINGS for glaze in GLAZES for size in SIZES]
    items = [
        {"sku": uuid5(NAMESPACE_URL, f"https://example.com/{name}"), "name": name, "price": Decimal("4.90") + place}
        for place, name in enumerate(names)
    ]
    job_id = bridge.submit("shop.catalogue", {"valid_from": datetime.now(UTC), "items": items})
    steps.add(f"- a catalogue of {len(items)} items to import: one long job, which reports its progress")
    return {job_id: Expected("shop.catalogue", progress=True)}


def insert_reminder(conn: Connection, steps: Steps, order: Order) -> Jobs:
    """A job without a line of Python: SQL, from any language, is a submission too."""
    params = json.dumps({"order_id": order.id, "due_at": "2031-01-31T12:00:00Z"})
    steps.add("- a job by plain SQL:")
    return _insert(conn, steps, Expected("shop.remind"), params)


def submit_and_cancel(steps: Steps, order: Order) -> Jobs:
    """A job that is due in an hour, and called off before."""
    params = {"order_id": order.id, "due_at": datetime.now(UTC)}
    job_id = bridge.submit("shop.remind", params, delay=timedelta(hours=1))
    cancelled = bridge.cancel(job_id)
    steps.add(f"- a reminder that is due in an hour, and is called off: bridge.cancel(id) returns {cancelled}")
    return {job_id: Expected("shop.remind", "cancelled")}


def insert_bad_params(conn: Connection, steps: Steps, order: Order) -> Jobs:
    """Params that the schema does not allow: submit refuses them, and a worker does."""
    bad = {"order_id": order.id, "amount": Decimal("-5.00"), "currency": "EUR"}
    try:
        bridge.submit("shop.charge", bad)
    except InvalidParams as error:
        steps.add("- params that break the job's schema; submit refuses them:")
        steps.add(f"    {error}")
    steps.add("  plain SQL does not, so the worker will:")
    return _insert(conn, steps, Expected("shop.charge", "failed", ex_type="assertion"), json.dumps(bad, default=str))


def insert_unknown(conn: Connection, steps: Steps) -> Jobs:
    """A job that no worker knows."""
    steps.add("- a job of a name that no worker knows:")
    return _insert(conn, steps, Expected("shop.gift_wrap", "failed", ex_type="not-found"), "{}")


def _insert(conn: Connection, steps: Steps, expected: Expected, params: str) -> Jobs:
    steps.add("    " + as_typed(conn, INSERT_JOB, (expected.name, params)))
    row = conn.execute(INSERT_JOB, (expected.name, params)).fetchone()
    assert row is not None  # noqa: S101 -- RETURNING returns the row
    return {row[0]: expected}
