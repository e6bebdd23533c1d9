"""Waits for PostgreSQL's notifications that rows are due."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import psycopg
from psycopg import sql

from bridge.database import Connection, Database
from bridge.errors import DatabaseError

logger = logging.getLogger(__name__)


_POOLED = (
    "a transaction pooler stands in between: set BRIDGE_LISTEN_URL to the address of PostgreSQL itself, "
    "or to 'off' to poll only"
)


@dataclass(slots=True)
class Listener:
    """Waits for notifications that rows are due, on a connection of its own.

    A dead or missing connection costs one wait, never a job: the caller polls anyhow.
    """

    database: Database
    channel: str
    _conn: Connection | None = None
    _silent: bool = False

    def ready(self) -> None:
        """Listen from now on, if that is possible."""
        try:
            self._listening()
        except (DatabaseError, psycopg.Error) as error:
            self._failed(error)

    def wait(self, seconds: float, stop: threading.Event, payload: str) -> bool:
        """Wait that long, at most, for a notification with that payload; true if one came."""
        try:
            conn = self._listening()
        except (DatabaseError, psycopg.Error) as error:
            self._failed(error)
            stop.wait(seconds)
            return False
        deadline = time.monotonic() + seconds
        try:
            while (left := deadline - time.monotonic()) > 0 and not stop.is_set():
                notices = list(conn.notifies(timeout=min(left, 0.5), stop_after=1))
                if notices:
                    notices += conn.notifies(timeout=0)  # a burst is one wake-up
                if any(notice.payload == payload for notice in notices):
                    return True
        except psycopg.Error as error:
            self._failed(error)
            stop.wait(max(0.0, deadline - time.monotonic()))
        return False

    def close(self) -> None:
        """Stop listening."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def _listening(self) -> Connection:
        if self._conn is None:
            conn = self.database.connect()
            if self.database.pooled:
                conn.close()
                raise DatabaseError(_POOLED)
            conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self.channel)))
            self._conn = conn
            if self._silent:
                logger.info("wake-ups: listening again")
                self._silent = False
        return self._conn

    def _failed(self, error: Exception) -> None:
        self.close()
        if not self._silent:
            what = str(error) if isinstance(error, DatabaseError) else type(error).__name__
            logger.warning("wake-ups: there is no listening connection (%s); polling until there is", what)
            self._silent = True
