from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import bridge
from bridge.lifecycle import ACTIVE, MOVES, EventKind, Status
from bridge.sql import statement

PACKAGE = Path(bridge.__file__).parent
FILES = {each.stem: each.read_text() for each in sorted((PACKAGE / "sql").glob("*.sql"))}
STATEMENTS = {name: text for name, text in FILES.items() if name != "columns"}
MIGRATIONS = next(folder for folder in (PACKAGE / "migrations", PACKAGE.parent / "migrations") if folder.is_dir())
TABLES = "".join(each.read_text() for each in sorted((MIGRATIONS / "versions").glob("*.sql")))
RUNNERS = {"statement": 0, "_one_job": 1, "_count": 1}  # function → which argument names the file

every_file = pytest.mark.parametrize("name", FILES)
every_statement = pytest.mark.parametrize("name", STATEMENTS)


def bare(text):
    """The statement without comments and text literals."""
    return re.sub(r"--[^\n]*|'[^']*'", " ", text)


def used_by(module):
    tree = ast.parse((PACKAGE / module).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    named = [node.args[RUNNERS[node.func.id]] for node in calls if node.func.id in RUNNERS]
    return {each.value for each in named if isinstance(each, ast.Constant)}


def literals(text, column):
    """The text literals that a column is compared with or set to."""
    found = re.findall(rf"{column}'?\s*(?:=|<>|!=|(?:NOT )?IN)\s*(\([^)]*\)|'[^']*')", text)
    return re.findall(r"'([^']*)'", " ".join(found))


@every_file
def test_the_first_line_says_what_the_statement_is_for(name):
    assert re.fullmatch(rf"-- {name}: \S.{{10,}}", FILES[name].splitlines()[0])


@every_statement
def test_a_file_holds_exactly_one_statement(name):
    text = bare(statement(name)).strip().removesuffix(";")
    assert ";" not in text
    assert re.match(r"SELECT|WITH|INSERT|UPDATE|DELETE", text)


def test_the_ledger_runs_every_statement_and_only_those():
    assert used_by("ledger.py") | used_by("migrating.py") == set(STATEMENTS)


@every_file
def test_nothing_is_interpolated_but_the_columns(name):
    text = re.sub(r"--[^\n]*", "", FILES[name])
    assert not re.search(r"[{}$%]|\|\||\bformat\b", re.sub(r"%\(\w+\)s", "", bare(text)), re.IGNORECASE)
    assert set(re.findall(r"/\*.*?\*/", text)) <= {"/*job*/"}
    assert "%" not in "".join(re.findall(r"'[^']*'", text))


@every_file
def test_every_parameter_has_a_cast(name):
    assert re.findall(r"%\(\w+\)s(?!::[a-z])", FILES[name]) == []


@every_file
def test_every_status_that_is_spelled_out_is_one(name):
    assert set(literals(FILES[name], "status")) | set(literals(FILES[name], "outcome")) <= set(Status)
    assert set(literals(FILES[name], "kind")) <= set(EventKind)


@every_statement
def test_a_status_is_set_from_the_table_of_moves_only(name):
    sets = re.findall(r"\bSET\s+status\s*=\s*(\S+?),?\s", FILES[name])
    assert set(sets) <= {"%(target)s::text"}
    assert bool(sets) == ("status = ANY(%(sources)s::text[])" in FILES[name])


def test_the_polling_reads_look_where_dispatch_and_reschedule_start():
    assert set(literals(FILES["backlog"], "status")) == set(MOVES["dispatch"].sources)
    assert set(literals(FILES["dispatch"], "status")) == {*MOVES["dispatch"].sources, MOVES["dispatch"].target}
    for name in ("unclaimed", "newest", "handed_over", "hold"):
        assert tuple(literals(FILES[name], "status")) == MOVES["reschedule"].sources
    assert tuple(literals(FILES["orphans"], "status")) == MOVES["abort"].sources


def test_the_tables_take_the_statuses_and_events_of_the_lifecycle():
    assert literals(TABLES.split("CONSTRAINT job_status_check")[1].split("CONSTRAINT")[0], "status") == list(Status)
    assert literals(TABLES.split("CONSTRAINT job_event_kind_check")[1].split("CONSTRAINT")[0], "kind") == list(
        EventKind
    )
    assert set(re.findall(r"WHEN '(\w+)'", TABLES)) == set(EventKind)


@pytest.mark.parametrize(
    ("index", "statuses"),
    [
        ("job_due", set(MOVES["dispatch"].sources)),
        ("job_handed_over", {Status.SCHEDULED}),
        ("job_running", {Status.RUNNING}),
        ("job_late", set(MOVES["cancel"].sources)),
        ("job_unique_key", set(ACTIVE)),
    ],
)
def test_a_partial_index_covers_the_statuses_it_is_for(index, statuses):
    definition = re.search(rf"INDEX {index} ON job [^;]*;", TABLES)[0]
    assert set(literals(definition, "status")) == statuses


def test_the_columns_are_those_of_a_job():
    named = re.sub(r"\w+::text AS (\w+)", r"\1", FILES["columns"].split("\n", 1)[1])
    fields = list(bridge.Job.__dataclass_fields__)
    assert [each.strip() for each in named.split(",")] == fields
    table = TABLES.split("CREATE TABLE job (")[1].split("CONSTRAINT")[0]
    assert re.findall(r"^    (\w+) ", table, re.M) == [each.removesuffix("_text") for each in fields]
