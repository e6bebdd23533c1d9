"""`make chaos`: one fault after another on a real cluster, then a count of what was lost, doubled, or told wrongly.

    python -m tests.chaos [--minutes 15] [--rate 30] [--plain] [--only TEXT]

Exit code 0 only if nothing was.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from uuid import UUID, uuid4

import psycopg

import bridge
from bridge.errors import BridgeError
from tests.chaos.cluster import Cluster
from tests.chaos.faults import FAULTS, Fault, queued
from tests.chaos.verdict import Told, is_double, is_illegal, is_lost, runs

NOMINAL = 5.0  # minutes that the run takes with the faults' own durations
WINDOW = 3.0  # seconds over which a rate is measured
PATIENCE = 60.0  # seconds until the rate must be back, and until the last job must have ended


@dataclass
class Stage:
    """A fault, and the jobs that were submitted in its time."""

    name: str
    jobs: list[UUID] = field(default_factory=list)
    recovered: float | None = None

    @property
    def back(self) -> str:
        """Seconds until the rate was back to 95 % of what it was before."""
        return "-" if self.recovered is None else f"{self.recovered:.1f}"


@dataclass
class Feeder:
    """Submits at a steady rate; what is not accepted is not a job."""

    submit: Callable[[], UUID]
    rate: float
    stage: Stage = field(default_factory=lambda: Stage(""))
    refused: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            stage = self.stage
            try:
                stage.jobs.append(self.submit())
            except Exception:
                self.refused += 1
            due = max(due + 1 / self.rate, time.monotonic() - 2)  # a pause is not made up for in one burst
            self._stop.wait(max(0.0, due - time.monotonic()))

    def burst(self, jobs: int) -> None:
        """That many at once."""
        for _ in range(jobs):
            self.stage.jobs.append(self.submit())

    def stop(self) -> None:
        self._stop.set()


def submit_ours() -> UUID:
    from tests.chaos.jobs import KINDS

    job_id = bridge.submit(random.choice(KINDS), {"seconds": random.choice((0, 0.02, 0.1, 0.3))})
    if random.random() < 0.03:
        with suppress(BridgeError):  # of no importance: the job is submitted
            bridge.cancel(job_id, running=True)
    return job_id


def submit_plain() -> UUID:
    from tests.chaos.plain import steady

    job_id = uuid4()
    steady.apply_async((random.choice((0, 0.02, 0.1, 0.3)),), task_id=str(job_id), retry=False)
    return job_id


def ended_per_second(witness: psycopg.Connection) -> float:
    """Bodies that ended in the last few seconds, per second."""
    row = witness.execute(
        "SELECT count(*) FROM body WHERE what = 'end' AND at > clock_timestamp() - %s * interval '1 second'", (WINDOW,)
    ).fetchone()
    assert row is not None
    return float(row[0]) / WINDOW


def attack(cluster: Cluster, stage: Stage, fault: Fault, lasting: float, usual: float) -> float:
    """Let the fault happen, then wait until the rate is what it was; returns the rate."""
    fault(cluster, lasting)
    healed = time.monotonic()
    with psycopg.connect(cluster.witness.database_url, autocommit=True) as witness:
        while time.monotonic() - healed < PATIENCE:
            rate = ended_per_second(witness)
            if rate >= 0.95 * usual:
                stage.recovered = time.monotonic() - healed
                wait_until(lambda: queued(cluster) < 5, PATIENCE / 2)  # what waits is not the next fault's
                return rate
            time.sleep(0.25)
    return 0.0


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until it holds, that long at most."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.25)


def play(cluster: Cluster, stages: list[Stage], options: argparse.Namespace) -> None:
    """All the faults, while jobs keep coming; then wait for the last."""
    cluster.ready()
    feeder = Feeder(submit_plain if cluster.plain else submit_ours, options.rate)
    cluster.burst = feeder.burst
    thread = threading.Thread(target=feeder.run, daemon=True)
    usual, scale = 0.0, options.minutes / NOMINAL
    for name, (fault, lasting, also_plain) in FAULTS.items():
        if (cluster.plain and not also_plain) or (usual and options.only not in name):
            continue
        stages.append(stage := Stage(name))
        feeder.stage = stage
        if not thread.is_alive():
            thread.start()
        rate = attack(cluster, stage, fault, max(4.0, lasting * min(1.0, scale)), usual)
        usual = usual or rate
        print(f"  {name}: {len(stage.jobs)} jobs", file=sys.stderr, flush=True)
    feeder.stop()
    thread.join()
    wait_until(lambda: over(cluster, stages), PATIENCE)


def over(cluster: Cluster, stages: list[Stage]) -> bool:
    """Has every job ended?"""
    if cluster.plain:
        with psycopg.connect(cluster.witness.database_url) as conn:
            ended = {row[0] for row in conn.execute("SELECT job_id FROM body WHERE what = 'end'").fetchall()}
        return all(each in ended for stage in stages for each in stage.jobs)
    with psycopg.connect(cluster.servers.database_url) as conn:
        return not conn.execute(
            "SELECT 1 FROM job WHERE status IN ('new', 'scheduled', 'running', 'retry') LIMIT 1"
        ).fetchone()


def told(cluster: Cluster) -> dict[UUID, list[Told]]:
    with psycopg.connect(cluster.witness.database_url) as conn:
        return runs(conn.execute("SELECT job_id, run, what, at FROM body ORDER BY at").fetchall())


@dataclass
class Row:
    """What the ledger says of a job."""

    status: str
    retry_num: int
    created_at: datetime
    events: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    effects: int = 0
    name: str = ""

    @property
    def has_its_effect(self) -> bool:
        """An effect that commits together with its job's end is there exactly if the job is completed."""
        return self.name != "books" or (self.effects == 1) == (self.status == "completed")


def ledger(cluster: Cluster) -> dict[UUID, Row]:
    if cluster.plain:
        return {}
    with psycopg.connect(cluster.servers.database_url) as conn:
        found = {
            each[0]: Row(each[1], each[2], each[3], name=each[4])
            for each in conn.execute("SELECT id, status, retry_num, created_at, name FROM job").fetchall()
        }
        for job_id, kind, payload in conn.execute("SELECT job_id, kind, payload FROM job_event ORDER BY id").fetchall():
            found[job_id].events.append((kind, payload))
        for (job_id,) in conn.execute("SELECT job_id FROM effect").fetchall():
            found[job_id].effects += 1
    return found


def report_ours(stages: list[Stage], rows: dict[UUID, Row], bodies: dict[UUID, list[Told]]) -> int:
    """One line a fault, the jobs that are at fault, the sum; 1 if there are any."""
    print(
        f"{'fault':40} {'jobs':>6} {'completed':>9} {'failed':>7} {'cancelled':>9} {'aborted':>7} {'retried':>7}",
        end="",
    )
    print(f" {'lost':>6} {'double':>6} {'illegal':>7} {'s to 95 %':>9}")
    totals: Counter[str] = Counter()
    for stage in stages:
        bad: dict[str, list[UUID]] = {"lost": [], "double": [], "illegal": []}
        counts: Counter[str] = Counter()
        for each in stage.jobs:
            row, body = rows.get(each), bodies.get(each, [])
            counts[row.status if row else "none"] += 1
            counts["retried"] += row is not None and any(kind == "retry" for kind, _ in row.events)
            if is_lost(row.status if row else None, body):
                bad["lost"].append(each)
            if is_double(body) or (row and row.effects > 1):
                bad["double"].append(each)
            if row and (is_illegal(row.status, row.events) or not row.has_its_effect):
                bad["illegal"].append(each)
        print(f"{stage.name:40} {len(stage.jobs):6} {counts['completed']:9} {counts['failed']:7}", end="")
        print(f" {counts['cancelled']:9} {counts['aborted']:7} {counts['retried']:7}", end="")
        print(f" {len(bad['lost']):6} {len(bad['double']):6} {len(bad['illegal']):7} {stage.back:>9}")
        for what, which in bad.items():
            totals[what] += len(which)
            for each in which[:5]:
                print(f"    {what}: {each} {rows.get(each)} {bodies.get(each)}")
        totals["jobs"] += len(stage.jobs)
    print("chaos: " + " ".join(f"{what}={totals[what]}" for what in ("jobs", "lost", "double", "illegal")))
    return int(any(totals[what] for what in ("lost", "double", "illegal")))


def report_plain(stages: list[Stage], bodies: dict[UUID, list[Told]]) -> int:
    """As above; there is no row to ask, only what the bodies told."""
    print(f"{'fault':40} {'jobs':>6} {'ended':>9} {'lost':>6} {'double':>6} {'s to 95 %':>9}")
    totals: Counter[str] = Counter()
    for stage in stages:
        of_stage = [bodies.get(each, []) for each in stage.jobs]
        ended = sum(any(one.ended for one in body) for body in of_stage)
        double = sum(is_double(body) or sum(one.ended for one in body) > 1 for body in of_stage)
        lost = len(of_stage) - ended
        print(f"{stage.name:40} {len(of_stage):6} {ended:9} {lost:6} {double:6} {stage.back:>9}")
        totals.update(jobs=len(of_stage), lost=lost, double=double)
    print("plain: " + " ".join(f"{what}={totals[what]}" for what in ("jobs", "lost", "double")))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15, help="shortens the faults to fit, about")
    parser.add_argument("--rate", type=float, default=30, help="jobs submitted per second")
    parser.add_argument(
        "--plain", action="store_true", help="plain Celery instead, where it has the part that is attacked"
    )
    parser.add_argument("--only", default="", help="only the faults whose name holds this text")
    parser.add_argument("--logs", help="folder that keeps the logs")
    options = parser.parse_args()
    began = time.monotonic()
    folder = Path(options.logs or tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(exist_ok=True)
    stages: list[Stage] = []
    with Cluster(folder, plain=options.plain) as cluster:
        os.environ.update(
            BRIDGE_DATABASE_URL=cluster.servers.database_url,
            BRIDGE_IMPORTS="tests.chaos.jobs",
            CELERY_CONFIG_MODULE="tests.configuration",
        )
        if options.plain:
            from tests.chaos.plain import app

            app.conf.broker_url = cluster.servers.broker_url
        play(cluster, stages, options)
        bodies, rows = told(cluster), ledger(cluster)
    print(f"logs: {folder}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return report_plain(stages, bodies) if options.plain else report_ours(stages, rows, bodies)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BridgeError as error:
        sys.exit(str(error))
