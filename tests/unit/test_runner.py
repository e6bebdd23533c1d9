"""What a run decides; what it writes is tested where there is a database."""

from __future__ import annotations

from uuid import UUID

import pytest

from bridge.database import Database
from bridge.errors import InvalidParams, UnknownJob
from bridge.outcome import Again, Complete, Fail
from bridge.records import Run
from bridge.runner import Runner
from bridge.settings import Settings

RUN = Run(UUID(int=1), "worker@here")


@pytest.fixture
def execute(make_job, make_definition):
    def run(handler, *, dying=False, load=lambda text: {}):
        settings = Settings()
        runner = Runner(Database(settings.database), settings, lambda error: dying)
        return runner._execute(make_job(), RUN, make_definition(handler=handler, load=load))

    return run


def raising(error):
    def handler(context, params):
        raise error

    return handler


def test_a_handler_gets_its_context_and_its_decoded_params(execute, make_job):
    seen = []
    assert execute(lambda *args: seen.append(args), load=lambda text: {"typed": text}) == Complete(None)
    assert seen == [(make_job().context, {"typed": "{}"})]


def test_bad_params_fail_at_once_and_no_handler_runs(execute):
    outcome = execute(
        lambda *_: pytest.fail("it ran"), load=lambda text: raising(InvalidParams("a: 1", fields="a"))(0, 0)
    )
    assert isinstance(outcome, Fail)
    assert (outcome.error.code, outcome.error.hint) == ("data-validation", "a")


@pytest.mark.parametrize("error", [UnknownJob("shop.next"), InvalidParams("b: 1", fields="b")], ids=repr)
def test_a_refused_submit_inside_a_handler_is_an_ordinary_exception_of_the_job(error, execute):
    outcome = execute(raising(error))
    assert isinstance(outcome, Again)
    assert (outcome.error.type, outcome.error.ex_type) == ("internal", type(error).__name__)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), MemoryError()], ids=repr)
def test_what_would_end_a_process_is_an_exception_of_the_job(error, execute):
    assert isinstance(execute(raising(error)), Again)


def test_a_process_that_is_being_terminated_leaves_the_run_to_the_keeper(execute):
    with pytest.raises(SystemExit):
        execute(raising(SystemExit(1)), dying=True)
