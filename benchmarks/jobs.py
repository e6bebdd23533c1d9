"""The jobs that are measured: they do nothing, or fail with a traceback."""

from typing import Any

from bridge import Context, job


@job("quick", queue="test")
def quick(context: Context, params: dict[str, Any]) -> None:
    """Nothing."""


@job("raises", queue="test")
def raises(context: Context, params: dict[str, Any], depth: int = 50) -> None:
    """An error from deep below."""
    if depth:
        raises(context, params, depth - 1)
    raise ValueError("x" * 1000)
