"""A command, or a shell, on servers of its own: `bridge dev`."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from bridge.database import Database
from bridge.embedded import Servers
from bridge.migrating import migrate


def run(command: Sequence[str]) -> int:
    """Start PostgreSQL and Valkey, migrate, run the command with the environment set, then stop everything.

    Args:
        command: what to run; nothing means the user's shell.

    Returns:
        The command's exit code, or 128 and the signal that ended it, as a shell says it.

    Raises:
        ConfigurationError: the extra `embedded` is not installed, or a server did not start.
    """
    # SIGTERM ends the block like Ctrl-C does, so that the servers are stopped in every case.
    signal.signal(signal.SIGTERM, _interrupt)
    with Servers() as servers:
        migrate(Database(servers.database_url))
        environment = {
            **os.environ,
            "BRIDGE_DATABASE_URL": servers.database_url,
            "BRIDGE_BROKER_URL": servers.broker_url,
            "PATH": f"{servers.programs}{os.pathsep}{os.environ.get('PATH', '')}",  # psql of the same version
        }
        child = subprocess.Popen(list(command) or [os.environ.get("SHELL", "/bin/sh")], env=environment)
        code = _wait(child)
    return code if code >= 0 else 128 - code


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for the command. Ctrl-C reaches it from the terminal; SIGTERM is passed on; it decides when it ends."""
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue
        except SystemExit:
            child.terminate()


def _interrupt(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)
