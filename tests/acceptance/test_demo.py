"""`bridge demo`, as a stranger runs it: from another folder, with whatever settings the environment has."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import until

FOREIGN = {"BRIDGE_DATABASE_URL": "postgresql://nobody@192.0.2.1/theirs", "BRIDGE_TENANT": "theirs", "PGPORT": "1"}
STOPPED = "Stopped: the servers, the worker and their folder are gone.\n"


@dataclass
class Demo:
    """A demo that runs; whatever it starts inherits its mark."""

    popen: subprocess.Popen[str]
    mark: str
    invoices: Path
    folders: set[Path] = field(default_factory=set)

    def processes(self) -> set[int]:
        """The pids of all that it started, and its own: those with its mark, and those that work beside them.

        PostgreSQL writes its title over its environment, but works in the same folder.
        """
        marked = {pid for pid in pids() if self.mark in environment(pid)}
        self.folders |= {top(pid) for pid in marked if top(pid).name.startswith("bridge-")}
        return marked | {pid for pid in pids() if top(pid) in self.folders}

    def works(self) -> bool:
        """Has its worker run a job?"""
        assert self.popen.poll() is None, self.popen.communicate()
        return any(self.invoices.glob("*.html"))


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""


def top(pid: int) -> Path:
    """The folder below the temporary one that a process works in."""
    try:
        return Path("/", *Path(f"/proc/{pid}/cwd").readlink().parts[1:3])
    except OSError:
        return Path("/")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Demo]]:
    """Starts demos; what a failed test leaves of them is killed."""
    demos: list[Demo] = []

    def start(orders: int) -> Demo:
        mark, invoices = uuid.uuid4().hex, tmp_path / f"the invoices of {len(demos)}"
        popen = subprocess.Popen(
            [sys.executable, "-m", "bridge", "demo", "--orders", str(orders), "--keep", str(invoices)],
            env={**os.environ, **FOREIGN, "DEMO_TEST": mark},
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        demos.append(Demo(popen, mark, invoices))
        return demos[-1]

    yield start
    for demo in demos:
        demo.popen.terminate()
        demo.popen.communicate()
        for pid in demo.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_every_job_ends_as_it_should_and_the_invoices_stay(start: Callable[[int], Demo]) -> None:
    demo = start(20)
    said, trouble = demo.popen.communicate(timeout=90)
    assert (demo.popen.returncode, trouble) == (0, ""), said + trouble
    assert "2 are out of stock and rolled back" in said
    assert "amount: Must be greater than 0." in said
    lines = [line.split() for line in said.splitlines()]
    for row in (
        "shop.catalogue completed 1 0",
        "shop.charge completed 15 4",
        "shop.charge failed assertion 1 0",
        "shop.charge failed retry 1 3",
        "shop.gift_wrap failed not-found 1 0",
        "shop.invoice completed 18 0",
        "shop.remind cancelled 1 0",
        "shop.remind completed 3 0",
    ):
        assert row.split() in lines, said
    assert "FROM job_event" in said
    assert '{"reason": "backoff", "attempt": 3}' in said
    pages = {file.name for file in demo.invoices.iterdir()}
    assert pages == {f"invoice-{number}.html" for number in range(1001, 1021)} - {
        "invoice-1005.html",
        "invoice-1016.html",
    }
    assert "17.50 USD" in (demo.invoices / "invoice-1002.html").read_text(encoding="utf-8")
    assert not demo.processes()


def test_two_demos_at_once_where_the_standard_ports_are_taken(start: Callable[[int], Demo]) -> None:
    with socket.socket() as postgres, socket.socket() as redis:
        for taken, port in ((postgres, 5432), (redis, 6379)):
            with suppress(OSError):  # by a server of this machine
                taken.bind(("127.0.0.1", port))
                taken.listen()
        demos = [start(10), start(10)]
        for demo in demos:
            said, trouble = demo.popen.communicate(timeout=90)
            assert (demo.popen.returncode, trouble) == (0, ""), said + trouble
    assert all(" " in str(demo.invoices) for demo in demos)
    assert demos[0].invoices != demos[1].invoices


@pytest.mark.parametrize(
    ("stop", "number"),
    [
        pytest.param(lambda pid: os.killpg(pid, signal.SIGINT), signal.SIGINT, id="Ctrl-C in a terminal"),
        pytest.param(lambda pid: os.kill(pid, signal.SIGINT), signal.SIGINT, id="SIGINT"),
        pytest.param(lambda pid: os.kill(pid, signal.SIGTERM), signal.SIGTERM, id="SIGTERM"),
    ],
)
def test_a_demo_that_is_stopped_leaves_nothing_behind(
    start: Callable[[int], Demo], stop: Callable[[int], None], number: signal.Signals
) -> None:
    demo = start(200)
    until(demo.works, what="an invoice")
    assert len(demo.processes()) > 6  # the demo, PostgreSQL with its own, Valkey, the worker and its two children
    assert len(demo.folders) == 1
    stop(demo.popen.pid)
    said, trouble = demo.popen.communicate(timeout=60)
    assert (demo.popen.returncode, trouble) == (128 + number, STOPPED), said + trouble
    until(lambda: not demo.processes(), seconds=10, what="the end of all that it started")
    assert not any(folder.exists() for folder in demo.folders)


def test_a_demo_that_is_stopped_while_it_starts_leaves_nothing_behind(start: Callable[[int], Demo]) -> None:
    demo = start(200)
    until(lambda: demo.processes() and demo.folders, what="the first server")
    demo.popen.send_signal(signal.SIGINT)
    said, trouble = demo.popen.communicate(timeout=60)
    assert (demo.popen.returncode, trouble) == (130, STOPPED), said + trouble
    until(lambda: not demo.processes(), seconds=10, what="the end of all that it started")
    assert not any(folder.exists() for folder in demo.folders)


def test_a_demo_that_is_killed_takes_its_processes_along(start: Callable[[int], Demo]) -> None:
    demo = start(200)
    until(demo.works, what="an invoice")
    assert demo.processes()
    demo.popen.kill()
    demo.popen.communicate(timeout=60)
    until(lambda: not demo.processes(), seconds=20, what="the end of all that it started")
    for folder in demo.folders:  # nobody was left to remove it
        shutil.rmtree(folder)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "bridge", "demo", "--keep", str(tmp_path / "file" / "below")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: The invoices cannot be kept there:")
    assert ended.stderr.count("\n") == 1
