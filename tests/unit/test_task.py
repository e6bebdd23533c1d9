from __future__ import annotations

import functools
import inspect
import types
from datetime import timedelta

import pytest
from celery.exceptions import Retry as CeleryRetry
from celery.exceptions import SoftTimeLimitExceeded
from marshmallow import Schema, fields

import bridge
from bridge.delivery import Skipped
from bridge.errors import InvalidJob
from bridge.lifecycle import Status
from bridge.outcome import TimeLimit
from bridge.records import ErrorReport
from bridge.runner import Verdict
from bridge.task import JobFailed, _answer

NAMES = ["", " ", "a b", "a\n", "a\0", "x" * 201, "\ud800", None, 7]


def pay(context, params):
    """Pays."""
    return context, params


@pytest.fixture
def app(make_app):
    return bridge.install(make_app())


@pytest.fixture
def adopt(app):
    """A task of the app with base=JobTask."""
    return lambda handler=pay, **options: app.task(
        base=bridge.JobTask, shared=False, **{"name": "shop.pay", **options}
    )(handler)


def nothing_was_built(record):
    return not record.installed and not bridge.celery._default


def test_the_decorated_object_called_is_the_plain_handler_without_an_app(record):
    handler = bridge.job("shop.pay")(pay)
    assert handler("context", params={"a": 1}) == ("context", {"a": 1})
    assert nothing_was_built(record)


LOOKS = {
    "isinstance": lambda handler: isinstance(handler, types.FunctionType),
    "repr": repr,
    "hash": hash,
    "bool": bool,
    "name": lambda handler: handler.__name__,
    "signature": inspect.signature,
    "iscoroutinefunction": inspect.iscoroutinefunction,
    "wraps": lambda handler: functools.wraps(handler)(lambda context, params: None),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_looking_at_the_decorated_object_builds_no_app(look, record):
    look(bridge.job("shop.pay")(pay))
    assert nothing_was_built(record)


@pytest.mark.parametrize("attribute", ["__name__", "__qualname__", "__module__", "__doc__"])
def test_the_decorated_object_is_described_as_its_handler(attribute, app):
    assert getattr(bridge.job("shop.pay")(pay), attribute) == getattr(pay, attribute)


def test_the_decorated_object_is_the_task_of_the_current_app(app):
    handler = bridge.job("shop.pay", time_limit=5)(pay)
    assert handler.definition is app.tasks["shop.pay"].definition
    assert app.tasks["shop.pay"].time_limit == 5


def test_an_adopted_task_called_is_the_plain_handler(adopt):
    assert adopt()("context", {"a": 1}) == ("context", {"a": 1})


SENDS = {
    "apply_async": lambda task: task.apply_async((None, {})),
    "delay": lambda task: task.delay(None, {}),
    "signature": lambda task: task.s(None, {}).apply_async(),
}


@pytest.mark.parametrize("send", SENDS.values(), ids=SENDS.keys())
def test_a_message_without_a_row_is_refused(send, adopt):
    with pytest.raises(InvalidJob, match=r"'shop\.pay' is a job: submit it with bridge\.submit\('shop\.pay', params\)"):
        send(adopt())


DEFAULTS = {"queue": "default", "priority": 100, "max_retries": 3, "retry_lost": False}
CHOSEN = {"queue": "slow", "priority": 7, "max_retries": 0, "retry_lost": True, "retry_on_error": False}


def seen(definition, keys):
    return {key: getattr(definition, key) for key in keys}


def test_a_job_retries_on_errors_by_default(app):
    definition = bridge.job("shop.pay")(pay).definition
    assert seen(definition, [*DEFAULTS, "retry_on_error"]) == {**DEFAULTS, "retry_on_error": True}
    assert definition.name == "shop.pay"


def test_an_adopted_task_does_not_retry_on_errors_by_default(adopt):
    definition = adopt().definition
    assert seen(definition, [*DEFAULTS, "retry_on_error"]) == {**DEFAULTS, "retry_on_error": False}


def test_a_job_is_defined_by_its_options(app, adopt):
    assert seen(bridge.job("shop.other", **CHOSEN)(pay).definition, CHOSEN) == CHOSEN
    names = {"queue": "job_queue", "priority": "job_priority"}
    assert seen(adopt(**{names.get(key, key): value for key, value in CHOSEN.items()}).definition, CHOSEN) == CHOSEN


def test_a_definition_decodes_by_the_schema_of_its_job(adopt):
    definition = adopt(schema=Schema.from_dict({"a": fields.Date()})).definition
    assert definition.dump(definition.load('{"a": "2026-01-02"}')) == '{"a": "2026-01-02"}'


@pytest.mark.parametrize("max_retries", [None, "3", 1.5])
def test_a_job_without_a_whole_number_of_retries_is_refused(max_retries, adopt):
    with pytest.raises(InvalidJob, match=r"'shop\.pay': max_retries is a whole number"):
        _ = adopt(max_retries=max_retries).definition


BAD_JOBS = {
    "max_retries": {"max_retries": None},
    "schema": {"schema": dict},
    "queue": {"queue": "two words"},
    "priority": {"priority": "high"},
}


@pytest.mark.parametrize("options", BAD_JOBS.values(), ids=BAD_JOBS.keys())
def test_a_bad_option_is_refused_where_it_is_written(options, record):
    with pytest.raises(InvalidJob, match=rf"shop\.pay.*{next(iter(options))}"):
        bridge.job("shop.pay", **options)(pay)


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_what_is_no_name_is_refused(name, record):
    with pytest.raises(InvalidJob, match="A job's name is 1 to 200 printable characters"):
        bridge.job(name)(pay)
    assert record.declared == {}


async def coroutine(context, params): ...


def generator(context, params):
    yield


@pytest.mark.parametrize(
    "handler", [None, "shop.pay", coroutine, generator], ids=["none", "text", "coroutine", "generator"]
)
def test_what_cannot_be_called_to_the_end_is_no_handler(handler, record):
    with pytest.raises(InvalidJob, match=r"shop\.pay"):
        bridge.job("shop.pay")(handler)


def test_celerys_time_limit_becomes_ours(adopt):
    def slow(context, params):
        raise SoftTimeLimitExceeded

    with pytest.raises(TimeLimit, match="soft time limit exceeded"):
        adopt(slow).definition.handler(None, {})


def test_celery_neither_acknowledges_early_nor_retries_nor_keeps_results(adopt):
    task = adopt()
    assert (task.acks_late, task.acks_on_failure_or_timeout, task.ignore_result) == (True, True, True)
    assert (task.reject_on_worker_lost, task.store_errors_even_if_ignored, task.track_started) == (False, False, False)


ERROR = ErrorReport("internal", "failed", "ValueError", "bad")
ANSWERS = {
    "retry": (Verdict(Status("retry"), True, ERROR, timedelta(seconds=4)), CeleryRetry, "bad"),
    "failed": (Verdict(Status("failed"), True, ERROR), JobFailed, "ValueError: bad"),
    "cancelled while it ran": (Verdict(Status("cancelled"), True), Skipped, "task-revoked"),
    "aborted while it ran": (Verdict(Status("aborted"), True, ERROR), Skipped, "task-revoked"),
    "running elsewhere": (Verdict(Status("running"), True), Skipped, None),
    "skipped, completed": (Verdict(Status("completed"), False), Skipped, "task-succeeded"),
    "skipped, failed": (Verdict(Status("failed"), False, ERROR), Skipped, "task-failed"),
    "skipped, cancelled": (Verdict(Status("cancelled"), False), Skipped, "task-revoked"),
    "skipped, to be retried": (Verdict(Status("retry"), False, ERROR), Skipped, None),
    "skipped, new": (Verdict(Status("new"), False), Skipped, None),
    "skipped, no row": (Verdict(None, False), Skipped, None),
}


@pytest.mark.parametrize(("verdict", "answer", "said"), ANSWERS.values(), ids=ANSWERS.keys())
def test_celery_is_told_what_the_row_says(verdict, answer, said):
    with pytest.raises(answer) as caught:
        _answer(verdict)
    assert (caught.value.event if answer is Skipped else str(caught.value)) == said


def test_celery_is_told_of_success_by_a_return():
    assert _answer(Verdict(Status("completed"), True)) is None


def wrong_arguments(params):
    """Takes one argument."""


BAD_HANDLERS = {
    "one argument": (wrong_arguments, {}, r"takes \(context, params\), not \(params\)"),
    "a lambda": (lambda context, params: None, {}, "a function with a name"),
    "a misspelled option": (pay, {"max_retry": 3}, r"'max_retry'; did you mean max_retries\?"),
}


@pytest.mark.parametrize(("handler", "options", "message"), BAD_HANDLERS.values(), ids=BAD_HANDLERS.keys())
def test_what_would_fail_at_the_first_run_is_refused_at_registration(handler, options, message):
    with pytest.raises(InvalidJob, match=message):
        bridge.job("shop.wrong", **options)(handler)
