"""Params in and out through marshmallow, or as plain JSON where a job has no schema; its errors become ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from marshmallow import Schema, ValidationError, fields

from bridge.encoding import MAX_BYTES, check_plain
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
    if hidden := sorted(found.load_only):
        raise InvalidJob(
            f"Job {job!r}: field {hidden[0]!r} of its schema is load_only, so submit could never write it. "
            "Remove load_only."
        )
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


def _dump(schema: Schema, params: object) -> str:
    if isinstance(params, Mapping):
        _refuse_unknown(schema, params, "")
    try:
        raw = schema.dump(params)
    except Exception as error:  # marshmallow lets a field's own exception through
        where = _culprit(schema, params)
        raise InvalidParams(f"{where}: cannot be written as JSON ({type(error).__name__}: {error})") from None
    try:
        check_plain(raw)
    except EncodingError as error:
        raise InvalidParams(str(error)) from None
    text = _bounded(raw)
    _load(schema, _decode(text))  # what is written now must be what a worker can read later
    return text


def _bounded(raw: object) -> str:
    text = json.dumps(raw, allow_nan=False, ensure_ascii=False)
    if len(text.encode()) > MAX_BYTES:
        raise InvalidParams(
            f"params are larger than {MAX_BYTES // 1024 // 1024} MiB as JSON: store the data elsewhere "
            "and submit where it lies"
        )
    return text


def _refuse_unknown(schema: Schema, params: Mapping[Any, Any], prefix: str) -> None:
    """marshmallow's dump drops what it does not know, silently; a submit must not."""
    known = {(each.attribute or name): each for name, each in schema.fields.items()}
    for key, value in params.items():
        if key not in known:
            raise InvalidParams(
                f"{prefix}{key}: no such field in {type(schema).__name__}, which has: {', '.join(sorted(known))}"
            )
        for inner, item, path in _nested(known[key], value, f"{prefix}{key}"):
            _refuse_unknown(inner, item, f"{path}.")
        naive = isinstance(known[key], fields.DateTime) and not isinstance(known[key], fields.NaiveDateTime)
        if naive and getattr(value, "utcoffset", lambda: 0)() is None:
            raise InvalidParams(
                f"{prefix}{key}: a datetime without zone means another instant on every machine: "
                "give it tzinfo, or use fields.NaiveDateTime"
            )


def _nested(each: fields.Field[Any], value: object, path: str) -> Iterator[tuple[Schema, Mapping[Any, Any], str]]:
    match each, value:
        case fields.Nested(), Mapping():
            yield each.schema, value, path
        case fields.Nested(many=True), list() | tuple():
            for index, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield each.schema, item, f"{path}[{index}]"
        case fields.List(), list() | tuple():
            for index, item in enumerate(value):
                yield from _nested(each.inner, item, f"{path}[{index}]")
        case fields.Dict(), Mapping() if each.value_field is not None:
            for key, item in value.items():
                yield from _nested(each.value_field, item, f"{path}.{key}")


def _culprit(schema: Schema, params: object) -> str:
    for name, each in schema.fields.items():
        try:
            each.serialize(each.attribute or name, params, accessor=schema.get_attribute)
        except Exception:
            return name
    return "params"


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
