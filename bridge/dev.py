"""A command, or a shell, on servers of its own: `bridge dev`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bridge.database import Database
from bridge.embedded import Servers
from bridge.migrating import migrate
from bridge.stopping import Signals, Stopped

_ELSEWHERE = ("BRIDGE_LISTEN_URL", "CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")
"""Variables that, like those of libpq, would lead to other servers than those that are started."""


def run(command: Sequence[str]) -> int:
    """Start PostgreSQL and Valkey, migrate, run the command with the environment set, then stop everything.

    Args:
        command: what to run; nothing means the user's shell.

    Returns:
        The command's exit code, or 128 and the signal that ended it, as a shell says it.

    Raises:
        ConfigurationError: the extra `embedded` is not installed, or a server did not start.
    """
    try:
        with Signals() as signals:
            return _on_servers(command, signals)
    except Stopped as stopped:
        print("Stopped: the servers and their folder are gone.", file=sys.stderr)
        return 128 + stopped.number


def _on_servers(command: Sequence[str], signals: Signals) -> int:
    for name in [each for each in os.environ if each.startswith("PG") or each in _ELSEWHERE]:
        del os.environ[name]
    others = _children()
    with Servers() as servers:
        migrate(Database(servers.database_url))
        environment = {
            **os.environ,
            "BRIDGE_DATABASE_URL": servers.database_url,
            "BRIDGE_BROKER_URL": servers.broker_url,
            "PATH": f"{servers.programs}{os.pathsep}{os.environ.get('PATH', '')}",  # psql of the same version
        }
        _adopt_orphans()
        with signals.heard():  # whatever came while the servers started
            pass
        code = _run(list(command), environment, signals)
        _end_children(spare=others | {each.pid for each in (servers.postgres, servers.valkey) if each})
    return code if code >= 0 else 128 - code


def _run(command: list[str], environment: dict[str, str], signals: Signals) -> int:
    if not command:
        command = [os.environ.get("SHELL", "/bin/sh")]
        print(
            "PostgreSQL 18 and Valkey run, migrated; BRIDGE_DATABASE_URL and BRIDGE_BROKER_URL are set.\n"
            '"exit" ends this shell, what it started, and the servers.',
            flush=True,
        )
    try:
        child = subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    # Ctrl-C reaches it from the terminal; SIGTERM and SIGHUP are passed on; it decides when it ends.
    for each in signals.before:
        signal.signal(each, lambda number, _: None if number == signal.SIGINT else child.terminate())
    if signals.noted is not None:
        child.terminate()
    return child.wait()


def _end_with_parent() -> None:
    """In the child, before exec: a killed parent takes its servers along, so end with it (Linux, PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _adopt_orphans() -> None:
    """A worker that the shell left in the background becomes our child (Linux, PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)


def _end_children(*, spare: set[int]) -> None:
    """End what the command left behind, before its servers go: SIGTERM, then after a bound SIGKILL."""
    for how, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + seconds
        told: set[int] = set()
        while (left := _children() - spare) and time.monotonic() < deadline:
            for pid in left - told:
                with suppress(ProcessLookupError):
                    os.kill(pid, how)
            told |= left
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.05)


def _children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(stat.parent.name))
    return found
