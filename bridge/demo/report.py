"""What the demo says: numbered steps, progress while it waits, and queries with their answers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, LiteralString

import click
import psycopg
from psycopg.types.string import TextLoader

INDENT = "    "

Params = Mapping[str, object] | Sequence[object]


@dataclass(slots=True)
class Steps:
    """Numbers the steps."""

    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def say(self, text: str) -> None:
        """The next step begins."""
        click.echo(f"{next(self.numbers):2}. {text}")

    def add(self, text: str) -> None:
        """More about the present step."""
        click.echo(INDENT + text)


def watch(counts: Iterable[int], total: int) -> None:
    """Show the counts as they come: a bar in a terminal, a line for every quarter elsewhere."""
    if sys.stdout is not None and sys.stdout.isatty():
        with click.progressbar(length=total, label=f"{INDENT}jobs over", show_eta=False, show_pos=True) as bar:
            for done in counts:
                bar.update(done - bar.pos)
        return
    quarter = 0
    for done in counts:
        if done * 4 // total > quarter:
            quarter = done * 4 // total
            click.echo(f"{INDENT}{done} of {total} jobs are over")


def ask(conn: psycopg.Connection[Any], query: LiteralString, params: Params | None = None) -> None:
    """Show a query, as it could be typed into psql, and its answer as a table."""
    for line in as_typed(conn, query.strip(), params).splitlines():
        click.echo(f"{INDENT}{line}")
    with psycopg.ClientCursor(conn) as cursor:
        cursor.adapters.register_loader("jsonb", TextLoader)  # as PostgreSQL writes it
        cursor.execute(query, params)
        names = [column.name for column in cursor.description or ()]
        rows = [["" if value is None else str(value) for value in row] for row in cursor.fetchall()]
    click.echo()
    for line in table(names, rows):
        click.echo(f"{INDENT}{line}")
    click.echo()


def as_typed(conn: psycopg.Connection[Any], query: LiteralString, params: Params | None = None) -> str:
    """A query with its parameters in it, for people to read."""
    return psycopg.ClientCursor(conn).mogrify(query, params)


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table; columns of numbers are set to the right."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    right = [all(row[at].isdigit() for row in rows) for at in range(len(names))]

    def line(cells: Sequence[str]) -> str:
        pairs = zip(cells, widths, right, strict=True)
        return "  ".join(cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in pairs)

    yield line(names).rstrip()
    yield "  ".join("-" * width for width in widths)
    for row in rows:
        yield line(row).rstrip()
