from __future__ import annotations

import copy
import inspect
import pickle
from datetime import timedelta

import pytest

from bridge import errors
from bridge.errors import BridgeError, Interrupted, InvalidParams, PublishError, Retry


@pytest.mark.parametrize(
    ("given", "delay"),
    [(None, None), (0, timedelta(0)), (1500, timedelta(seconds=1.5)), (timedelta(days=3660), timedelta(days=3660))],
)
def test_the_delay_of_a_retry_is_milliseconds_or_a_timedelta(given, delay):
    assert Retry("busy", delay=given).delay == delay


BAD_DELAYS = [-1, 10**400, timedelta(microseconds=-1), timedelta(days=3661), True, 1.5, "5", float("nan")]


@pytest.mark.parametrize("delay", BAD_DELAYS, ids=[str(each)[:12] for each in BAD_DELAYS])
def test_a_bad_delay_is_refused_by_name(delay):
    with pytest.raises(ValueError, match=r"^Retry\(delay=…\) "):
        Retry("busy", delay=delay)


@pytest.mark.parametrize("strategy", ["", "NOOP", "linear", None])
def test_an_unknown_strategy_is_refused(strategy):
    with pytest.raises(ValueError, match="is 'backoff' or 'noop', not "):
        Retry("busy", strategy=strategy)


def test_a_retry_needs_no_words():
    error = Retry()
    assert (error.hint, error.delay, error.strategy, str(error)) == ("", None, "backoff", "")


def through_pickle(error):
    return pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own bytes


RAISED = [
    Retry(),
    Retry("busy"),
    Retry("busy", delay=5000, strategy="noop"),
    Interrupted("job 1 is no longer held"),
    InvalidParams("a: bad", fields="a"),
    PublishError("no", refused=True),
]


@pytest.mark.parametrize("error", RAISED, ids=repr)
@pytest.mark.parametrize("travel", [through_pickle, copy.copy], ids=["pickle", "copy"])
def test_an_exception_survives_the_way_to_another_process(error, travel):
    back = travel(error)
    assert type(back) is type(error)
    assert (back.args, vars(back)) == (error.args, vars(error))


OURS = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, Exception)]


@pytest.mark.parametrize("error", OURS, ids=lambda each: each.__name__)
def test_an_exception_is_one_of_ours_or_a_handlers(error):
    assert issubclass(error, BridgeError) != (error in (Retry, Interrupted))
    assert error.__doc__
    assert error.__name__ in errors.__doc__


def test_params_are_named_by_their_message_if_nothing_else_names_them():
    assert InvalidParams("a: bad").fields == "a: bad"
