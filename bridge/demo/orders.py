"""The shop's till: each order and its jobs are one transaction, so that neither exists without the other."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib.resources import files
from itertools import islice
from typing import Any
from uuid import UUID, uuid4

import psycopg

import bridge
from bridge.demo.expected import Expected

TABLES = """
CREATE SCHEMA shop;
CREATE TABLE shop.orders (
    id integer PRIMARY KEY, customer text NOT NULL, email text NOT NULL, item text NOT NULL,
    quantity integer NOT NULL, price numeric(12, 2) NOT NULL, currency text NOT NULL,
    bank text NOT NULL, asked integer NOT NULL DEFAULT 0, paid_at timestamptz
);
CREATE TABLE shop.catalogue (sku uuid PRIMARY KEY, name text NOT NULL, price numeric(12, 2), valid_from timestamptz);
CREATE TABLE shop.mail (id uuid PRIMARY KEY, recipient text NOT NULL, subject text NOT NULL);
"""
INSERT_ORDER = """
INSERT INTO shop.orders (id, customer, email, item, quantity, price, currency, bank)
VALUES (%(id)s, %(customer)s, %(email)s, %(item)s, %(quantity)s, %(price)s, %(currency)s, %(bank)s)
"""
PAY_WITHIN = timedelta(days=14)
REMIND_AFTER = timedelta(seconds=2)

Connection = psycopg.Connection[Any]
Jobs = dict[UUID, Expected]


@dataclass(frozen=True, slots=True)
class Order:
    """A line of orders.csv; `what_happens` is what the demo lets happen to it."""

    id: int
    customer: str
    email: str
    item: str
    quantity: int
    price: Decimal
    currency: str
    what_happens: str

    @property
    def total(self) -> Decimal:
        """What the customer owes."""
        return self.quantity * self.price

    @property
    def row(self) -> dict[str, object]:
        """The order as parameters of INSERT_ORDER."""
        names = ("id", "customer", "email", "item", "quantity", "price", "currency")
        bank = self.what_happens.removeprefix("bank ") if self.what_happens.startswith("bank ") else "works"
        return {**{name: getattr(self, name) for name in names}, "bank": bank}


class OutOfStock(Exception):
    """An order that cannot be met, found out in the middle of its transaction; `jobs` are those it had until then."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__()
        self.jobs = jobs


def read(count: int) -> Iterator[Order]:
    """The first orders of orders.csv."""
    text = files("bridge.demo").joinpath("orders.csv").read_text(encoding="utf-8")
    for line in islice(csv.DictReader(text.splitlines()), count):
        yield Order(
            id=int(line["id"]),
            customer=line["customer"],
            email=line["email"],
            item=line["item"],
            quantity=int(line["quantity"]),
            price=Decimal(line["price"]),
            currency=line["currency"],
            what_happens=line["what_happens"],
        )


def take(conn: Connection, order: Order) -> Jobs:
    """Take an order: its row and its jobs' rows in one transaction.

    Returns:
        The jobs, and how each must end.

    Raises:
        OutOfStock: the transaction is rolled back.
    """
    with conn.transaction():
        conn.execute(INSERT_ORDER, order.row)
        jobs = submit_invoice(conn, order)
        jobs |= submit_reminder(conn, order) if order.what_happens == "pays later" else submit_charge(conn, order)
        if order.what_happens == "out of stock":
            raise OutOfStock(jobs)
    return jobs


def submit_invoice(conn: Connection, order: Order) -> Jobs:
    """The order's invoice, to be written soon."""
    document = uuid4()
    params = {"order_id": order.id, "document": document, "total": order.total, "issued_at": datetime.now(UTC)}
    job_id = bridge.submit("shop.invoice", params, label=f"order {order.id}", conn=conn)
    return {job_id: Expected("shop.invoice", resource_id=document)}


def submit_charge(conn: Connection, order: Order) -> Jobs:
    """The payment, by card; a busy bank takes a few attempts, a bank that is down uses them up."""
    params = {"order_id": order.id, "amount": order.total, "currency": order.currency}
    job_id = bridge.submit("shop.charge", params, label=f"order {order.id}", conn=conn)
    match order.what_happens:
        case "bank is busy":
            return {job_id: Expected("shop.charge", retry_num=2)}
        case "bank is down":
            return {job_id: Expected("shop.charge", "failed", retry_num=3, ex_type="retry")}
        case _:
            return {job_id: Expected("shop.charge")}


def submit_reminder(conn: Connection, order: Order) -> Jobs:
    """A reminder to pay: it is due later, and nothing waits for it meanwhile but its row."""
    params = {"order_id": order.id, "due_at": datetime.now(UTC) + PAY_WITHIN}
    job_id = bridge.submit("shop.remind", params, delay=REMIND_AFTER, label=f"order {order.id}", conn=conn)
    return {job_id: Expected("shop.remind", not_before=REMIND_AFTER)}
