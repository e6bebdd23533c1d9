from __future__ import annotations

import enum
import json
from collections import ChainMap, OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.encoding import MAX_BYTES, MAX_DEPTH, MAX_TEXT, check_plain, dumps, safe_text
from bridge.errors import EncodingError

ID = UUID("0199b1a7-0000-7000-8000-000000000001")
AT = datetime(2026, 11, 30, 12, 0, 0, 1, tzinfo=UTC)
Pair = namedtuple("Pair", "a b")


class Colour(enum.Enum):
    RED = "red"
    DAY = date(2026, 1, 2)


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Line:
    price: Decimal
    tags: tuple[Colour, ...]


class Masked(str):
    """Text whose str() is not its characters."""

    __slots__ = ()

    def __str__(self):
        return "\0"


class Broken:
    def __str__(self):
        raise RuntimeError("no text")


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


ENCODED = {
    "null": (None, None),
    "bool": (True, True),
    "int": (2**63 - 1, 2**63 - 1),
    "text": ('ä"\\\n\U0001f600', 'ä"\\\n\U0001f600'),
    "str subclass": (Masked("text"), "text"),
    "uuid": (ID, str(ID)),
    "datetime": (AT, "2026-11-30T12:00:00.000001+00:00"),
    "date": (date(2026, 1, 2), "2026-01-02"),
    "time": (time(1, 2), "01:02:00"),
    "timedelta": (timedelta(minutes=1, milliseconds=1), 60.001),
    "decimal": (Decimal("9.90"), "9.90"),
    "enum": ([Colour.RED, Colour.DAY, Level.HIGH], ["red", "2026-01-02", 3]),
    "dataclass": (Line(Decimal("1.0"), (Colour.RED,)), {"price": "1.0", "tags": ["red"]}),
    "tuple": ((1, (2,)), [1, [2]]),
    "set": ({3, 1, 2}, [1, 2, 3]),
    "frozenset of uuids": (frozenset([ID]), [str(ID)]),
    "mapping": (ChainMap({"a": 1}, {"b": 2}), {"a": 1, "b": 2}),
    "plain keys": ({1: "a", False: "b", None: "c"}, {"1": "a", "false": "b", "null": "c"}),
    "typed keys": ({ID: 1, Colour.RED: 2, date(2026, 1, 2): 3}, {str(ID): 1, "red": 2, "2026-01-02": 3}),
    "datetime key": ({AT: 1}, {"2026-11-30T12:00:00.000001+00:00": 1}),
    "deepest": (nested(MAX_DEPTH), nested(MAX_DEPTH)),
    "largest": ("x" * (MAX_BYTES - 2), "x" * (MAX_BYTES - 2)),
}


@pytest.mark.parametrize(("value", "expected"), ENCODED.values(), ids=ENCODED.keys())
def test_a_value_is_encoded_as_users_expect(value, expected):
    assert json.loads(dumps(value)) == expected


CYCLE: list[object] = []
CYCLE.append({"again": CYCLE})

REFUSED = {
    "nan": (float("nan"), "NaN"),
    "decimal nan": (Decimal("NaN"), "a Decimal that has no JSON form"),
    "nul": ({"a": "x\0"}, "NUL"),
    "nul in a key": ({"x\0": 1}, "NUL"),
    "surrogate": (["\udc80"], "surrogate"),
    "int over 64 bits": (2**63, "64 bits"),
    "bytes": (b"x", "a bytes that"),
    "object": (object(), "an? object that"),
    "generator": ((each for each in "ab"), "a generator that"),
    "tuple key": ({(1, 2): 3}, "a key of type tuple"),
    "two keys of one text": ({1: "a", "1": "b"}, "key"),
    "cycle": (CYCLE, "contains itself"),
    "too deep": (nested(MAX_DEPTH + 1), "deeper than 100 levels"),
    "too large": ("x" * (MAX_BYTES - 1), "larger than 4 MiB"),
    "too large in utf-8": ("ä" * (MAX_BYTES // 2), "larger than 4 MiB"),
}


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_has_no_json_form_is_refused(value, message):
    with pytest.raises(EncodingError, match=message):
        dumps(value)


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.uuids() | st.decimals(allow_nan=False)
)
OTHERS = (
    st.datetimes()
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.binary()
    | st.sampled_from([*Colour, Decimal("NaN")])
)
ANYTHING = st.recursive(
    SCALARS | OTHERS | st.text("a\0\ud800\\u"),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner)
        | st.frozensets(SCALARS)
        | st.dictionaries(SCALARS | st.text("a\0\ud800\\u"), inner)
    ),
)


@given(ANYTHING)
def test_whatever_is_encoded_is_json_that_postgres_stores(value):
    try:
        text = dumps(value)
    except EncodingError:
        return
    text.encode()
    assert "\\u0000" not in text.replace("\\\\", "")
    assert dumps(json.loads(text, parse_constant=pytest.fail)) == text


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_what_is_plain_comes_back_as_it_was(value):
    try:
        check_plain(value)
    except EncodingError:
        return
    assert json.loads(dumps(value)) == value


PLAIN = [None, True, 1, 0.5, "a", [], {}, {"a": [{"b": [1, None]}]}, OrderedDict(a=1), nested(MAX_DEPTH)]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_json_passes(value):
    check_plain(value)


PLACES = {
    "set": ({"items": [1, 2, {3}]}, r"params\.items\[2\] is a set, .*give the job a schema"),
    "tuple": ({"a": (1,)}, r"params\.a is a tuple"),
    "str subclass": ({"a": Masked("x")}, r"params\.a is a Masked"),
    "nan": ({"a": {"b": float("nan")}}, r"params\.a\.b holds NaN"),
    "nul": ({"a": "\0"}, r"params\.a holds a NUL"),
    "huge int": ({"a": 2**63}, r"params\.a holds an integer beyond 64 bits"),
    "int key": ({"a": {1: 2}}, r"params\.a has the key 1: the keys of a JSON object are text"),
    "nul key": ({"a": {"b\0": 2}}, r"a key of params\.a holds a NUL"),
    "too deep": ({"a": nested(MAX_DEPTH)}, r"params is nested deeper"),
    "far too deep": (nested(100_000), r"params is nested deeper"),
    "cycle": (CYCLE, r"contains itself"),
}


@pytest.mark.parametrize(("value", "message"), PLACES.values(), ids=PLACES.keys())
def test_what_would_come_back_as_something_else_is_refused_with_its_place(value, message):
    with pytest.raises(EncodingError, match=message):
        check_plain(value)


TEXTS = {
    "text": ("ä\U0001f600", "ä\U0001f600"),
    "object": (ValueError("bad"), "bad"),
    "nul": ("a\0b", "a\N{SYMBOL FOR NULL}b"),
    "surrogates": ("a\ud800\udfffb", "a??b"),
    "failing str": (Broken(), "<Broken whose str() failed>"),
    "at the limit": ("x" * MAX_TEXT, "x" * MAX_TEXT),
    "beyond the limit": ("x" * (MAX_TEXT + 1), "x" * (MAX_TEXT - 1) + "…"),
    "ten megabytes": ("\0" * 10_000_000, "\N{SYMBOL FOR NULL}" * (MAX_TEXT - 1) + "…"),
}


@pytest.mark.parametrize(("value", "expected"), TEXTS.values(), ids=TEXTS.keys())
def test_text_is_made_safe_and_bounded(value, expected):
    assert safe_text(value) == expected


@given(st.text(st.characters(codec=None) | st.sampled_from("\0\ud800\udfff")), st.integers(1, 20))
def test_safe_text_is_storable_and_never_longer_than_its_limit(text, limit):
    safe = safe_text(text, limit=limit)
    safe.encode()
    assert "\0" not in safe
    assert len(safe) <= limit
