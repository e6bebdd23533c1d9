"""What only RabbitMQ has. Collected if BRIDGE_TEST_BROKER_URL names one."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from kombu import Queue

from tests.support import Side, Stack, broker, depth, until


@pytest.fixture
def tenant(broker_url: str) -> Iterator[str]:
    """A tenant, and thus queues that nobody has declared yet: a queue's type is fixed by whoever does so first."""
    name = f"t{uuid4().hex[:8]}"
    yield name
    with broker(broker_url) as connection:
        for queue in ("default", "test"):
            connection.default_channel.queue_delete(f"{name}.{queue}")


def test_c13_quorum_queues_carry_jobs(stack: Stack, side: Side, tenant: str) -> None:
    """Declared by a dispatcher and by workers without -Q, of which one is killed with its reserved messages."""
    stack.environment |= {
        "CELERY_CONFIG_MODULE": "tests.quorum",
        "BRIDGE_TENANT": tenant,
        "BRIDGE_LEASE": "3s",
        "BRIDGE_LOST_AFTER": "3s",
    }
    dispatcher = stack.dispatcher()
    ids = [side.insert("naps", tenant=tenant, params={"seconds": 0.2}, max_retries=0) for _ in range(40)]
    until(lambda: depth(stack.broker_url, f"{tenant}.test") == 40, what=lambda: dispatcher.tail)
    with broker(stack.broker_url) as connection:
        Queue(f"{tenant}.test", queue_arguments={"x-queue-type": "quorum"})(connection).queue_declare()
    command = ["-m", "celery", "-A", "bridge", "worker", "-c", "2", "-l", "info", "--without-mingle"]
    first = stack.start([*command, "-n", f"first-{tenant}@test"], BRIDGE_DISPATCHER="standalone")
    until(lambda: side.counts().get("completed", 0) >= 5, what=lambda: first.tail)
    first.kill()
    second = stack.start([*command, "-n", f"second-{tenant}@test"], BRIDGE_DISPATCHER="standalone")
    until(lambda: set(side.counts()) <= {"completed", "aborted"}, seconds=60, what=lambda: second.tail)
    assert side.counts().get("aborted", 0) <= 2, "one for each child of the killed worker"
    for job_id in ids:  # a killed child may have claimed its row, and not begun
        starts = len(side.received(job_id))
        assert starts == 1 or (starts == 0 and side.status(job_id) == "aborted"), side.events(job_id)
    assert second.end() == 0
    assert depth(stack.broker_url, f"{tenant}.test") == 0


def test_c13_a_quorum_queue_beside_a_classic_one_of_its_name_is_named(stack: Stack, side: Side, tenant: str) -> None:
    """RabbitMQ refuses to declare what is there as another type: rows wait, and the log says why."""
    with broker(stack.broker_url) as connection:
        Queue(f"{tenant}.test")(connection).queue_declare()
    stack.environment["BRIDGE_TENANT"] = tenant
    dispatcher = stack.dispatcher(CELERY_CONFIG_MODULE="tests.quorum")
    job_id = side.insert("plain", tenant=tenant)
    dispatcher.says("x-queue-type")
    assert side.status(job_id) == "new"
    other = stack.dispatcher()
    until(lambda: side.status(job_id) == "scheduled", what=lambda: other.tail)
    assert dispatcher.popen.poll() is None
