from __future__ import annotations

import enum
import json
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from uuid import UUID

import pytest
from marshmallow import EXCLUDE, INCLUDE, Schema, ValidationError, fields, post_load, validate, validates_schema

from bridge.encoding import MAX_BYTES
from bridge.errors import InvalidJob, InvalidParams
from bridge.schemas import codec

ID = UUID("0199b1a7-0000-7000-8000-000000000001")
AT = datetime(2026, 11, 30, 12, 0, 0, 1, tzinfo=timezone(timedelta(hours=2)))
NAIVE = datetime(2026, 1, 2, 3, 4, 5, 6)  # noqa: DTZ001 -- a time without zone is what it is for
SECRET = "4111-1111"


class Colour(enum.Enum):
    RED = "red"


class Address(Schema):
    zip = fields.Int(required=True)
    street = fields.Str()


class Tree(Schema):
    child = fields.Nested(lambda: Tree())


class Order:
    def __init__(self, number):
        self.number = number


class OrderSchema(Schema):
    number = fields.Int(required=True)

    @post_load
    def make(self, data, **_):
        return Order(**data)


def of(**declared):
    """A codec of a schema with these fields."""
    return codec(Schema.from_dict(declared), job="shop.pay")


def nested(levels, key="child"):
    value: dict[str, object] = {}
    for _ in range(levels):
        value = {key: value}
    return value


TYPED = {
    "uuid": (fields.UUID(), ID),
    "aware datetime": (fields.DateTime(), AT),
    "aware datetime field": (fields.AwareDateTime(), AT),
    "naive datetime field": (fields.NaiveDateTime(), NAIVE),
    "date": (fields.Date(), date(2026, 1, 2)),
    "timedelta": (fields.TimeDelta(), timedelta(seconds=3)),
    "decimal as text": (fields.Decimal(as_string=True), Decimal("9.90")),
    "decimal": (fields.Decimal(), Decimal("9.90")),
    "enum by name": (fields.Enum(Colour), Colour.RED),
    "enum by value": (fields.Enum(Colour, by_value=True), Colour.RED),
    "nested": (fields.Nested(Address), {"zip": 1, "street": "a"}),
    "many nested": (fields.Nested(Address, many=True), [{"zip": 1}, {"zip": 2}]),
    "list of nested": (fields.List(fields.Nested(Address)), [{"zip": 1}]),
    "tuple": (fields.Tuple((fields.Int(), fields.UUID())), (1, ID)),
    "int keys": (fields.Dict(keys=fields.Int(), values=fields.Str()), {1: "a"}),
    "null": (fields.Int(allow_none=True), None),
    "plain json": (fields.Raw(), {"a": [1, None]}),
}


@pytest.mark.parametrize(("field", "value"), TYPED.values(), ids=TYPED.keys())
def test_a_typed_value_comes_back_as_it_was(field, value):
    found = of(a=field)
    assert found.load(found.dump({"a": value})) == {"a": value}


def test_a_schema_may_be_an_instance_with_other_keys_in_json():
    found = codec(Schema.from_dict({"user_id": fields.UUID(data_key="userId")})(), job="shop.pay")
    assert json.loads(found.dump({"user_id": ID})) == {"userId": str(ID)}
    assert found.load(json.dumps({"userId": str(ID)})) == {"user_id": ID}


def test_an_object_of_post_load_is_what_the_handler_gets_and_may_be_submitted():
    found = codec(OrderSchema, job="shop.pay")
    assert found.load(found.dump(Order(7))).number == 7


@pytest.mark.parametrize("name", ["items", "values", "keys", "copy", "get"])
def test_a_field_named_like_a_method_of_dict_may_be_left_out(name):
    found = of(**{name: fields.Str(load_default="none")})
    assert found.load(found.dump({})) == {name: "none"}


def test_a_mutable_load_default_is_not_shared_between_two_loads():
    found = of(tags=fields.List(fields.Str(), load_default=[]))
    found.load("{}")["tags"].append("mine")
    assert found.load("{}") == {"tags": []}


# field a, what is submitted, what the message says
REFUSED = {
    "unknown key": (fields.Int(), {"a": 1, "b": 2}, "^b: no such field in .*which has: a"),
    "unknown nested key": (fields.Nested(Address), {"a": {"zip": 1, "town": 2}}, r"^a\.town: no such field in Address"),
    "unknown key in many": (fields.Nested(Address, many=True), {"a": [{"zip": 1}, {"b": 1}]}, r"^a\[1\]\.b: no such"),
    "unknown key in a list": (fields.List(fields.Nested(Address)), {"a": [{"b": 1}]}, r"^a\[0\]\.b: no such field"),
    "unknown key in a dict": (fields.Dict(values=fields.Nested(Address)), {"a": {"x": {"b": 1}}}, r"^a\.x\.b: no such"),
    "missing": (fields.Int(required=True), {}, "^a: Missing data"),
    "null": (fields.Int(), {"a": None}, "^a: .*null"),
    "invalid": (fields.Int(validate=validate.Range(min=3)), {"a": 2}, "^a: Must be greater"),
    "text for a datetime": (fields.DateTime(), {"a": "2026-01-02"}, "^a: its value cannot be written by a"),
    "text for a number": (fields.Int(), {"a": "many"}, "^a: its value cannot be written by a"),
    "dump_only": (fields.Int(dump_only=True), {"a": 2}, "^a: Unknown field"),
    "naive datetime": (fields.DateTime(), {"a": NAIVE}, "^a: a datetime without zone"),
    "naive in a list": (fields.List(fields.DateTime()), {"a": [NAIVE]}, "^a.*: a datetime without zone"),
    "naive in an object": (fields.DateTime(), SimpleNamespace(a=NAIVE), "^a: a datetime without zone"),
    "nan": (fields.Float(allow_nan=True), {"a": float("nan")}, r"a\b.* NaN"),
    "nul": (fields.Str(), {"a": "x\0"}, r"a holds a NUL"),
    "surrogate": (fields.Str(), {"a": "\ud800"}, r"a holds a lone surrogate"),
    "huge int": (fields.Int(), {"a": 2**63}, r"a holds an integer beyond 64 bits"),
    "set in plain json": (fields.Raw(), {"a": {1}}, r"a is a set"),
    "deep plain json": (fields.Raw(), {"a": nested(5000)}, "nested deeper"),
    "more than 4 MiB": (fields.Str(), {"a": "ä" * (MAX_BYTES // 2)}, "larger than 4 MiB .*store the data elsewhere"),
    "a list": (fields.Int(), [1, 2], "params"),
    "a text": (fields.Int(), "a", "params"),
    "a number": (fields.Int(), 5, "params"),
    "a list for a nested": (fields.Nested(Address(partial=True)), {"a": [1]}, "^a"),
}


@pytest.mark.parametrize(("field", "params", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_params_are_refused_by_the_name_of_the_field(field, params, message):
    with pytest.raises(InvalidParams, match=message):
        of(a=field).dump(params)


@pytest.mark.parametrize("levels", [101, 5000], ids=["deep", "too deep for python"])
def test_a_schema_of_itself_that_is_too_deep_is_refused(levels):
    with pytest.raises(InvalidParams, match="deeper"):
        codec(Tree, job="shop.pay").dump(nested(levels))


@pytest.mark.parametrize("unknown", [EXCLUDE, INCLUDE])
def test_unknown_keys_are_refused_at_submit_whatever_a_worker_takes(unknown):
    found = codec(Schema.from_dict({"a": fields.Int()})(unknown=unknown), job="shop.pay")
    with pytest.raises(InvalidParams, match="b: no such field"):
        found.dump({"a": 1, "b": 2})
    assert found.load('{"a": 1, "b": 2}')["a"] == 1


def explode(error):
    def validator(value):
        raise error

    return validator


# field a, JSON in the row, the fields that the hint names
HINTS = {
    "invalid": (fields.Int(), f'{{"a": "{SECRET}"}}', "a"),
    "echoed by the user's message": (
        fields.Str(validate=validate.OneOf(["x"], error="{input}")),
        f'{{"a": "{SECRET}"}}',
        "a",
    ),
    "nested": (fields.Nested(Address), f'{{"a": {{"zip": "{SECRET}", "street": 1}}}}', "a.street, a.zip"),
    "missing": (fields.Int(required=True), "{}", "a"),
    "unknown": (fields.Int(), f'{{"b": "{SECRET}"}}', "b"),
    "no object": (fields.Int(), f'["{SECRET}"]', "params"),
    "a validator that raises": (
        fields.Str(validate=explode(TypeError(SECRET))),
        '{"a": "x"}',
        "the schema raised TypeError",
    ),
    "a failing validation": (fields.Str(validate=explode(ValidationError([SECRET]))), '{"a": "x"}', "a"),
    "no json": (fields.Int(), f'{{"a": {SECRET}', "params cannot be decoded"),
    "endless json": (fields.Raw(), '{"a": ' + "[" * 100_000, "params cannot be decoded"),
}


@pytest.mark.parametrize(("field", "text", "named"), HINTS.values(), ids=HINTS.keys())
def test_the_hint_names_the_fields_and_never_the_values(field, text, named):
    with pytest.raises(InvalidParams) as caught:
        of(a=field).load(text)
    assert ", ".join(sorted(caught.value.fields.split(", "))) == named


@pytest.mark.parametrize("value", [SECRET, [SECRET]], ids=["text", "list"])
def test_the_hint_of_a_refused_submit_never_holds_the_value(value):
    with pytest.raises(InvalidParams) as caught:
        of(a=fields.Int()).dump({"a": value})
    assert SECRET not in caught.value.fields


def test_a_rule_over_the_whole_is_named_params():
    class Range(Schema):
        low, high = fields.Int(), fields.Int()

        @validates_schema
        def in_order(self, data, **_):
            if data["low"] > data["high"]:
                raise ValidationError("low is above high")

    with pytest.raises(InvalidParams, match="params: low is above high") as caught:
        codec(Range, job="shop.pay").dump({"low": 2, "high": 1})
    assert caught.value.fields == "params"


SCHEMAS = {
    "load_only": Schema.from_dict({"a": fields.Int(load_only=True)}),
    "load_only of Meta": type("Secret", (Schema,), {"a": fields.Int(), "Meta": type("Meta", (), {"load_only": ["a"]})}),
    "nested load_only": Schema.from_dict({"n": fields.Nested(Schema.from_dict({"a": fields.Int(load_only=True)}))}),
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_a_load_only_field_is_refused_because_submit_could_never_write_it(schema):
    with pytest.raises(InvalidJob, match="load_only"):
        codec(schema, job="shop.pay").dump({"n": {"a": 1}} if "n" in schema().fields else {"a": 1})


@pytest.mark.parametrize(
    "schema", [dict, 1, fields.Int(), Address(many=True), [Address]], ids=lambda each: str(each)[:9]
)
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(InvalidJob, match=r"Job 'shop\.pay': schema takes a marshmallow Schema"):
        codec(schema, job="shop.pay")


PLAIN = {
    "a list": ([1], "^params is a list: a job without a schema takes a JSON object"),
    "nothing": (None, "^params is a NoneType"),
    "uuid": ({"a": [ID]}, r"params\.a\[0\] is a UUID.*give the job a schema"),
    "int key": ({"a": {1: 2}}, r"params\.a has the key 1"),
    "huge int": ({"a": -(2**64)}, r"params\.a holds an integer"),
    "more than 4 MiB": ({"a": "x" * MAX_BYTES}, "larger than 4 MiB"),
}


@pytest.mark.parametrize(("params", "message"), PLAIN.values(), ids=PLAIN.keys())
def test_without_a_schema_only_plain_json_passes(params, message):
    with pytest.raises(InvalidParams, match=message):
        codec(None, job="shop.pay").dump(params)


def test_without_a_schema_the_object_passes_as_it_is():
    params = {"a": [1, 0.5, None, True, {"ä": "\U0001f600"}]}
    found = codec(None, job="shop.pay")
    assert found.load(found.dump(params)) == params
