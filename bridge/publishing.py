"""Tickets onto the broker in batches, the depth of a queue, and what Celery's monitors are told."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from celery import Celery

from bridge.encoding import safe_text
from bridge.errors import PublishError
from bridge.records import TICKET_HEADER, Handover

logger = logging.getLogger(__name__)

PUBLISH_SECONDS = 10.0
"""One deadline for a whole batch; what is published of it by then is sorted out by the claim."""

_SOCKET_SECONDS = 5.0
_BATCH = 100


def queue_name(tenant: str, queue: str) -> str:
    """Celery's name of a row's queue: the queue itself for tenant default, else tenant.queue.

    Example:
        >>> queue_name("default", "mail"), queue_name("acme", "mail")
        ('mail', 'acme.mail')
    """
    return queue if tenant == "default" else f"{tenant}.{queue}"


@dataclass(slots=True)
class CeleryPublisher:
    """The broker of one app, for one thread: a connection of its own that is dropped after any error."""

    app: Celery
    tenant: str
    announces: bool = True
    _connection: Any = None
    _producer: Any = None  # celery-types 0.26 does not know Producer.batch
    _declared: set[str] = field(default_factory=set)

    def publish(self, rows: Sequence[Handover]) -> None:
        """Put the tickets onto their queue.

        Raises:
            PublishError: the broker did not take all of them, or not in time; some may be there.
        """
        deadline = time.monotonic() + PUBLISH_SECONDS
        with self._errors():
            producer = self._ready()
            for name in {row.queue for row in rows}:
                self._declare(producer, queue_name(self.tenant, name))
            with producer.batch(max_size=_BATCH):
                for row in rows:
                    self._send(producer, row)
                    if time.monotonic() > deadline:
                        raise PublishError(f"the broker took longer than {PUBLISH_SECONDS:g} s for a batch")

    def depth(self, queue: str) -> int:
        """The messages that wait in a queue; 0 if there is no such queue.

        Raises:
            PublishError: the broker does not say.
        """
        with self._errors():
            self._ready()
            # A channel of its own: RabbitMQ closes the channel that asks for a queue which is not there.
            channel = self._connection.channel()
            try:
                found = channel.queue_declare(queue_name(self.tenant, queue), passive=True)
                return int(found.message_count)
            except self._connection.channel_errors as error:
                if str(getattr(error, "reply_code", "") or getattr(error, "code", "")) == "404":
                    return 0
                raise
            finally:
                channel.close()

    def announce_revoked(self, job_ids: Sequence[UUID]) -> None:
        """Send task-revoked for jobs that no worker's own event ends. Best effort: monitors are not the truth."""
        if not self.announces or not job_ids:
            return
        try:
            with self._errors():
                self._ready()
                with self.app.events.Dispatcher(self._connection, hostname="bridge-dispatcher") as events:
                    for job_id in job_ids:
                        events.send("task-revoked", uuid=str(job_id), terminated=False, signum=None, expired=False)
        except PublishError as error:
            logger.debug("monitors were not told of %d ended jobs (%s)", len(job_ids), error)

    def close(self) -> None:
        """Drop the connection; the next use opens a new one."""
        connection, self._connection, self._producer = self._connection, None, None
        self._declared.clear()
        if connection is not None:
            try:
                connection.release()
            except Exception as error:  # a dead connection may fail to close in any way
                logger.debug("broker connection: %s while closing", type(error).__name__)

    def _ready(self) -> Any:
        if self._producer is None:
            options = {
                "socket_timeout": _SOCKET_SECONDS,
                "socket_connect_timeout": _SOCKET_SECONDS,
                "read_timeout": _SOCKET_SECONDS,
                "write_timeout": _SOCKET_SECONDS,
                "confirm_publish": True,
                **self.app.conf.broker_transport_options,
            }
            self._connection = self.app.connection_for_write(transport_options=options, connect_timeout=_SOCKET_SECONDS)
            self._connection.connect()
            self._producer = self.app.amqp.Producer(self._connection, auto_declare=False)
        return self._producer

    def _declare(self, producer: Any, name: str) -> None:
        if name not in self._declared:
            self.app.amqp.queues[name](producer.channel).declare()
            self._declared.add(name)

    def _send(self, producer: Any, row: Handover) -> None:
        amqp: Any = self.app.amqp
        ticket = list(row.ticket.args)
        message = amqp.as_task_v2(
            ticket[0],
            row.name,
            args=ticket,
            argsrepr=repr(ticket),
            kwargsrepr="{}",
            retries=row.retry_num,
            ignore_result=True,
            origin="bridge",
        )
        queue = queue_name(self.tenant, row.queue)
        amqp.send_task_message(
            producer,
            row.name,
            message,
            queue=queue,
            declare=[],
            retry=False,
            serializer="json",
            timeout=_SOCKET_SECONDS,
            headers={TICKET_HEADER: 1},
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Any error drops the connection; what it says of itself is bounded, and holds no address."""
        try:
            yield
        except PublishError:
            self.close()
            raise
        except Exception as error:
            connection = self._connection
            lost: tuple[type[BaseException], ...] = (OSError, *(connection.connection_errors if connection else ()))
            refused = connection is not None and connection.connected and not isinstance(error, lost)
            self.close()
            said = safe_text(error, limit=200).splitlines() or [""]
            raise PublishError(f"{type(error).__name__}: {said[0]}", refused=refused) from error
