"""How soon an idle system starts a job, and how many jobs a worker runs: `python benchmarks/latency.py`.

Servers from wheels, one prefork worker of two children with its own dispatcher, on this machine. Quote ratios and
medians: absolute times are the machine's.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg

import bridge
from bridge.database import Database
from bridge.embedded import Servers
from bridge.migrating import migrate

JOBS = '@__import__("bridge").job("noop")\ndef noop(context, params):\n    pass\n'
RUNS, MANY = 200, 3000
WAITS = """
SELECT extract(epoch FROM started_at - scheduled_at)::float8 FROM job WHERE status = 'completed' AND label = %s
"""


def main() -> None:
    """Measure, and print."""
    with Servers() as servers, tempfile.TemporaryDirectory() as folder:
        Path(folder, "noop_jobs.py").write_text(JOBS)
        sys.path.insert(0, folder)
        os.environ.update(
            BRIDGE_DATABASE_URL=servers.database_url,
            BRIDGE_BROKER_URL=servers.broker_url,
            BRIDGE_IMPORTS="noop_jobs",
            PYTHONPATH=folder,
        )
        migrate(Database(servers.database_url))
        command = [sys.executable, "-m", "celery", "-A", "bridge", "worker", "-c", "2", "-l", "error"]
        worker = subprocess.Popen([*command, "--without-mingle", "--without-gossip"], cwd=folder)
        try:
            with psycopg.connect(servers.database_url, autocommit=True) as conn:
                measure(conn)
        finally:
            worker.terminate()
            worker.wait()


def measure(conn: psycopg.Connection) -> None:
    """One warm-up, then latency job by job, then throughput."""
    bridge.submit("noop", label="warm-up")
    wait(conn, "warm-up", 1)
    for _ in range(RUNS):
        bridge.submit("noop", label="latency")
        wait(conn, "latency", 0)
    waits = sorted(row[0] for row in conn.execute(WAITS, ("latency",)))
    print(
        f"submit to start, idle system, {RUNS} jobs one by one: median {statistics.median(waits) * 1000:.1f} ms, "
        f"95 % below {waits[int(RUNS * 0.95)] * 1000:.1f} ms"
    )
    began = time.monotonic()
    bridge.submit_many("noop", [{}] * MANY, label="many")
    wait(conn, "many", MANY)
    print(f"{MANY} jobs submitted at once, two children: {MANY / (time.monotonic() - began):.0f} jobs/s")


def wait(conn: psycopg.Connection, label: str, at_least: int) -> None:
    """Until every job of a label is completed."""
    left = "SELECT count(*) FILTER (WHERE status <> 'completed'), count(*) FROM job WHERE label = %s"
    while (row := conn.execute(left, (label,)).fetchone()) and (row[0] or row[1] < at_least):
        time.sleep(0.002)


if __name__ == "__main__":
    main()
