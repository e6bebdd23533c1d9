"""JSON as users expect it, and text that PostgreSQL can store.

`dumps` encodes what a handler returns (rich Python values); `check_plain` refuses, for params without a
schema, whatever would come back as something else.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Set
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from bridge.errors import EncodingError

MAX_DEPTH = 100
"""Levels of nesting that are stored; PostgreSQL and Python's json both have a limit, ours is below them."""

MAX_BYTES = 4 * 1024 * 1024
"""Bytes of JSON text that params or a result may have; larger things belong in storage, their id here."""

MAX_TEXT = 2000
"""Characters of an error's hint."""

_INT64 = 2**63


def dumps(value: object) -> str:
    """The value as JSON text that jsonb takes.

    UUID, datetime, date, time become ISO text, timedelta its seconds, Decimal its exact text, an Enum its
    value, a dataclass an object, set and tuple a list.

    Raises:
        EncodingError: it has no such form (NaN, NUL, bytes, a cycle, more than 100 levels, more than 4 MiB).

    Example:
        >>> dumps({"total": Decimal("9.90"), "seen": (1, 2)})
        '{"total": "9.90", "seen": [1, 2]}'
    """
    plain = _plain(value, 0)
    text = json.dumps(plain, allow_nan=False, ensure_ascii=False)
    if len(text) > MAX_BYTES or len(text.encode()) > MAX_BYTES:
        raise EncodingError(f"is larger than {MAX_BYTES // 1024 // 1024} MiB as JSON")
    return text


def _plain(value: object, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise EncodingError(f"is nested deeper than {MAX_DEPTH} levels (or contains itself)")
    match value:
        case Enum():
            return _plain(value.value, depth + 1)
        case None | bool():
            return value
        case str():
            return _text(value)
        case int() | float():
            return _number(value)
        case UUID() | Decimal() | date() | time() | timedelta():
            return _scalar(value)
        case _:
            return _compound(value, depth + 1)


def _compound(value: object, depth: int) -> object:
    match value:
        case Mapping():
            pairs = [(_key(key), _plain(item, depth)) for key, item in value.items()]
            found = dict(pairs)
            if len(found) != len(pairs):
                raise EncodingError("has two keys that are the same text in JSON")
            return found
        case list() | tuple():
            return [_plain(item, depth) for item in value]
        case Set():
            return _sorted([_plain(item, depth) for item in value])
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {each.name: _plain(getattr(value, each.name), depth) for each in dataclasses.fields(value)}
    return _refuse(value)


def _scalar(value: UUID | Decimal | date | time | timedelta) -> object:
    match value:
        case date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal() if not value.is_finite():
            return _refuse(value)
    return str(value)


def _refuse(value: object) -> Any:
    raise EncodingError(f"holds a {type(value).__name__} that has no JSON form")


def _key(key: object) -> str:
    match key:
        case Enum():
            return _key(key.value)
        case str():
            return _text(key)
        case bool() | None:
            return json.dumps(key)
        case date():
            return key.isoformat()
        case int() | UUID() | Decimal():
            return str(key)
    raise EncodingError(f"has a key of type {type(key).__name__}, which has no JSON form")


def _number(value: float) -> float:
    if isinstance(value, float) and not math.isfinite(value):
        raise EncodingError("holds NaN or Infinity, which JSON does not have")
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise EncodingError("holds an integer beyond 64 bits")
    return value


def _text(value: str) -> str:
    if "\0" in value:
        raise EncodingError("holds a NUL character, which PostgreSQL cannot store")
    if not value.isprintable() and any("\ud800" <= char <= "\udfff" for char in value):
        raise EncodingError("holds a lone surrogate, which is not text")
    return str.__str__(value)


def _sorted(items: list[object]) -> list[object]:
    try:
        return sorted(items)  # type: ignore[type-var]  # mixed types are caught right here
    except TypeError:
        return items


def check_plain(value: object, *, where: str = "params") -> None:
    """Refuse what does not come back from JSON as the same value.

    Raises:
        EncodingError: the message names the place, for example `params.items[2]`.
    """
    for path, item, depth in _walk(value, where, 0):
        if depth > MAX_DEPTH:
            raise EncodingError(f"{where} is nested deeper than {MAX_DEPTH} levels (or contains itself)")
        try:
            match item:
                case bool() | None | dict() | list():
                    pass
                case str() if type(item) is str:
                    _text(item)
                case int() | float() if type(item) in (int, float):
                    _number(item)
                case _:
                    raise EncodingError(
                        f"is a {type(item).__name__}, which JSON would turn into something else: "
                        "give the job a schema, or convert the value first"
                    )
        except EncodingError as error:
            raise EncodingError(f"{path} {error}") from None


def _walk(value: object, path: str, depth: int) -> Iterator[tuple[str, object, int]]:
    stack = [(path, value, depth)]
    while stack:
        path, value, depth = stack.pop()
        yield path, value, depth
        if isinstance(value, dict):
            for key in value:
                if type(key) is not str:
                    raise EncodingError(f"{path} has the key {key!r}: the keys of a JSON object are text")
                _text_at(key, path)
            stack.extend((f"{path}.{key}", item, depth + 1) for key, item in value.items())
        elif isinstance(value, list):
            stack.extend((f"{path}[{index}]", item, depth + 1) for index, item in enumerate(value))


def _text_at(key: str, path: str) -> None:
    try:
        _text(key)
    except EncodingError as error:
        raise EncodingError(f"a key of {path} {error}") from None


def safe_text(value: object, *, limit: int = MAX_TEXT) -> str:
    """Any text, or any object's `str()`, as text that jsonb takes: without NUL or surrogates, bounded.

    Never raises: an object whose `str()` fails is shown by its class.
    """
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception:
        text = f"<{type(value).__name__} whose str() failed>"
    cut = text[:limit]
    cut = cut.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "replace").decode()
    return cut if len(text) <= limit else f"{cut[: limit - 1]}…"
