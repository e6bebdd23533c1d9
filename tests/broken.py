"""The bridge, broken on purpose: `pytest -p tests.broken` with BRIDGE_TEST_BROKEN=<variant> must fail.

A guarantee whose removal no test notices is not tested: tests/integration/test_broken.py runs each variant.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import psycopg

from bridge import ledger, progress
from bridge.sql import statement

FENCE = "AND (%(run)s::uuid IS NULL OR run_id = %(run)s::uuid)"
LATER = ",\n            scheduled_at + interval '1 millisecond'"


def _rewritten(*changes: tuple[str, str]) -> None:
    """The ledger runs other statements; each change must be one of at least one of them."""
    found = set()

    def broken(name: str) -> str:
        text = statement(name)
        for old, new in changes:
            if old in text:
                found.add(old)
                text = text.replace(old, new)
        return text

    for name in ("complete", "end", "retry", "claim", "reschedule", "defer", "heartbeat"):
        broken(name)
    assert found == {old for old, _ in changes}, "the statements have changed: break them anew"
    ledger.statement = broken  # type: ignore[attr-defined]  # imported by name


def _no_fence() -> None:
    _rewritten((FENCE, ""))


def _ticket_not_later() -> None:
    _rewritten((LATER, ""), ("scheduled_at = scheduled_at + interval '1 millisecond'", "scheduled_at = scheduled_at"))


def _ticket_not_compared() -> None:
    _rewritten(("AND scheduled_at = %(scheduled_at)s::timestamptz\n        AND name", "AND name"))


def _claim_not_idempotent() -> None:
    def held(*_: Any, **__: Any) -> None:
        return None

    ledger.held = held


def _retry_counted_twice() -> None:
    settle = ledger.settle

    def broken(*args: Any, **options: Any) -> int:
        return settle(*args, **{**options, "repeated": False})

    ledger.settle = broken


def _finish_leaves_the_connection_open() -> None:
    class Open:
        """A connection that finish cannot close."""

        def __init__(self, conn: psycopg.Connection) -> None:
            self.conn = conn

        def __getattr__(self, name: str) -> Any:
            return (lambda: None) if name == "close" else getattr(self.conn, name)

    joined = progress.joined
    progress.joined = lambda conn: _entered(joined(conn), Open)  # type: ignore[attr-defined]  # imported by name


class _entered:  # noqa: N801  # a function that is a context manager
    def __init__(self, block: Any, wrap: Callable[[Any], Any]) -> None:
        self.block, self.wrap = block, wrap

    def __enter__(self) -> Any:
        return self.wrap(self.block.__enter__())

    def __exit__(self, *how: Any) -> Any:
        return self.block.__exit__(*how)


VARIANTS = {
    "no-fence": _no_fence,
    "ticket-not-later": _ticket_not_later,
    "ticket-not-compared": _ticket_not_compared,
    "claim-not-idempotent": _claim_not_idempotent,
    "retry-counted-twice": _retry_counted_twice,
    "finish-leaves-the-connection-open": _finish_leaves_the_connection_open,
}

if variant := os.environ.get("BRIDGE_TEST_BROKEN"):
    VARIANTS[variant]()
