"""What is attacked: a database, a broker, three workers and two dispatchers, and whoever starts them again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from bridge.database import Database
from bridge.embedded import Servers
from bridge.migrating import migrate
from tests.proxy import Proxy

ROOT = Path(__file__).parents[2]
BODY = """
CREATE TABLE body (job_id uuid, run uuid, what text, at timestamptz DEFAULT clock_timestamp());
CREATE INDEX body_at ON body (at);
"""


@dataclass
class Slot:
    """A process that is started again whenever it has ended, as a service manager does."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    popen: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def keep(self) -> None:
        """Start it if it does not run."""
        if self.popen is None or self.popen.poll() is not None:
            with self.log.open("ab") as log:
                self.popen = subprocess.Popen(
                    [sys.executable, *self.command], env=self.environment, cwd=ROOT, stdout=log, stderr=log
                )
            self.starts += 1

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Signal its main process."""
        if self.popen is not None:
            self.popen.send_signal(how)

    def children(self) -> list[int]:
        """The pids of a worker's pool."""
        assert self.popen is not None
        with suppress(OSError):
            path = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children")
            return [int(pid) for pid in path.read_text().split()]
        return []


@dataclass
class Cluster:
    """Use it as a context manager. `plain` runs Celery alone, which needs no database and no dispatcher."""

    folder: Path
    plain: bool = False
    servers: Servers = field(default_factory=Servers)
    witness: Servers = field(default_factory=Servers)
    workers: list[Slot] = field(default_factory=list)
    dispatchers: list[Slot] = field(default_factory=list)
    burst: Callable[[int], None] = lambda jobs: None

    def __enter__(self) -> Cluster:
        self._stack = ExitStack()
        with ExitStack() as stack:
            for servers in (self.servers, self.witness):
                stack.enter_context(servers)
            with psycopg.connect(self.witness.database_url) as conn:
                conn.execute(BODY)
            migrate(Database(self.servers.database_url))
            with psycopg.connect(self.servers.database_url) as conn:
                conn.execute("CREATE TABLE effect (job_id uuid)")
            self.database = Proxy(self.servers.folder / ".s.PGSQL.5432")
            self.broker = Proxy(self.servers.folder / "valkey.sock")
            stack.callback(self.broker.close)
            stack.callback(self.database.close)
            self._start()
            stack.callback(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        through = f"redis://127.0.0.1:{self.broker.port}/0"
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("BRIDGE_", "CELERY_"))},
            "PYTHONPATH": str(ROOT),
            "CELERY_CONFIG_MODULE": "tests.configuration",
            "CHAOS_WITNESS": self.witness.database_url,
        }
        own = {
            "BRIDGE_IMPORTS": "tests.chaos.jobs",
            "BRIDGE_DATABASE_URL": self.servers.database_url,
            "BRIDGE_BROKER_URL": self.servers.broker_url,
            "BRIDGE_LEASE": "6s",
            "BRIDGE_LOST_AFTER": "6s",
            "BRIDGE_RETRY_MAX_DELAY": "2s",
            "BRIDGE_DISPATCHER": "standalone",
        }
        app = "tests.chaos.plain" if self.plain else "bridge"
        worker = ["-m", "celery", "-A", app, "worker", "-c", "2", "-l", "info", "--without-mingle", "--without-gossip"]
        database = f"postgresql://postgres@127.0.0.1:{self.database.port}/postgres"
        for number in range(3):
            settings = {"CHAOS_BROKER": through} if self.plain else {**own, "BRIDGE_DATABASE_URL": database}
            name = f"worker{number}"
            command = [*worker, "-n", f"{name}@chaos"]
            self.workers.append(Slot(name, command, {**environment, **settings}, self.folder / f"{name}.log"))
        for number in range(0 if self.plain else 2):
            settings, name = {**own, "BRIDGE_BROKER_URL": through}, f"dispatcher{number}"
            command = ["-m", "bridge", "dispatcher"]
            self.dispatchers.append(Slot(name, command, {**environment, **settings}, self.folder / f"{name}.log"))
        self._ending = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        while not self._ending.wait(0.2):
            for slot in (*self.workers, *self.dispatchers):
                slot.keep()

    def _end(self) -> None:
        self._ending.set()
        self._keeper.join()
        slots = [slot for slot in (*self.workers, *self.dispatchers) if slot.popen is not None]
        for slot in slots:
            slot.kill()
        for slot in slots:
            assert slot.popen is not None
            slot.popen.wait()

    def ready(self) -> None:
        """Wait until all workers are."""
        deadline = time.monotonic() + 60
        while not all(slot.log.exists() and b" ready." in slot.log.read_bytes() for slot in self.workers):
            if time.monotonic() > deadline:
                raise RuntimeError("the workers do not start:\n" + self.workers[0].log.read_text()[-2000:])
            time.sleep(0.1)
