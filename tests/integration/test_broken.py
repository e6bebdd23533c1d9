"""Tests of the tests: without a guard, the test that is named here fails, and so does nothing else's setup."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.broken import VARIANTS
from tests.support import ROOT

LEDGER, MACHINE = "integration/test_ledger.py", "property/test_ledger_machine.py"
CAUGHT_BY = {
    "no-fence": (f"{LEDGER}::test_every_status_and_writer[complete-wrong-run]", MACHINE),
    "ticket-not-later": (
        f"{LEDGER}::test_a_row_that_becomes_claimable_again_has_a_later_ticket[1 hour-retry]",
        MACHINE,
    ),
    "ticket-not-compared": ("integration/test_reference.py::test_r10_claim_requires_the_current_scheduled_at", MACHINE),
    "claim-not-idempotent": ("integration/test_doubt.py::test_a_claim_in_doubt_is_not_skipped",),
    "retry-counted-twice": ("integration/test_doubt.py::test_an_outcome_in_doubt_is_not_repeated[retry]",),
    "finish-leaves-the-connection-open": (
        "integration/test_finish.py::test_a_lost_run_leaves_no_effect_behind[plain-swallows-cancelled]",
        "integration/test_finish.py::test_a_lost_run_leaves_no_effect_behind[in a savepoint-swallows-cancelled]",
    ),
}


def run(variant: str, tests: Iterable[str]) -> set[str]:
    """Run tests on a variant; says which failed, and fails if one could not be run."""
    names = [f"tests/{each}" for each in tests]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV"))}
    environment |= {"BRIDGE_TEST_BROKEN": variant, "BRIDGE_TEST_EXAMPLES": "100"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.broken", "-p", "no:cacheprovider", "-rfE", *names]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert ended.returncode in (0, 1), ended.stdout[-3000:] + ended.stderr[-3000:]
    lines = ended.stdout.splitlines()
    assert not [line for line in lines if line.startswith("ERROR ")], ended.stdout[-3000:]
    return {name for name in names if any(line.startswith(f"FAILED {name}") for line in lines)}


def test_every_variant_has_a_test_that_catches_it() -> None:
    assert CAUGHT_BY.keys() == VARIANTS.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broken_variant_is_caught(variant: str) -> None:
    assert run(variant, CAUGHT_BY[variant]) == {f"tests/{each}" for each in CAUGHT_BY[variant]}


def test_what_is_not_broken_passes_them_all() -> None:
    assert run("", sorted({each for tests in CAUGHT_BY.values() for each in tests})) == set()
