"""Does a worker grow? Resident memory of its processes after a tenth, half and all of 50,000 jobs, and its connections.

.venv/bin/python -m benchmarks.memory [--jobs 50000]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import psycopg

from bridge.database import Database
from bridge.embedded import Servers
from bridge.migrating import migrate

WORKER = ["-m", "celery", "-A", "bridge", "worker", "-c", "2", "-l", "warning", "--without-mingle", "--without-gossip"]
SUBMIT = "INSERT INTO job (name, queue, max_retries) SELECT %s, 'test', 0 FROM generate_series(1, %s)"
ACTIVE = "SELECT count(*) FROM job WHERE status IN ('new', 'scheduled', 'running', 'retry')"
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'bridge%'"


def resident(pid: int) -> float:
    """MB of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def run(conn: psycopg.Connection, jobs: int) -> None:
    """So many jobs, one in ten of which fails with a traceback."""
    conn.execute(SUBMIT, ("quick", jobs - jobs // 10))
    conn.execute(SUBMIT, ("raises", jobs // 10))
    while conn.execute(ACTIVE).fetchone() != (0,):
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=50_000)
    options = parser.parse_args()
    with Servers() as servers:
        migrate(Database(servers.database_url))
        environment = {
            **os.environ,
            "BRIDGE_DATABASE_URL": servers.database_url,
            "BRIDGE_BROKER_URL": servers.broker_url,
            "BRIDGE_IMPORTS": "benchmarks.jobs",
            "CELERY_CONFIG_MODULE": "tests.configuration",
        }
        with (servers.folder / "worker.log").open("wb") as log:
            worker = subprocess.Popen([sys.executable, *WORKER], env=environment, stdout=log, stderr=log)
        with psycopg.connect(servers.database_url, autocommit=True) as conn:
            done = 0
            for upto in (options.jobs // 10, options.jobs // 2, options.jobs):
                began = time.monotonic()
                run(conn, upto - done)
                rate, done = (upto - done) / (time.monotonic() - began), upto
                children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
                sizes = [resident(int(pid)) for pid in (worker.pid, *children)]
                (sessions,) = conn.execute(SESSIONS).fetchone() or (0,)
                shown = " ".join(f"{size:.1f}" for size in sizes)
                print(
                    f"{upto} jobs: main and children {shown} MB, {sessions} connections, {rate:.0f} jobs/s", flush=True
                )
        worker.terminate()
        worker.wait()


if __name__ == "__main__":
    main()
