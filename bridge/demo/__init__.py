"""A small shop on servers from wheels: what `bridge demo` runs, and a first example of how to use the library.

Read `shop.py` for the jobs, `orders.py` for how they are submitted, `story.py` for the order of events.
"""

from __future__ import annotations


def run(*, orders: int = 200, keep: str | None = None) -> int:
    """Play the shop once, and check every row that it leaves.

    Args:
        orders: how many of the orders in orders.csv, 1 to 200.
        keep: folder for the invoices; None makes a new one in the system's temporary folder.

    Returns:
        The exit code: 0 if every job ended as it should, 1 if not, 128 + the signal that broke the demo off.

    Raises:
        ConfigurationError: a server did not start, or the folder cannot be written.
    """
    from bridge.demo.story import play  # here, because a worker that imports the jobs needs none of it

    return play(orders, keep)
