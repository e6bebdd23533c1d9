"""The shop's jobs. A worker imports this module; importing it reads no setting and connects to nothing.

A job is a function of (context, params) that may run more than once: each of these leaves the same behind
when it does. What the shop itself needs, its database and a folder, it finds in SHOP_DATABASE_URL and
SHOP_INVOICES when a job runs.
"""

from __future__ import annotations

import html
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
from marshmallow import Schema, fields, validate
from psycopg.rows import DictRow, dict_row

import bridge

BANK_DELAY = timedelta(milliseconds=200)
REFUSALS = {"works": 0, "is busy": 2, "is down": 1_000_000}
"""How often a bank does not answer before it does. The bank is played by the shop's table of orders."""

FIND_ORDER = "SELECT * FROM shop.orders WHERE id = %(order_id)s"
ASK_BANK = "UPDATE shop.orders SET asked = asked + 1 WHERE id = %(order_id)s RETURNING asked, bank"
MARK_PAID = "UPDATE shop.orders SET paid_at = now() WHERE id = %(order_id)s AND paid_at IS NULL"
PUT_ITEM = """
INSERT INTO shop.catalogue (sku, name, price, valid_from)
VALUES (%(sku)s, %(name)s, %(price)s, %(valid_from)s)
ON CONFLICT (sku) DO UPDATE
SET name = excluded.name, price = excluded.price, valid_from = excluded.valid_from
"""
WRITE_MAIL = """
INSERT INTO shop.mail (id, recipient, subject)
SELECT %(id)s, email, %(subject)s FROM shop.orders WHERE id = %(order_id)s
ON CONFLICT (id) DO NOTHING
"""

PAGE = """<!doctype html>
<meta charset="utf-8">
<title>Invoice {id}</title>
<h1>Invoice {id}</h1>
<p>{customer}<br>{email}</p>
<table>
<tr><th>Item<th>Quantity<th>Price<th>Total
<tr><td>{item}<td>{quantity}<td>{price}<td>{total} {currency}
</table>
<p>Issued {issued:%d %B %Y}. Document {document}.</p>
"""


def money(**options: Any) -> fields.Decimal:
    """A field for money; as text in the JSON, because JSON has only floats, and floats round."""
    return fields.Decimal(as_string=True, places=2, required=True, **options)


class InvoiceParams(Schema):
    """Params of shop.invoice. The document's id is the caller's, so that a second run writes no second document."""

    order_id = fields.Integer(required=True)
    document = fields.UUID(required=True)
    total = money()
    issued_at = fields.AwareDateTime(required=True)


class ChargeParams(Schema):
    """Params of shop.charge."""

    order_id = fields.Integer(required=True)
    amount = money(validate=validate.Range(min=0, min_inclusive=False))
    currency = fields.String(required=True, validate=validate.Length(equal=3))


class ReminderParams(Schema):
    """Params of shop.remind."""

    order_id = fields.Integer(required=True)
    due_at = fields.AwareDateTime(required=True)


class ItemParams(Schema):
    """An item of a catalogue."""

    sku = fields.UUID(required=True)
    name = fields.String(required=True)
    price = money()


class CatalogueParams(Schema):
    """Params of shop.catalogue."""

    valid_from = fields.AwareDateTime(required=True)
    items = fields.List(fields.Nested(ItemParams), required=True)


@bridge.job("shop.invoice", schema=InvoiceParams)
def invoice(context: bridge.Context, params: dict[str, Any]) -> dict[str, object]:
    """Write an order's invoice as a file. The row keeps the result, and the document's id as its resource."""
    with database() as conn:
        order = conn.execute(FIND_ORDER, params).fetchone()
    assert order is not None  # noqa: S101 -- the order and this job were committed together
    text = {key: html.escape(str(value)) for key, value in order.items()}
    page = PAGE.format(**text, total=params["total"], issued=params["issued_at"], document=params["document"])
    file = Path(os.environ["SHOP_INVOICES"], f"invoice-{params['order_id']}.html")
    file.write_text(page, encoding="utf-8")
    return {"result": {"file": file.name, "total": params["total"]}, "resource_id": params["document"]}


@bridge.job("shop.charge", schema=ChargeParams, max_retries=3)
def charge(context: bridge.Context, params: dict[str, Any]) -> dict[str, object]:
    """Charge a card. A bank that does not answer is asked again after 200, 400 and 800 ms, then no more."""
    with database() as conn:
        bank = conn.execute(ASK_BANK, params).fetchone()
        assert bank is not None  # noqa: S101 -- the order and this job were committed together
        if bank["asked"] <= REFUSALS[bank["bank"]]:
            raise bridge.Retry(f"the bank {bank['bank']}", delay=BANK_DELAY)
        conn.execute(MARK_PAID, params)
    return {"charged": params["amount"], "currency": params["currency"]}


@bridge.job("shop.remind", schema=ReminderParams)
def remind(context: bridge.Context, params: dict[str, Any]) -> None:
    """Remind a customer to pay. The job's id is the mail's id, so that a second run writes no second mail."""
    subject = f"Order {params['order_id']}: please pay by {params['due_at']:%d %B %Y}"
    with database() as conn:
        conn.execute(WRITE_MAIL, {**params, "id": context.id, "subject": subject})


@bridge.job("shop.catalogue", schema=CatalogueParams, queue="imports")
def catalogue(context: bridge.Context, params: dict[str, Any]) -> dict[str, object]:
    """Import a catalogue, and say how far it is. Heartbeats are cheap: at most one a second is written."""
    items = params["items"]
    with database() as conn:
        for number, item in enumerate(items, start=1):
            conn.execute(PUT_ITEM, {**item, "valid_from": params["valid_from"]})
            done = number == len(items)
            bridge.heartbeat({"current": number, "total": len(items), "stage": item["name"][:250]}, force=done)
    return {"items": len(items)}


def database() -> psycopg.Connection[DictRow]:
    """A connection to the shop's database. In autocommit, so that a Retry that is raised rolls back nothing."""
    return psycopg.connect(os.environ["SHOP_DATABASE_URL"], autocommit=True, row_factory=dict_row)
