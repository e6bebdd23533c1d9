from __future__ import annotations

import time
from dataclasses import fields
from datetime import UTC, datetime, timedelta, timezone
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.records import Context, Progress, Ticket, check_progress, new_id

ID = "0199b1a7-0000-7000-8000-000000000001"
AT = "2026-11-30T12:00:00.000001+00:00"

NO_TICKETS = {
    "nothing": None,
    "a mapping": {"id": ID, "scheduled_at": AT},
    "none": [],
    "one": [ID],
    "three": [ID, AT, 1],
    "swapped": [AT, ID],
    "bytes": [ID.encode(), AT.encode()],
    "id is null": [None, AT],
    "id is no uuid": ["42", AT],
    "id in braces": ["{" + ID + "}", AT],
    "id as urn": ["urn:uuid:" + ID, AT],
    "id without dashes": [ID.replace("-", ""), AT],
    "id with foreign digits": [ID.replace("1", "\u0661"), AT],
    "id is huge": ["0" * 1_000_000, AT],
    "instant is numeric text": [ID, "1764504000"],
    "instant without zone": [ID, "2026-11-30T12:00:00"],
    "no such day": [ID, "2026-02-30T12:00:00+00:00"],
    "instant with junk": [ID, AT + " "],
    "instant with nul": [ID, AT + "\0"],
    "infinity": [ID, "infinity"],
    "more digits than are stored": [ID, "2026-11-30T12:00:00.0000011+00:00"],
}


@pytest.mark.parametrize("args", NO_TICKETS.values(), ids=NO_TICKETS.keys())
def test_what_is_no_ticket_is_refused(args):
    with pytest.raises(ValueError, match=r"^(the arguments|id|scheduled_at) .{,80}$"):
        Ticket.parse(args)


ZONES = st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)))


@given(st.uuids(), st.datetimes(timezones=ZONES | st.just(UTC)))
def test_a_ticket_survives_its_message_in_full_precision(job_id, at):
    ticket = Ticket(job_id, at)
    back = Ticket.parse(list(ticket.args))
    assert back == ticket
    assert back.args == ticket.args


@pytest.mark.parametrize("args", [[ID, AT], (ID.upper(), "2026-11-30T12:00:00.000001Z")])
def test_a_ticket_is_read_as_other_languages_write_it(args):
    assert Ticket.parse(args) == Ticket(UUID(ID), datetime(2026, 11, 30, 12, 0, 0, 1, tzinfo=UTC))


def test_ids_are_of_version_7_and_unique():
    ids = [new_id() for _ in range(10_000)]
    assert {(each.version, each.variant) for each in ids} == {(7, RFC_4122)}
    assert len(set(ids)) == len(ids)


def test_ids_are_ordered_by_the_millisecond_they_were_made_in():
    ids = []
    for _ in range(5):
        ids.append(new_id())
        began = time.time_ns() // 1_000_000
        while time.time_ns() // 1_000_000 <= began:
            pass
    assert ids == sorted(ids)
    assert abs((ids[-1].int >> 80) - time.time() * 1000) < 10_000


REPORTS = [
    ({"current": 0}, Progress(0)),
    ({"current": 1, "total": 1}, Progress(1, 1)),
    ({"current": 0.5, "total": 2, "stage": "ä" * 250}, Progress(0.5, 2, "ä" * 250)),
    ({"current": 1, "total": None, "stage": None}, Progress(1)),
]


@pytest.mark.parametrize(("report", "expected"), REPORTS)
def test_a_progress_report_is_taken_with_the_keys_that_were_given(report, expected):
    assert check_progress(report) == expected
    assert expected.payload == {key: value for key, value in report.items() if value is not None}


NO_REPORTS = {
    "number": (50, "mapping"),
    "pairs": ([("current", 1)], "mapping"),
    "empty": ({}, "current"),
    "no current": ({"total": 1}, "current"),
    "negative": ({"current": -1}, "current"),
    "bool": ({"current": True}, "current"),
    "text": ({"current": "1"}, "current"),
    "nan": ({"current": float("nan")}, "current"),
    "infinite": ({"current": float("inf")}, "current"),
    "huge": ({"current": 10**400}, "current"),
    "no total": ({"current": 0, "total": 0}, "total"),
    "total below current": ({"current": 2, "total": 1}, "total"),
    "long stage": ({"current": 1, "stage": "x" * 251}, "stage"),
    "stage is no text": ({"current": 1, "stage": 1}, "stage"),
    "stage with surrogate": ({"current": 1, "stage": "\ud800"}, "stage"),
    "other key": ({"current": 1, "note": "x"}, "no key 'note'"),
    "key is no text": ({"current": 1, 7: 1}, "no key '7'"),
}


@pytest.mark.parametrize(("report", "message"), NO_REPORTS.values(), ids=NO_REPORTS.keys())
def test_a_malformed_progress_report_is_refused(report, message):
    with pytest.raises(ValueError, match=message):
        check_progress(report)


def test_a_context_has_exactly_five_fields():
    assert [each.name for each in fields(Context)] == ["id", "name", "label", "resource_id", "profile_id"]


@pytest.mark.parametrize(("label", "seen"), [("", None), ("night", "night")])
def test_a_context_shows_its_row_and_no_label_as_none(label, seen, make_job):
    job = make_job(label=label, profile_id=UUID(int=1), resource_id=UUID(int=2))
    assert job.context == Context(job.id, "shop.pay", seen, UUID(int=2), UUID(int=1))


@pytest.mark.parametrize(("retry_num", "budget"), [(0, True), (2, True), (3, False), (4, False)])
def test_the_budget_is_the_retries_left(retry_num, budget, make_job):
    assert make_job(max_retries=3, retry_num=retry_num).has_budget is budget
