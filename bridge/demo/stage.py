"""What the demo stands on: signals, environment, invoices, worker. Each is a block, and nothing outlives its block."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from celery import Celery
from celery.platforms import set_pdeathsig  # type: ignore[attr-defined]  # missing in celery-types

import bridge
from bridge import runtime
from bridge.embedded import Servers
from bridge.errors import ConfigurationError

WORKER = ("celery", "-A", "bridge", "worker", "-c", "2", "-l", "warning", "--without-gossip", "--without-mingle")
WORKER_SECONDS = 5.0
"""How long the worker may take to end on SIGTERM, before it is killed."""

FOREIGN = ("BRIDGE_", "CELERY_", "PG")
"""Variables that would lead the demo to servers or settings of yours."""


@contextmanager
def environment() -> Iterator[None]:
    """An environment without settings of yours; it is as before when the block ends."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(FOREIGN):
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def invoices(keep: str | None) -> Iterator[Path]:
    """The folder of the invoices. It stays, unless it is a new one and the block raises.

    Raises:
        ConfigurationError: it cannot be written.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="bridge-invoices-")) if keep is None else Path(keep).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigurationError(f"The invoices cannot be kept there: {error}") from None
    try:
        yield folder
    except BaseException:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def app(servers: Servers, folder: Path) -> Iterator[Celery]:
    """A Celery app on these servers, with the bridge installed; a worker finds the same settings in the environment."""
    os.environ.update(
        BRIDGE_DATABASE_URL=servers.database_url,
        BRIDGE_BROKER_URL=servers.broker_url,
        BRIDGE_IMPORTS="bridge.demo.shop",
        SHOP_DATABASE_URL=servers.database_url,
        SHOP_INVOICES=str(folder),
    )
    made = bridge.install(Celery("shop", set_as_current=False))
    try:
        with runtime.running(runtime.of(made)):  # whatever other app this process may have
            yield made
    finally:
        runtime.uninstall(made)


@dataclass(frozen=True, slots=True)
class Worker:
    """A Celery worker in a process group of its own."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def ended(self) -> bool:
        """Has it ended by itself?"""
        return self.process.poll() is not None

    @property
    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-4000:].strip()


@contextmanager
def worker(home: Path) -> Iterator[Worker]:
    """A worker, started in the new folder `home`; with its children it is gone when the block ends."""
    home.mkdir()
    (home / "celeryconfig.py").touch()  # found before any other: the demo runs on the defaults
    log = home / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *WORKER],
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in a terminal is for the demo, which stops the worker in order
            preexec_fn=partial(set_pdeathsig, "SIGKILL"),  # and a demo that is killed takes it along, on Linux
        )
    try:
        yield Worker(process, log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(WORKER_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
