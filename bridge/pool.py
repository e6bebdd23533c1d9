"""What a Celery pool does to a run from outside: time limits, termination, the death of its process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from billiard.common import terminate_handler_fired
from billiard.pool import soft_timeout_sighandler
from celery.exceptions import SoftTimeLimitExceeded

from bridge.outcome import TimeLimit

_SOFT_LIMIT = {signal.SIGUSR1}
_LARGEST_PID = 2**22
"""Linux's limit. The gevent pool calls a greenlet's address its pid."""


def ends_run(error: BaseException) -> bool:
    """Is this the pool ending the run that it is raised in? The main process then closes the run, not its wreck."""
    if isinstance(error, Exception):
        return False
    return terminate_handler_fired() or isinstance(error, _of_gevent("GreenletExit"))


@contextmanager
def limits_in_our_words() -> Iterator[None]:
    """Around a handler: a time limit that is raised in it is a TimeLimit; the soft one's signal gets through."""
    try:
        with _soft_limit_acts():
            yield
    except SoftTimeLimitExceeded as error:
        raise TimeLimit("soft time limit exceeded") from error
    except _of_gevent("Timeout") as error:  # Celery's hard limit there, or the handler's own
        raise TimeLimit(f"time limit of {error.seconds:g} s exceeded") from error


@contextmanager
def soft_limit_waits() -> Iterator[None]:
    """Keep the soft limit, a signal that raises wherever it arrives, out of the claim and the outcome's write.

    What arrives after the handler is dropped: it would be raised in the next job's.
    """
    if signal.getsignal(signal.SIGUSR1) is not soft_timeout_sighandler:  # not a child of the prefork pool
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _SOFT_LIMIT)
    try:
        yield
    finally:
        while signal.SIGUSR1 in signal.sigpending():
            signal.sigwait(_SOFT_LIMIT)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SOFT_LIMIT)


@contextmanager
def _soft_limit_acts() -> Iterator[None]:
    """Inside a handler that a delivery called, let the soft limit through; both calls raise what is pending."""
    if signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        yield
        return
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SOFT_LIMIT)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SOFT_LIMIT)


def alive(pid: int) -> bool:
    """Does a process run under that pid? A zombie does not; a greenlet does until Celery says that it ended."""
    if pid > _LARGEST_PID:
        return True
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        if os.path.isdir("/proc/self"):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _of_gevent(name: str) -> Any:
    """A class of gevent's; nothing is one where gevent is not imported."""
    return getattr(sys.modules.get("gevent"), name, ())
