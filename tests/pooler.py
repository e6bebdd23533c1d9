"""PgBouncer in transaction mode, in front of the tests' PostgreSQL."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support import until

CONFIGURATION = """
[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_addr =
unix_socket_dir = {folder}
listen_port = 6432
auth_type = any
pool_mode = transaction
default_pool_size = 4
max_client_conn = 200
logfile = {folder}/log
"""


@dataclass
class Pooler:
    """Use it as a context manager. Four server sessions a database, which clients share statement by statement."""

    program: str
    url: str
    folder: Path = field(init=False)
    popen: subprocess.Popen[bytes] = field(init=False)

    def __enter__(self) -> Pooler:
        self.folder = Path(tempfile.mkdtemp(prefix="pooler-", dir="/tmp"))
        given = conninfo_to_dict(self.url)
        user = str(given.get("user") or "postgres")
        where = {"host": given.get("host") or "/tmp", "port": given.get("port") or 5432, "user": user}
        (self.folder / "ini").write_text(CONFIGURATION.format(folder=self.folder, **where))
        self.start()
        return self

    def start(self) -> None:
        """Start it."""
        identity: dict[str, Any] = {}
        if os.geteuid() == 0:  # it refuses to run as root
            nobody = pwd.getpwnam("nobody")
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self.popen = subprocess.Popen([self.program, "-q", self.folder / "ini"], **identity)
        until(self.answers, what="PgBouncer")

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def answers(self) -> bool:
        """Does it listen?"""
        assert self.popen.poll() is None, "PgBouncer has ended"
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.folder / ".s.PGSQL.6432")) == 0

    def address(self, url: str) -> str:
        """A database's address, through it."""
        return make_conninfo(url, host=str(self.folder), port=6432)
