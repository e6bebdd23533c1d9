"""Params in and out through marshmallow, or as plain JSON where a job has no schema; its errors become ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

from marshmallow import Schema, ValidationError, fields, missing

from bridge.encoding import MAX_BYTES, MAX_DEPTH, check_plain
from bridge.errors import EncodingError, InvalidJob, InvalidParams


@dataclass(frozen=True, slots=True)
class Codec:
    """How a job's params become JSON text, and the text what the handler gets; both raise InvalidParams."""

    load: Callable[[str], Any]
    dump: Callable[[Any], str]


def codec(schema: object, *, job: str) -> Codec:
    """The codec of a job's schema: a marshmallow Schema class or instance, or None for plain JSON.

    Raises:
        InvalidJob: it is neither, or the schema has fields that submit could never write.
    """
    if schema is None:
        return Codec(load=_decode, dump=_dump_plain)
    found = schema() if isinstance(schema, type) and issubclass(schema, Schema) else schema
    if not isinstance(found, Schema) or found.many:
        raise InvalidJob(
            f"Job {job!r}: schema takes a marshmallow Schema class or instance (not many=True), not {schema!r}"
        )
    if hidden := sorted(name for name, each in found.fields.items() if each.load_only):
        raise InvalidJob(
            f"Job {job!r}: field {hidden[0]!r} of its schema is load_only, so submit could never write it. "
            "Remove load_only."
        )
    for each in found.fields.values():
        if isinstance(each.load_default, list | dict | set):
            each.load_default = partial(deepcopy, each.load_default)
    return Codec(load=lambda text: _load(found, _decode(text)), dump=lambda params: _dump(found, params))


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParams(
            f"params cannot be decoded ({type(error).__name__})", fields="params cannot be decoded"
        ) from None


def _dump_plain(params: object) -> str:
    if not isinstance(params, dict):
        raise InvalidParams(f"params is a {type(params).__name__}: a job without a schema takes a JSON object (dict)")
    try:
        check_plain(params)
    except EncodingError as error:
        raise InvalidParams(str(error)) from None
    return _bounded(params)


def _load(schema: Schema, raw: object) -> Any:
    try:
        return schema.load(raw)  # type: ignore[arg-type]  # whatever JSON held; marshmallow refuses what is no object
    except ValidationError as error:
        messages = error.normalized_messages()  # type: ignore[no-untyped-call]  # marshmallow leaves it untyped
        raise InvalidParams(
            "; ".join(f"{path}: {text}" for path, text in _flat(messages)),
            fields=", ".join(dict.fromkeys(path for path, _ in _flat(messages))),
        ) from None
    except Exception as error:  # a validator or post_load of the user's own
        kind = type(error).__name__
        raise InvalidParams(f"the schema raised {kind}: {error}", fields=f"the schema raised {kind}") from error


class _Given(dict[Any, Any]):
    """Params as marshmallow's dump reads them: for an absent key it would look at dict's own methods."""

    def __missing__(self, key: object) -> Any:
        return missing


def _dump(schema: Schema, params: object) -> str:
    params = _checked(schema, params, "", 0)
    try:
        raw = schema.dump(params)
    except Exception as error:  # marshmallow lets a field's own exception through
        where, kind = _culprit(schema, params)
        raise InvalidParams(
            f"{where}: its value cannot be written by a {kind} field ({type(error).__name__})", fields=where
        ) from None
    try:
        check_plain(raw := _json(raw, 0))
    except EncodingError as error:
        raise InvalidParams(str(error)) from None
    text = _bounded(raw)
    _load(schema, _decode(text))  # what is written now must be what a worker can read later
    return text


def _json(value: Any, depth: int) -> Any:
    """What marshmallow's own fields leave in Python: Decimal, Tuple, and the keys of a Dict."""
    if depth > MAX_DEPTH:
        return value  # check_plain refuses it
    match value:
        case Decimal():
            return str(value)
        case dict():
            return {str(key) if type(key) is int else key: _json(item, depth + 1) for key, item in value.items()}
        case list() | tuple():
            return [_json(item, depth + 1) for item in value]
    return value


def _bounded(raw: object) -> str:
    text = json.dumps(raw, allow_nan=False, ensure_ascii=False)
    if len(text.encode()) > MAX_BYTES:
        raise InvalidParams(
            f"params are larger than {MAX_BYTES // 1024 // 1024} MiB as JSON: store the data elsewhere "
            "and submit where it lies"
        )
    return text


def _checked(schema: Schema, params: object, prefix: str, depth: int) -> object:
    """marshmallow's dump drops what it does not know, silently; a submit must not."""
    if depth > MAX_DEPTH:
        raise InvalidParams(f"params are nested deeper than {MAX_DEPTH} levels (or contain themselves)")
    known = {(each.attribute or name): each for name, each in schema.fields.items()}
    if isinstance(params, Mapping):
        for key in params:
            if key not in known:
                raise InvalidParams(
                    f"{prefix}{key}: no such field in {type(schema).__name__}, which has: {', '.join(sorted(known))}"
                )
        return _Given({key: _value(known[key], item, f"{prefix}{key}", depth) for key, item in params.items()})
    if params is None or isinstance(params, str | bytes | int | float | list | tuple | set | frozenset):
        raise InvalidParams(
            f"{prefix.rstrip('.') or 'params'}: a {type(params).__name__} has no fields: give a mapping, "
            f"or an object with the fields of {type(schema).__name__}"
        )
    if known and not any(hasattr(params, key) for key in known):
        raise InvalidParams(
            f"{prefix.rstrip('.') or 'params'}: a {type(params).__name__} has none of the fields of "
            f"{type(schema).__name__}: {', '.join(sorted(known))}"
        )
    for key, each in known.items():
        _value(each, getattr(params, key, None), f"{prefix}{key}", depth)
    return params


def _value(each: Any, value: object, path: str, depth: int) -> object:
    if each.load_only:
        raise InvalidParams(f"{path}: is load_only, so submit could never write it")
    match each, value:
        case _, None:
            return value
        case fields.Nested(many=True) | fields.List() | fields.Tuple(), _:
            return _items(each, value, path, depth)
        case fields.Nested(), _ if not isinstance(each, fields.Pluck):
            return _checked(each.schema, value, f"{path}.", depth + 1)
        case fields.Dict(), Mapping() if each.value_field is not None:
            return {key: _value(each.value_field, item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        case fields.DateTime(), _ if not isinstance(each, fields.NaiveDateTime):
            if getattr(value, "utcoffset", lambda: 0)() is None:
                raise InvalidParams(
                    f"{path}: a datetime without zone means another instant on every machine: "
                    "give it tzinfo, or use fields.NaiveDateTime"
                )
    return value


def _items(each: Any, value: object, path: str, depth: int) -> object:
    """The items of a list, each checked; what can be walked once only, or in no order, is no list."""
    if not isinstance(value, list | tuple):
        raise InvalidParams(f"{path}: give a list or a tuple, not a {type(value).__name__}")
    if isinstance(each, fields.Nested):
        return [_checked(each.schema, item, f"{path}[{index}].", depth + 1) for index, item in enumerate(value)]
    inner = each.tuple_fields if isinstance(each, fields.Tuple) else [each.inner] * len(value)
    if len(inner) != len(value):
        return value  # marshmallow says so
    return [
        _value(one, item, f"{path}[{index}]", depth + 1)
        for index, (one, item) in enumerate(zip(inner, value, strict=True))
    ]


def _culprit(schema: Schema, params: object) -> tuple[str, str]:
    """The field that fails to dump, and its kind."""
    for name, each in schema.fields.items():
        try:
            each.serialize(each.attribute or name, params, accessor=schema.get_attribute)
        except Exception:
            return name, type(each).__name__
    return "params", type(schema).__name__


def _flat(messages: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(messages, Mapping):
        for key, value in messages.items():
            name = "params" if key == "_schema" else str(key)
            yield from _flat(value, f"{path}.{name}" if path else name)
    elif isinstance(messages, list):
        for value in messages:
            yield from _flat(value, path)
    else:
        yield path, str(messages)
