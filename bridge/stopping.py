"""To be stopped in order: what a signal does to a command that has started servers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any


class Stopped(KeyboardInterrupt):
    """The command was asked to stop, by Ctrl-C or a signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@dataclass(slots=True)
class Signals:
    """SIGINT, SIGTERM and SIGHUP: noted whenever they come, raised as Stopped only inside `heard()`.

    So nothing is interrupted while it is being started or stopped, and left behind half done. A signal that
    comes after the last `heard()` changes nothing: the command is over, and tidies up.
    """

    noted: int | None = None
    listening: bool = False
    before: dict[signal.Signals, Any] = field(default_factory=dict)

    def __enter__(self) -> Signals:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if each is signal.SIGHUP and signal.getsignal(each) is signal.SIG_IGN:
                continue  # under nohup
            self.before[each] = signal.signal(each, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self.before.items():
            signal.signal(each, handler)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside the block, a signal raises Stopped, also one that came before."""
        self.listening = True
        try:
            self._raise()
            yield
        finally:
            self.listening = False

    def _note(self, number: int, _: FrameType | None) -> None:
        first, self.noted = self.noted is None, self.noted or number
        if self.listening and first:
            self._raise()

    def _raise(self) -> None:
        if self.noted is not None:
            raise Stopped(self.noted)
