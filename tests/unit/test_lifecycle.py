from __future__ import annotations

import pytest

import bridge
from bridge.lifecycle import ACTIVE, MOVES, PENDING, TERMINAL, EventKind, RetryReason, Status, user_status

# Written out by hand: the life of a job, one line a writer.
WRITERS = [
    ("dispatch", {"new", "retry"}, "scheduled", None),
    ("claim", {"new", "scheduled", "retry"}, "running", "start"),
    ("complete", {"running", "retry"}, "completed", "end"),
    ("fail", {"running", "retry"}, "failed", "end"),
    ("retry", {"running", "retry"}, "retry", "retry"),
    ("release", {"running"}, "retry", "retry"),
    ("cancel", {"new", "scheduled", "retry"}, "cancelled", "end"),
    ("abort", {"running"}, "aborted", "end"),
    ("reschedule", {"scheduled"}, "new", None),
    ("defer", {"new", "scheduled"}, "new", None),
]


@pytest.mark.parametrize(("writer", "sources", "target", "event"), WRITERS, ids=[row[0] for row in WRITERS])
def test_a_writer_moves_as_the_table_says(writer, sources, target, event):
    move = MOVES[writer]
    assert (set(move.sources), move.target, move.event) == (sources, target, event)
    assert len(move.sources) == len(sources)


def test_there_are_no_other_writers():
    assert set(MOVES) == {writer for writer, *_ in WRITERS}


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled", "aborted"])
def test_a_terminal_status_has_no_way_out(status):
    assert [writer for writer, move in MOVES.items() if status in move.sources] == []


def test_a_job_ends_exactly_where_its_end_is_logged():
    assert {move.target for move in MOVES.values() if move.event == "end"} == TERMINAL


def test_statuses_fall_into_pending_running_and_terminal():
    assert sorted(PENDING) == ["new", "retry", "scheduled"]
    assert sorted(ACTIVE - PENDING) == ["running"]
    assert sorted(TERMINAL) == ["aborted", "cancelled", "completed", "failed"]
    assert set(Status) == ACTIVE | TERMINAL


def test_events_and_reasons_are_the_words_of_the_history():
    assert set(EventKind) == {"start", "progress", "retry", "end"}
    assert set(RetryReason) == {"backoff", "noop", "lost"}


USER = {
    "pending": ["new", "scheduled", "retry"],
    "running": ["running"],
    "completed": ["completed"],
    "failed": ["failed", "cancelled", "aborted"],
}


@pytest.mark.parametrize(("status", "seen"), [(each, seen) for seen, many in USER.items() for each in many])
def test_a_user_sees_four_statuses(status, seen, make_job):
    assert user_status(status) == seen
    assert bridge.user_status(status) == seen
    assert bridge.user_status(make_job(status=status)) == seen


@pytest.mark.parametrize("word", ["", "NEW", "done", None])
def test_what_is_no_status_is_refused(word):
    with pytest.raises(ValueError, match="is not a valid Status"):
        user_status(word)
