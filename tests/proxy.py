"""A TCP proxy in front of a server, for the faults of a network: silence, resets, and an answer that never comes."""

from __future__ import annotations

import random
import selectors
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

Pair = tuple[socket.socket, socket.socket]


@dataclass(eq=False)
class Cut:
    """Answers that are to be lost, and how many were."""

    text: bytes
    times: int
    then: bytes = b""
    happened: int = 0
    waiting: set[Pair] = field(default_factory=set)
    seen: set[Pair] = field(default_factory=set)


class Proxy:
    """Forwards connections on `port` to a server: a Unix socket's path, or a host and port."""

    def __init__(self, target: Path | tuple[str, int]) -> None:
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self._passing = threading.Event()
        self._passing.set()
        self._pairs: list[Pair] = []
        self._lock = threading.Lock()
        self._cuts: list[Cut] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @classmethod
    def of_postgres(cls, url: str) -> Proxy:
        """In front of the PostgreSQL of an address."""
        given = conninfo_to_dict(url)
        host, port = str(given.get("host") or "/tmp"), int(given.get("port") or 5432)
        return cls(Path(host) / f".s.PGSQL.{port}" if host.startswith("/") else (host, port))

    def address(self, url: str) -> str:
        """That address, through this proxy."""
        return make_conninfo(url, host="127.0.0.1", port=self.port)

    def silent(self) -> None:
        """From now on no byte passes, in either direction; connections stay open, new ones are accepted."""
        self._passing.clear()

    def heal(self) -> None:
        """What was held back arrives late on one half of the connections; the others turn out to be dead."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in random.sample(pairs, len(pairs) // 2):
            self._drop(pair)
        self._passing.set()

    def cut(self, text: str, *, times: int = 1, then: str = "") -> Cut:
        """Lose the answers to the next requests that hold the text: the server has carried them out.

        Args:
            then: wait, on the same connection, for a later request that holds this text, and lose its answer.
        """
        cut = Cut(text.encode(), times, then.encode())
        with self._lock:
            self._cuts.append(cut)
        return cut

    def close(self) -> None:
        """Drop everything."""
        self._passing.set()
        self.listener.close()
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._drop(pair)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._passing.wait()
        server = socket.socket(socket.AF_UNIX if isinstance(self.target, Path) else socket.AF_INET)
        pair = (client, server)
        try:
            server.connect(str(self.target) if isinstance(self.target, Path) else self.target)
        except OSError:
            self._drop(pair)
            return
        with self._lock:
            self._pairs.append(pair)
        with suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in selector.select():
                    self._pass(pair, key.fileobj, key.data)  # type: ignore[arg-type]  # a socket
        self._drop(pair)

    def _pass(self, pair: Pair, one: socket.socket, other: socket.socket) -> None:
        data = one.recv(1 << 20)
        self._passing.wait()
        if not data:
            raise OSError
        if one is pair[0]:
            self._asked(pair, data)
        elif self._lost(pair):
            raise OSError
        other.sendall(data)

    def _asked(self, pair: Pair, data: bytes) -> None:
        with self._lock:
            for cut in self._cuts:
                if cut.happened + len(cut.waiting) >= cut.times:
                    continue
                if cut.text in data:
                    cut.seen.add(pair)
                    if not cut.then:
                        cut.waiting.add(pair)
                elif cut.then and pair in cut.seen and cut.then in data:
                    cut.waiting.add(pair)

    def _lost(self, pair: Pair) -> bool:
        """Is this the server's answer that is to be lost? It has carried the request out."""
        with self._lock:
            for cut in self._cuts:
                if pair in cut.waiting:
                    cut.waiting.discard(pair)
                    cut.happened += 1
                    return True
        return False

    def _drop(self, pair: Pair) -> None:
        with self._lock, suppress(ValueError):
            self._pairs.remove(pair)
        for each in pair:
            with suppress(OSError):  # a reset, not an orderly end
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                each.close()
