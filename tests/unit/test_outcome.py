from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.encoding import MAX_TEXT
from bridge.errors import Interrupted, InvalidParams, Retry, UnknownJob
from bridge.outcome import (
    Abort,
    Again,
    Complete,
    Fail,
    TimeLimit,
    delay,
    judge_error,
    judge_lost,
    judge_orphan,
    judge_return,
    report,
)
from bridge.records import Completion, ErrorReport

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)
ID, OTHER = UUID(int=1), UUID(int=2)
FAILED = "failed"


class Busy(Retry):
    """A user's own Retry that forgets the constructor of its base."""

    def __init__(self, host):
        self.host = host


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


# what is raised, retry_num of 3, retry_on_error → "failed", or (delay in seconds, reason)
RAISED = {
    "Retry": (Retry("busy"), 0, True, (1, "backoff")),
    "Retry again": (Retry("busy"), 2, True, (4, "backoff")),
    "Retry with milliseconds": (Retry("busy", delay=5000), 0, True, (5, "backoff")),
    "Retry with a timedelta, again": (Retry(delay=timedelta(seconds=5)), 1, True, (10, "backoff")),
    "Retry of a task that does not retry errors": (Retry("busy"), 0, False, (1, "backoff")),
    "Retry without budget": (Retry("busy"), 3, True, FAILED),
    "Retry beyond the cap": (Retry(delay=2 * HOUR), 2, True, (7200, "backoff")),
    "Retry up to the cap": (Retry(delay=HOUR * 0.75), 1, True, (3600, "backoff")),
    "subclass of Retry": (Busy("h"), 0, True, (1, "backoff")),
    "noop": (Retry(delay=5000, strategy="noop"), 0, True, (5, "noop")),
    "noop after two retries": (Retry(strategy="noop"), 2, True, (2, "noop")),
    "noop without budget": (Retry(strategy="noop"), 3, True, FAILED),
    "exception": (ValueError("x"), 0, True, (1, "backoff")),
    "exception without budget": (ValueError("x"), 3, True, FAILED),
    "exception, not to be retried": (ValueError("x"), 0, False, FAILED),
    "time limit": (TimeLimit("soft"), 0, True, (1, "backoff")),
}


@pytest.mark.parametrize(("error", "retry_num", "retries", "expected"), RAISED.values(), ids=RAISED.keys())
def test_a_handler_that_raised_is_judged(error, retry_num, retries, expected, make_job, make_definition):
    job = make_job(max_retries=3, retry_num=retry_num)
    outcome = judge_error(job, make_definition(retry_on_error=retries), error, longest=HOUR)
    if expected == FAILED:
        assert outcome == Fail(report(error))
    else:
        assert outcome == Again(timedelta(seconds=expected[0]), report(error), expected[1])


@pytest.mark.parametrize("retry_num", [0, 3])
def test_an_interrupted_handler_writes_nothing(retry_num, make_job, make_definition):
    job = make_job(retry_num=retry_num)
    assert judge_error(job, make_definition(), Interrupted(), longest=HOUR) is None


REPORTS = {
    "retry": (Retry("busy"), "retry", "failed", "retry", "busy"),
    "ordinary": (ZeroDivisionError("by 0"), "internal", "failed", "ZeroDivisionError", "by 0"),
    "without message": (KeyError(), "internal", "failed", "KeyError", "KeyError"),
    "failing str": (Mute(), "internal", "failed", "Mute", "<Mute whose str() failed>"),
    "nul and surrogate": (ValueError("a\0\ud800"), "internal", "failed", "ValueError", "a\N{SYMBOL FOR NULL}?"),
    "time limit": (TimeLimit("soft, 5 s"), "internal", "timeout", "timeout", "soft, 5 s"),
    "silent TimeoutError": (TimeoutError(), "internal", "timeout", "timeout", "time limit exceeded"),
    "unknown job": (UnknownJob("shop.gone"), "not-found", "no-job-definition", "not-found", "shop.gone"),
    "bad params": (
        InvalidParams("to.zip: 4711", fields="to.zip"),
        *("assertion", "data-validation", "assertion", "to.zip"),
    ),
}


@pytest.mark.parametrize(("error", "type_", "code", "ex_type", "hint"), REPORTS.values(), ids=REPORTS.keys())
def test_an_error_is_reported(error, type_, code, ex_type, hint):
    said = report(error).json
    assert said == {"type": type_, "code": code, "hint": hint, "ex_type": ex_type}
    assert list(said) == ["type", "code", "hint", "ex_type"]


LOST = ErrorReport("internal", "worker-lost", "worker-lost", "signal 9")
ORPHAN = ErrorReport("internal", "orphan", "orphan", "job execution lease expired")


@pytest.mark.parametrize("retry_lost", [True, False, None])
@pytest.mark.parametrize("retry_num", [0, 3])
@pytest.mark.parametrize(
    ("judge", "error"),
    [(lambda job: judge_lost(job, "signal 9"), LOST), (judge_orphan, ORPHAN)],
    ids=["lost", "orphan"],
)
def test_a_lost_run_is_aborted_unless_it_may_run_again(judge, error, retry_num, retry_lost, make_job):
    outcome = judge(make_job(retry_lost=retry_lost, retry_num=retry_num))
    again = retry_lost and retry_num == 0
    assert outcome == (Again(timedelta(0), error, "lost") if again else Abort(error))


DELAYS = [(SECOND, 0, 1), (SECOND, 1, 1), (SECOND, 2, 2), (SECOND, 12, 2048), (SECOND, 13, 3600), (2 * HOUR, 0, 7200)]


@pytest.mark.parametrize(("base", "retry_num", "seconds"), [*DELAYS, (SECOND, 10**100, 3600), (0 * SECOND, 9, 0)])
def test_a_delay_doubles_up_to_the_cap(base, retry_num, seconds):
    assert delay(base, retry_num, longest=HOUR) == timedelta(seconds=seconds)


BASES = st.timedeltas(timedelta(0), timedelta(days=3660))


@given(BASES, st.integers(0, 10**30), st.timedeltas(timedelta(milliseconds=1), timedelta(days=3660)))
def test_a_delay_is_never_below_its_base_nor_above_the_cap_and_never_shrinks(base, retry_num, longest):
    found = delay(base, retry_num, longest=longest)
    assert base <= found <= max(base, longest)
    assert found <= delay(base, retry_num + 1, longest=longest)


# what the handler returned, the row's resource → result, resource
RETURNED = {
    "nothing": (None, None, None, None),
    "value": ([1, (2,)], None, "[1, [2]]", None),
    "mapping": ({"result": 1}, None, '{"result": 1}', None),
    "envelope": ({"result": [1], "resource_id": ID}, None, "[1]", ID),
    "envelope with text": ({"result": 0, "resource_id": str(ID)}, None, "0", ID),
    "envelope without result": ({"resource_id": ID}, None, None, ID),
    "envelope without resource": ({"result": 1, "resource_id": None}, ID, "1", None),
    "envelope with the row's own resource": ({"result": 1, "resource_id": ID}, ID, "1", ID),
    "completion": (Completion({"a": 1}, ID), None, '{"a": 1}', ID),
    "completion without resource": (Completion({"resource_id": 1}), None, '{"resource_id": 1}', None),
    "resource_id deeper": ({"a": {"resource_id": 1}}, None, '{"a": {"resource_id": 1}}', None),
}


@pytest.mark.parametrize(("value", "resource", "result", "found"), RETURNED.values(), ids=RETURNED.keys())
def test_what_a_handler_returns_is_split(value, resource, result, found, make_job):
    assert judge_return(make_job(resource_id=resource), value) == Complete(result, found)


BAD_ENVELOPES = {
    "no uuid": ({"resource_id": "42"}, None, "invalid-resource-id"),
    "a number": ({"result": 1, "resource_id": 42}, None, "invalid-resource-id"),
    "a second resource": ({"resource_id": OTHER}, ID, "resource-already-associated"),
    "a second resource, completion": (Completion(1, OTHER), ID, "resource-already-associated"),
}


@pytest.mark.parametrize(("value", "resource", "code"), BAD_ENVELOPES.values(), ids=BAD_ENVELOPES.keys())
def test_a_bad_envelope_fails_at_once_and_says_what_to_return(value, resource, code, make_job):
    outcome = judge_return(make_job(resource_id=resource), value)
    assert isinstance(outcome, Fail)
    assert (outcome.error.type, outcome.error.code, outcome.error.ex_type) == ("validation", code, "validation")
    assert "return" in outcome.error.hint


class Hostile(Mapping):
    """A lazy mapping whose source is gone: a bug of the user's, who sees a result of null and a log line."""

    def __getitem__(self, key):
        raise RuntimeError("gone")

    def __iter__(self):
        raise RuntimeError("gone")

    def __len__(self):
        raise RuntimeError("gone")


class Unbound:
    """Like the proxies of web frameworks outside of a request."""

    @property
    def __class__(self):
        raise RuntimeError("outside of a request")


CYCLE: list[object] = []
CYCLE.append(CYCLE)

LOST_RESULTS = {
    "nan": (float("nan"), "NaN"),
    "cycle": (CYCLE, "contains itself"),
    "in an envelope": ({"result": b"x", "resource_id": None}, "bytes"),
    "hostile mapping": (Hostile(), "RuntimeError"),
    "unbound proxy": (Unbound(), "RuntimeError"),
}


@pytest.mark.parametrize(("value", "reason"), LOST_RESULTS.values(), ids=LOST_RESULTS.keys())
def test_a_result_without_json_form_is_lost_and_the_job_completes(value, reason, make_job):
    outcome = judge_return(make_job(), value)
    assert isinstance(outcome, Complete)
    assert outcome.result is None
    assert reason in outcome.lost_result


def test_a_lost_result_keeps_its_resource(make_job):
    outcome = judge_return(make_job(), Completion(float("nan"), ID))
    assert (outcome.result, outcome.resource_id) == (None, ID)


CLASSES = [Exception, ValueError, KeyError, OSError, TimeoutError, SystemExit, Retry, Interrupted, UnknownJob, Mute]
TEXTS = st.text(st.characters(codec=None) | st.sampled_from("\0\ud800"), max_size=50)
MESSAGES = TEXTS | st.builds(lambda text: text * (10_000_000 // max(1, len(text))), st.just("x\0") | st.just("\ud800"))
ERRORS = st.builds(lambda kind, message: kind(message), st.sampled_from(CLASSES), MESSAGES | st.just(Mute()))


@given(ERRORS | st.builds(InvalidParams, TEXTS, fields=MESSAGES), st.integers(0, 5), st.booleans())
def test_any_exception_is_judged_and_its_report_is_storable(make_job, make_definition, error, retry_num, retries):
    outcome = judge_error(make_job(retry_num=retry_num), make_definition(retry_on_error=retries), error, longest=HOUR)
    if outcome is None:
        assert isinstance(error, Interrupted)
        return
    for text in outcome.error.json.values():
        text.encode()
        assert "\0" not in text
        assert len(text) <= MAX_TEXT


@given(MESSAGES)
def test_how_a_run_was_lost_is_storable(make_job, hint):
    text = judge_lost(make_job(), hint).error.hint
    text.encode()
    assert "\0" not in text
    assert len(text) <= MAX_TEXT
