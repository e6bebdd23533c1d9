"""What several tests need: conditions with a deadline, processes, rows, tickets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

import psycopg
from celery import Celery
from kombu import Connection
from psycopg.rows import dict_row

ROOT = Path(__file__).parent.parent
QUEUES = ("default", "test", "other")
T = TypeVar("T")
_tick = threading.Event()  # never set: a bounded wait between two looks at a condition


def until(condition: Callable[[], T], *, seconds: float = 30.0, what: str | Callable[[], object] = "") -> T:
    """Wait until the condition holds, and return what it said; fail after that many seconds, saying what."""
    deadline = time.monotonic() + seconds
    while not (said := condition()):
        if time.monotonic() > deadline:
            why = what() if callable(what) else what
            raise AssertionError(f"not within {seconds} s: {why or condition}; last: {said!r}")
        _tick.wait(0.02)
    return said


def stays(condition: Callable[[], Any], *, seconds: float, what: str = "") -> None:
    """Fail if the condition stops holding within that many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition(), what
        _tick.wait(0.02)


@contextmanager
def broker(url: str) -> Iterator[Connection]:
    """A kombu connection, closed afterwards."""
    with Connection(url, transport_options={"socket_timeout": 5}) as connection:
        yield connection


def purge(url: str) -> None:
    """Empty the broker of what tests put there."""
    with broker(url) as connection:
        channel = connection.channel()
        if connection.transport.driver_type == "redis":
            channel.client.flushdb()
        else:
            for name in QUEUES:
                channel.queue_declare(name, durable=True, auto_delete=False)
                channel.queue_purge(name)


def depth(url: str, queue: str = "default") -> int:
    """Messages that wait in a queue."""
    with broker(url) as connection:
        try:
            return connection.channel().queue_declare(queue, passive=True).message_count
        except connection.channel_errors:
            return 0


def send(url: str, name: str, args: Any, *, queue: str = "test", **message: Any) -> None:
    """Put a task message onto a queue by hand; `message` replaces its parts (task_id, kwargs, embed, headers)."""
    app = Celery("sender", broker=url, set_as_current=False)
    with app.connection_for_write() as connection:
        headers, embed = message.pop("headers", {}), message.pop("embed", None)
        task_id = message.pop("task_id", None) or (args[0] if isinstance(args, list | tuple) and args else "x")
        parts = app.amqp.as_task_v2(task_id, name, args=(), **message)
        body = (args, message.get("kwargs", {}), embed or parts.body[2])
        parts = parts._replace(body=body, headers={**parts.headers, **headers})
        app.amqp.send_task_message(app.amqp.Producer(connection), name, parts, queue=queue, serializer="json")


@dataclass
class Side:
    """The test's own look at the database."""

    conn: psycopg.Connection

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """Run a query."""
        return self.conn.cursor(row_factory=dict_row).execute(query, values).fetchall()

    def row(self, job_id: UUID) -> dict[str, Any]:
        """A job's row."""
        (found,) = self.rows("SELECT * FROM job WHERE id = %s", job_id)
        return found

    def status(self, job_id: UUID) -> str:
        """A job's status."""
        return self.row(job_id)["status"]

    def events(self, job_id: UUID) -> list[tuple[str, dict[str, Any]]]:
        """A job's history without its progress."""
        rows = self.rows(
            "SELECT kind, payload FROM job_event WHERE job_id = %s AND kind <> 'progress' ORDER BY id", job_id
        )
        return [(row["kind"], row["payload"]) for row in rows]

    def received(self, job_id: UUID) -> list[dict[str, Any]]:
        """What the job's handler was called with, each time."""
        return self.rows("SELECT * FROM received WHERE job_id = %s ORDER BY id", job_id)

    def insert(self, name: str = "echo", **columns: Any) -> UUID:
        """Insert a row by plain SQL, queue test unless said otherwise."""
        columns = {"name": name, "queue": "test", **columns}
        values = [json.dumps(v) if isinstance(v, dict | list) else v for v in columns.values()]
        query = f"INSERT INTO job ({', '.join(columns)}) VALUES ({', '.join(['%s'] * len(columns))}) RETURNING id"
        row = self.conn.execute(query, values).fetchone()
        assert row is not None
        return row[0]

    def ticket(self, job_id: UUID) -> list[str]:
        """The args of the row's current message."""
        scheduled_at: datetime = self.row(job_id)["scheduled_at"]
        return [str(job_id), scheduled_at.isoformat()]

    def counts(self) -> dict[str, int]:
        """Jobs by status."""
        return {row["status"]: row["n"] for row in self.rows("SELECT status, count(*) AS n FROM job GROUP BY 1")}


@dataclass
class Process:
    """A worker or dispatcher of the test."""

    popen: subprocess.Popen[bytes]
    path: Path
    node: str = ""

    @property
    def log(self) -> str:
        """What it said so far."""
        return self.path.read_text(errors="replace")

    @property
    def tail(self) -> str:
        """The end of what it said."""
        return self.log[-3000:]

    def says(self, text: str, *, seconds: float = 60.0) -> None:
        """Wait until its log holds the text."""
        until(
            lambda: text in self.log or self.popen.poll() is not None,
            seconds=seconds,
            what=lambda: f"{text!r} in the log:\n{self.tail}",
        )
        assert text in self.log, f"ended with {self.popen.returncode} before it said {text!r}:\n{self.log[-3000:]}"

    def children(self) -> list[int]:
        """The pids of its pool's processes."""
        found = subprocess.run(["ps", "--ppid", str(self.popen.pid), "-o", "pid="], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Signal the main process."""
        self.popen.send_signal(how)

    def end(self, how: signal.Signals = signal.SIGTERM, *, seconds: float = 60.0) -> int:
        """Signal it and wait for its end."""
        if self.popen.poll() is None:
            self.kill(how)
        return self.popen.wait(timeout=seconds)


def _end(running: list[subprocess.Popen[bytes]]) -> None:
    """Ask processes to end, first for their jobs' sake, then at once."""
    for how in (signal.SIGTERM, signal.SIGQUIT):
        for popen in running:
            popen.send_signal(how)
        with suppress(AssertionError):
            until(lambda: all(popen.poll() is not None for popen in running), seconds=5)
            return


@dataclass
class Stack:
    """Workers and dispatchers as processes."""

    database_url: str
    broker_url: str
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    python: str = sys.executable

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        running = [process.popen for process in self.processes if process.popen.poll() is None]
        if "COVERAGE_PROCESS_CONFIG" in os.environ:  # a process that is killed saves nothing
            _end(running)
        for popen in running:
            popen.kill()
        for process in self.processes:
            process.popen.wait()

    def worker(self, *arguments: str, pool: str = "prefork", concurrency: int = 2, **settings: str) -> Process:
        """Start a worker on queue test and wait until it is ready; settings are environment variables."""
        if "-Q" not in arguments:
            arguments = ("-Q", "test,default", *arguments)
        command = ["-m", "celery", "-A", "bridge", "worker", "-P", pool, "-c", str(concurrency), "-l", "info"]
        # a name of its own: RabbitMQ keeps a killed worker's exclusive queue for a while
        node = f"w{len(self.processes)}-{uuid4().hex[:6]}@test"
        command += ["--without-mingle", "--without-gossip", "-n", node]
        process = self.start([*command, *arguments], **settings)
        process.node = node
        process.says(" ready.")
        return process

    def dispatcher(self, **settings: str) -> Process:
        """Start a dispatcher alone."""
        return self.start(["-m", "bridge", "dispatcher"], **settings)

    def start(self, command: list[str], **settings: str) -> Process:
        """Start a Python process on the test's servers."""
        environment = {
            **os.environ,
            "BRIDGE_DATABASE_URL": self.database_url,
            "BRIDGE_BROKER_URL": self.broker_url,
            "BRIDGE_IMPORTS": "tests.jobs",
            "CELERY_CONFIG_MODULE": "tests.configuration",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            **self.environment,
            **settings,
        }
        path = self.folder / f"process-{len(self.processes)}.log"
        with path.open("wb") as log:
            popen = subprocess.Popen([self.python, *command], env=environment, stdout=log, stderr=log, cwd=self.folder)
        process = Process(popen, path)
        self.processes.append(process)
        return process
