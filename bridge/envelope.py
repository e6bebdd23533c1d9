"""A Redis message whose envelope does not decode is logged and skipped; it kills a plain Celery worker.

kombu reads the envelope, JSON around the message, before Celery sees anything, and lets its errors through to
the worker's main loop. Only something that pushes onto the list by hand can send such a thing.
"""

from __future__ import annotations

import logging
from queue import Empty
from typing import Any

from kombu import transport
from kombu.transport import redis
from kombu.transport.virtual import Message
from redis import exceptions

logger = logging.getLogger(__name__)


class Channel(redis.Channel):  # type: ignore[misc]  # untyped
    """kombu's channel; an item that is no JSON is dropped."""

    def _brpop_read(self, **options: Any) -> Any:
        self.connection.delivering = False
        try:
            return super()._brpop_read(**options)
        except Exception as error:
            self._decoding_failed(error)
            return True

    def _get(self, queue: str) -> Any:
        self.connection.delivering = False
        try:
            return super()._get(queue)
        except Exception as error:
            self._decoding_failed(error)
            raise Empty from None

    def _connparams(self, *args: Any, **kwargs: Any) -> Any:
        """As kombu's, but on a channel whose transport is gone a connection error, which Celery survives.

        kombu 5.7 drops the transport's client before it closes the channels; what these then restore, or a late
        acknowledgement, would end the worker with AttributeError.
        """
        if self.connection is None or self.connection.client is None:
            raise ConnectionResetError("the channel is closed")
        return super()._connparams(*args, **kwargs)

    def _decoding_failed(self, error: Exception) -> None:
        """Log it if decoding the popped item failed; whatever else failed is raised as it was."""
        if isinstance(error, exceptions.ResponseError):  # "UNBLOCKED", to those who waited when it became a replica
            raise ConnectionResetError(f"the broker refuses: {error}") from error
        if self.connection.delivering or isinstance(error, Empty | OSError):
            raise error
        if isinstance(error, (*self.connection.connection_errors, *self.connection.channel_errors)):
            raise error
        logger.error("an item on the broker is no message (%s); skipped", type(error).__name__)


class Transport(redis.Transport):  # type: ignore[misc]  # untyped
    """kombu's transport; an envelope that makes no message is dropped."""

    Channel = Channel
    delivering = False

    # A primary that became a replica, or whose memory is full: Celery connects anew until it is not refused.
    connection_errors = (*redis.Transport.connection_errors, exceptions.ReadOnlyError, exceptions.OutOfMemoryError)

    def _deliver(self, message: Any, queue: str) -> Any:
        try:
            _check(Message(message, channel=next(iter(self.channels), None)))
        except Exception as error:  # whatever a mapping of anything raises
            logger.error("an item on queue %s is no message (%s); skipped", queue, type(error).__name__)
            return None
        self.delivering = True
        return super()._deliver(message, queue)


def _check(message: Any) -> None:
    """What kombu and Celery read without looking, or ValueError."""
    where = message.delivery_info
    if not (isinstance(message.delivery_tag, str) and message.delivery_tag):
        raise ValueError("no delivery tag")
    if not (isinstance(where, dict) and isinstance(where.get("exchange"), str) and "routing_key" in where):
        raise ValueError("no delivery info")
    if not (isinstance(message.headers, dict) and isinstance(message.properties, dict)):
        raise ValueError("no headers")


def use() -> None:
    """Let this process's Redis connections skip what is no message. Called in workers only."""
    for alias in ("redis", "rediss"):
        transport.TRANSPORT_ALIASES[alias] = f"{__name__}:Transport"
        transport._transport_cache.pop(alias, None)
