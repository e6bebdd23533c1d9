"""Connections to PostgreSQL: opened on first use, never carried over a fork, replaced when dead.

A Database keeps idle connections of this process, last used first: a worker's child or a loop, which uses
one at a time, has exactly one; a producer with many threads has at most `size`. Every session of ours is
READ COMMITTED and bounded (lock, statement, idle transaction, TCP), whatever the server's defaults are.
psycopg's errors become ours here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import psycopg
from psycopg import pq
from psycopg.rows import TupleRow, tuple_row

from bridge.errors import ConfigurationError, DatabaseError, DatabaseUnavailable, InvalidJob

logger = logging.getLogger(__name__)

Connection = psycopg.Connection[TupleRow]
T = TypeVar("T")

TRANSIENT = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError)
"""Errors after which the same statement may succeed: the connection, a lock, a read-only standby, a crash."""

_CONNECT: dict[str, Any] = {
    "connect_timeout": 5,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
_SESSION = {
    "TimeZone": "UTC",  # a time of the year 9999 has one more year's digit in the east
    "default_transaction_isolation": r"read\ committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    "statement_timeout": "30s",
    "idle_in_transaction_session_timeout": "60s",
}


_OURS = "bridge.session"  # a setting of no meaning: a session that has it has the others
_READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE, NOT DEFERRABLE;"


@contextmanager
def translated() -> Iterator[None]:
    """Raise ours for psycopg's. The message is the server's own first line: it holds no address, no password.

    Raises:
        DatabaseUnavailable: the same may work in a moment.
        DatabaseError: it would fail again.
    """
    try:
        yield
    except psycopg.Error as error:
        raise ours(error) from error
    except UnicodeEncodeError as error:
        raise DatabaseError(
            f"the connection's client_encoding, {error.encoding}, lacks a character: set it to UTF8"
        ) from None


@contextmanager
def joined(conn: object) -> Iterator[psycopg.Connection[Any]]:
    """The caller's own connection, in whatever transaction it is; its errors become ours.

    Raises:
        TypeError: it is no psycopg connection.
        InvalidJob: it is in pipeline mode.
    """
    if not isinstance(conn, psycopg.Connection):
        raise TypeError(f"conn takes a psycopg.Connection, not {type(conn).__module__}.{type(conn).__qualname__}")
    if conn.info.pipeline_status != pq.PipelineStatus.OFF:
        raise InvalidJob("conn is in pipeline mode, where no answer is known before its end: call this outside of it")
    with translated():
        yield conn


@contextmanager
def nested(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """All of the block or nothing of it: a savepoint of the transaction; in autocommit a transaction of its own.

    psycopg's `transaction()` as the first thing on a connection would begin a transaction, and commit it, which
    is for its owner to do.
    """
    if not conn.autocommit and conn.info.transaction_status == pq.TransactionStatus.IDLE:
        conn.execute("SELECT")  # psycopg begins before it
    with conn.transaction():
        yield


def in_transaction(conn: psycopg.Connection[Any]) -> bool:
    """Is a transaction open that its owner has neither committed nor rolled back?"""
    return not conn.closed and conn.info.transaction_status != pq.TransactionStatus.IDLE


def abandon(conn: psycopg.Connection[Any], transaction: str) -> bool:
    """Roll back that transaction if the connection is still in it; a pool may have given it to somebody else since.

    Args:
        transaction: its id, as `pg_current_xact_id()` says it.

    Returns:
        Was it open? One that failed is not looked for: PostgreSQL has rolled it back, and released its locks.
    """
    if conn.closed or conn.info.transaction_status != pq.TransactionStatus.INTRANS:
        return False
    try:
        row = conn.cursor(row_factory=tuple_row).execute("SELECT pg_current_xact_id_if_assigned()::text").fetchone()
        if row != (transaction,):
            return False
        conn.rollback()
    except psycopg.Error:
        conn.close()
    return True


def ours(error: psycopg.Error) -> DatabaseError:
    """The bridge's exception for one of psycopg's."""
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.UndefinedFunction):
        return DatabaseError(f"{first}. Is the database migrated? Run: python -m bridge migrate")
    return DatabaseUnavailable(first) if isinstance(error, TRANSIENT) else DatabaseError(first)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Database:
    """A source of connections to one PostgreSQL.

    Args:
        url: its address, or what finds it (or raises ConfigurationError); a conninfo string works too.
        size: how many connections this process may have at once; None is no limit.
        name: application_name in pg_stat_activity.
        lock_timeout: how long a statement waits for somebody else's lock, as PostgreSQL writes it.

    `pooled` is found out by the first connection: does a transaction pooler such as PgBouncer stand in between, which
    keeps no settings of a session? Then each block is a transaction that begins with them.
    """

    url: str | Callable[[], str] = field(repr=False)
    size: int | None = None
    name: str = "bridge"
    lock_timeout: str = "5s"
    pooled: bool = False
    _idle: list[Connection] = field(default_factory=list, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _slots: threading.Semaphore | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._fresh()
        _databases.add(self)

    def connect(self) -> Connection:
        """A new connection in autocommit, for a caller that keeps it.

        Raises:
            ConfigurationError: the address cannot be understood.
            DatabaseUnavailable: the server does not answer, or refuses.
        """
        options = " ".join(f"-c {key}={value}" for key, value in {**self._session(), _OURS: "1"}.items())
        url = self.url if isinstance(self.url, str) else self.url()
        try:
            given = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            raise ConfigurationError(
                "The database address cannot be understood; it looks like postgresql://user@host:5432/database"
            ) from None
        if own := given.pop("options", None):
            options = f"{options} {own}"
        settings = {"application_name": self.name, **_CONNECT, **given, "client_encoding": "UTF8"}
        try:
            return self._pooled_connection(settings) if self.pooled else self._own_connection(settings, options)
        except psycopg.Error as error:
            where = f"{given.get('host', 'the local socket')}:{given.get('port', 5432)}"
            first = next(iter(str(error).splitlines()), "")
            raise DatabaseUnavailable(
                f"PostgreSQL at {where}, database {given.get('dbname', 'default')!r}, cannot be reached: {first}"
            ) from error

    def _session(self) -> dict[str, str]:
        return {**_SESSION, "lock_timeout": self.lock_timeout}

    def _own_connection(self, settings: dict[str, Any], options: str) -> Connection:
        """A session of our own, unless it turns out that there is none."""
        try:
            conn = psycopg.connect("", autocommit=True, options=options, **settings)
        except psycopg.OperationalError as error:
            if "unsupported startup parameter" not in str(error):  # PgBouncer's words
                raise
            self.pooled = True
            return self._pooled_connection(settings)
        if conn.info.parameter_status("TimeZone") != "UTC":  # PGTZ beats the options
            conn.execute("SET TimeZone TO 'UTC'")
        row = conn.execute("SELECT current_setting(%s, true)", (_OURS,)).fetchone()
        if row != ("1",):  # ignore_startup_parameters = options: a pooler took them, and forgot
            conn.close()
            self.pooled = True
            return self._pooled_connection(settings)
        return conn

    def _pooled_connection(self, settings: dict[str, Any]) -> Connection:
        """No settings that travel with the session, no prepared statements: the next statement meets another one."""
        return psycopg.connect("", autocommit=True, prepare_threshold=None, **settings)

    @contextmanager
    def _configured(self, conn: Connection) -> Iterator[None]:
        """Behind a pooler, the block is a transaction that has our settings."""
        if not self.pooled:
            yield
            return
        local = "".join(f"SET LOCAL {key} TO '{value}';" for key, value in self._session().items())
        with conn.transaction():
            conn.execute(_READ_COMMITTED + local.replace("\\ ", " "))
            yield

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection in autocommit; it goes back when the block ends, or is closed if it broke.

        Behind a transaction pooler the block is one transaction.

        Raises:
            DatabaseUnavailable, DatabaseError: ours for psycopg's, also for what the block raises.
        """
        slots = self._slots
        if slots is not None and not slots.acquire(timeout=10):
            raise DatabaseUnavailable(f"all {self.size} connections of this process have been busy for 10 seconds")
        try:
            conn = self._take()
            try:
                with translated(), self._configured(conn):
                    yield conn
            finally:
                self._give(conn)
        finally:
            if slots is not None:
                slots.release()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction of our own: committed when the block ends, rolled back when it raises."""
        with self.connection() as conn, conn.transaction():
            yield conn

    def close(self) -> None:
        """Close the idle connections; the next use opens new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for conn in idle:
            conn.close()

    def _fresh(self) -> None:
        """A connection belongs to the process that opened it: a child drops its parent's, unclosed and unused.

        Closing it would end the parent's session. The locks are new, since a fork may copy them while held.
        """
        _inherited.extend(self._idle)
        self._idle = []
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self.size) if self.size else None

    def _take(self) -> Connection:
        while True:
            with self._lock:
                conn = self._idle.pop() if self._idle else None
            if conn is None:
                return self.connect()
            if _alive(conn):
                return conn
            conn.close()

    def _give(self, conn: Connection) -> None:
        if conn.closed or conn.info.transaction_status != pq.TransactionStatus.IDLE:
            with suppress(psycopg.Error):
                conn.close()
            return
        with self._lock:
            self._idle.append(conn)


_inherited: list[Connection] = []  # kept so that a child never collects them, which psycopg would warn of
_databases: WeakSet[Database] = WeakSet()


def _forked() -> None:
    for database in list(_databases):
        database._fresh()


os.register_at_fork(after_in_child=_forked)


def _alive(conn: Connection) -> bool:
    """Has the server said nothing since the last use? What it says to an idle session is that it is over."""
    if conn.closed:
        return False
    with suppress(psycopg.Error, OSError):
        conn.pgconn.consume_input()
        return bool(conn.pgconn.status == pq.ConnStatus.OK) and conn.pgconn.notifies() is None
    return False


def in_doubt(work: Callable[[int], T], *, wait: Callable[[float], bool], what: str, most: float = 5.0) -> T | None:
    """Repeat `work(attempt)` until PostgreSQL answers; None when `wait` says to stop.

    Args:
        work: gets the number of the attempt, from 0: from 1 on, an earlier one may have been carried out.
        wait: waits that many seconds, at most; true means stop.
        what: for the log, which speaks once when the trouble starts and once when it is over.
        most: longest pause between two attempts, in seconds.
    """
    attempt = 0
    while True:
        try:
            result = work(attempt)
        except DatabaseUnavailable as error:
            if attempt == 0:
                logger.warning("%s: PostgreSQL does not answer (%s); trying until it does", what, error)
            if wait(min(most, 0.05 * 2 ** min(attempt, 10))):
                return None
            attempt += 1
        else:
            if attempt:
                logger.info("%s: PostgreSQL answers again, after %d attempts", what, attempt)
            return result


def as_milliseconds(value: timedelta) -> int:
    """Whole milliseconds of a duration, at least the duration."""
    return -(-value // timedelta(milliseconds=1))
