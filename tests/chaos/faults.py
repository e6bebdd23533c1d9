"""The faults, one after another. Each gets the cluster and for how many seconds to go on."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import psycopg
from celery import Celery

from tests.chaos.cluster import Cluster
from tests.support import send

Fault = Callable[[Cluster, float], None]


def _every(seconds: float, lasting: float) -> Iterator[int]:
    end, turn = time.monotonic() + lasting, 0
    while time.monotonic() < end:
        yield turn
        turn += 1
        time.sleep(max(0.0, min(seconds, end - time.monotonic())))


def queued(cluster: Cluster) -> int:
    """Messages that wait on the broker."""
    with Celery("look", broker=cluster.servers.broker_url, set_as_current=False).connection_for_read() as connection:
        client = connection.channel().client
        return sum(client.llen(name) for name in ("default", "celery"))


def none(cluster: Cluster, lasting: float) -> None:
    time.sleep(lasting)


def children(cluster: Cluster, lasting: float) -> None:
    for _ in _every(1, lasting):
        pids = [pid for slot in cluster.workers for pid in slot.children()]
        if pids:
            with suppress(ProcessLookupError):
                os.kill(random.choice(pids), signal.SIGKILL)


def workers(cluster: Cluster, lasting: float) -> None:
    for turn in _every(lasting / 3, lasting):
        cluster.workers[turn % 3].kill()


def dispatchers(cluster: Cluster, lasting: float) -> None:
    for _ in _every(lasting / 3, lasting):
        for slot in cluster.dispatchers:
            slot.kill()


def broker_wiped(cluster: Cluster, lasting: float) -> None:
    """With a queue in it: a burst of jobs comes right before."""
    for _ in _every(lasting / 2, lasting):
        cluster.burst(100)
        valkey = cluster.servers.valkey
        assert valkey is not None
        valkey.kill()
        valkey.wait()
        time.sleep(0.5)
        cluster.servers.start_valkey()


def postgres_restarted(cluster: Cluster, lasting: float) -> None:
    for _ in _every(lasting / 2, lasting):
        postgres = cluster.servers.postgres
        assert postgres is not None
        postgres.send_signal(signal.SIGQUIT)  # pg_ctl restart -m immediate
        postgres.wait()
        cluster.servers.start_postgres()


def sessions_killed(cluster: Cluster, lasting: float) -> None:
    for _ in _every(2, lasting):
        with suppress(psycopg.Error), psycopg.connect(cluster.servers.database_url, autocommit=True) as conn:
            conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )


def database_silent(cluster: Cluster, lasting: float) -> None:
    """Between the workers and the database."""
    cluster.database.silent()
    time.sleep(lasting)
    cluster.database.heal()


def broker_silent(cluster: Cluster, lasting: float) -> None:
    """Between the dispatchers and the broker; of plain Celery, which has none, the workers and the broker."""
    cluster.broker.silent()
    time.sleep(lasting)
    cluster.broker.heal()


def workers_stopped(cluster: Cluster, lasting: float) -> None:
    for turn in _every(lasting / 4, lasting):
        cluster.workers[turn % 3].kill((signal.SIGTERM, signal.SIGQUIT)[turn % 2])


def delivered_twice(cluster: Cluster, lasting: float) -> None:
    """Every message that is handed over is put onto the queue once more."""
    if cluster.plain:
        _doubled_plain(cluster, lasting)
        return
    seen: set[tuple[object, object]] = set()
    with psycopg.connect(cluster.servers.database_url, autocommit=True) as conn:
        for _ in _every(0.05, lasting):
            for job_id, at, name in conn.execute(
                "SELECT id, scheduled_at, name FROM job WHERE status IN ('scheduled', 'running')"
            ).fetchall():
                if (job_id, at) not in seen:
                    seen.add((job_id, at))
                    args = [str(job_id), at.isoformat()]
                    send(cluster.servers.broker_url, name, args, queue="default", headers={"bridge_ticket": True})


def _doubled_plain(cluster: Cluster, lasting: float) -> None:
    app = Celery("twice", broker=cluster.servers.broker_url, set_as_current=False)
    with app.connection_for_read() as connection:
        client = connection.channel().client
        seen: set[bytes] = set()
        for _ in _every(0.02, lasting):
            for message in client.lrange("celery", 0, -1):
                if message not in seen:
                    seen.add(message)
                    client.lpush("celery", message)


FAULTS: dict[str, tuple[Fault, float, bool]] = {
    "no fault": (none, 10, True),
    "a child killed every second": (children, 20, True),
    "a whole worker killed, three times": (workers, 20, True),
    "the dispatchers killed, three times": (dispatchers, 15, False),
    "the broker killed and wiped, twice": (broker_wiped, 15, True),
    "PostgreSQL restarted at once, twice": (postgres_restarted, 15, False),
    "all sessions killed every 2 s": (sessions_killed, 20, False),
    "silence to the database": (database_silent, 10, False),
    "silence to the broker": (broker_silent, 10, True),
    "workers stopped, warm and cold in turn": (workers_stopped, 20, True),
    "every message delivered twice": (delivered_twice, 15, True),
}
"""What is done, for how many seconds, and whether plain Celery has the part that it is done to."""
