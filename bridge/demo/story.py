"""The order of events: start everything, submit the jobs, wait for them, check each of them, show what there is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click
import psycopg

import bridge
from bridge.database import Database
from bridge.demo import extras, orders, stage
from bridge.demo.expected import differences
from bridge.demo.orders import Connection, Jobs
from bridge.demo.report import Steps, ask, watch
from bridge.embedded import Servers
from bridge.migrating import migrate
from bridge.stopping import Signals, Stopped

POLL_SECONDS = 0.2
STALLED_SECONDS = 30.0
"""How long it may take until one more job is over, before the demo gives up."""

JOBS_OVER = "SELECT count(*) FROM job WHERE status IN ('completed', 'failed', 'cancelled', 'aborted')"
ALL_JOBS = "SELECT id, name FROM job"
SUMMARY = """
SELECT name, status, error ->> 'ex_type' AS error, count(*) AS jobs, sum(retry_num) AS retries
FROM job
GROUP BY 1, 2, 3
ORDER BY 1, 2, 3
"""
TIMELINE = """
SELECT to_char(created_at, 'HH24:MI:SS.MS') AS at, kind, payload, actor
FROM job_event
WHERE job_id = %(id)s
ORDER BY id
"""
INTRODUCTION = """
A shop takes orders. What is to be done about an order is a job: a row, written in the order's own transaction.
A Celery worker runs the jobs, and writes into their rows what became of them.
"""


class Trouble(Exception):
    """Something is not as it should be."""


def play(count: int, keep: str | None) -> int:
    """See `bridge.demo.run`."""
    began = time.monotonic()
    try:
        with Signals() as signals, stage.environment(), stage.invoices(keep) as folder:
            code = _on_stage(count, folder, signals)
    except Stopped as stopped:
        click.echo("Stopped: the servers, the worker and their folder are gone.", err=True)
        return 128 + stopped.number
    click.echo(f"\nThe invoices stay in {folder}")
    click.echo(f"The servers, the worker and their folder are gone, after {time.monotonic() - began:.1f} seconds.")
    return code


def _on_stage(count: int, folder: Path, signals: Signals) -> int:
    steps = Steps()
    click.echo(INTRODUCTION)
    steps.say("PostgreSQL and Valkey start, from wheels, in a temporary folder.")
    with Servers() as servers, stage.app(servers, folder):
        version = migrate(Database(servers.database_url))
        steps.say(f"The database is migrated to schema version {version}.")
        steps.say(f"A worker starts: {' '.join(stage.WORKER)}")
        with stage.worker(servers.folder / "worker") as worker, signals.heard():
            try:
                _shop(servers.database_url, worker, steps, count, folder)
            except Trouble as trouble:
                click.echo(f"\n{trouble}\n\nThe end of the worker's log:\n{worker.last_words}", err=True)
                return 1
    return 0


def _shop(database_url: str, worker: stage.Worker, steps: Steps, count: int, folder: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(orders.TABLES)
        jobs, never = take_orders(conn, steps, count)
        jobs |= add_extras(conn, steps)
        steps.say(f"The worker has {len(jobs)} jobs to run.")
        watch(until_over(conn, worker, len(jobs)), len(jobs))
        wrong = [*check_jobs(conn, jobs, never), *check_invoices(jobs, folder)]
        show(conn, steps, jobs)
    if wrong:
        raise Trouble("\n".join([f"Not as it should be, {len(wrong)} times:", *wrong[:20]]))
    steps.say(f"All {len(jobs)} rows and their histories are as they should be; no rolled-back order has a job.")


def take_orders(conn: Connection, steps: Steps, count: int) -> tuple[Jobs, Jobs]:
    """Take the orders; returns the jobs that there are, and those that were rolled back."""
    steps.say(f"The shop takes {count} orders, each in one transaction with its jobs.")
    jobs: Jobs = {}
    never: Jobs = {}
    refused = 0
    for order in orders.read(count):
        try:
            jobs |= orders.take(conn, order)
        except orders.OutOfStock as error:
            never |= error.jobs
            refused += 1
    steps.add(f"{count - refused} are committed, and their {len(jobs)} jobs with them")
    steps.add(f"{refused} are out of stock and rolled back, and their {len(never)} jobs with them")
    return jobs, never


def add_extras(conn: Connection, steps: Steps) -> Jobs:
    """Submit the jobs that are unlike the shop's daily ones."""
    first = next(orders.read(1))
    steps.say("Some other jobs:")
    return (
        extras.submit_catalogue(steps)
        | extras.insert_reminder(conn, steps, first)
        | extras.submit_and_cancel(steps, first)
        | extras.insert_bad_params(conn, steps, first)
        | extras.insert_unknown(conn, steps)
    )


def until_over(conn: Connection, worker: stage.Worker, total: int) -> Iterator[int]:
    """How many jobs are over, every now and then, until all are.

    Raises:
        Trouble: the worker ended, or nothing happens any more.
    """
    done, changed = -1, time.monotonic()
    while done < total:
        before, (done,) = done, conn.execute(JOBS_OVER).fetchone() or (0,)
        yield done
        if done != before:
            changed = time.monotonic()
        if worker.ended:
            raise Trouble("The worker has ended.")
        if time.monotonic() - changed > STALLED_SECONDS:
            raise Trouble(f"{total - done} jobs are not over, and nothing has happened for {STALLED_SECONDS:.0f} s.")
        if done < total:
            time.sleep(POLL_SECONDS)


def check_jobs(conn: Connection, jobs: Jobs, never: Jobs) -> Iterator[str]:
    """What is not as it should be in the ledger."""
    for job_id, expected in jobs.items():
        yield from differences(job_id, expected)
    for job_id, name in conn.execute(ALL_JOBS):
        if job_id in never:
            yield f"{name} {job_id}: its order was rolled back, but the job is there"
        elif job_id not in jobs:
            yield f"{name} {job_id}: nobody submitted it"


def check_invoices(jobs: Jobs, folder: Path) -> Iterator[str]:
    """Which invoices are missing: every completed job's result names its file."""
    for job_id, expected in jobs.items():
        job = bridge.get_job(job_id) if expected.name == "shop.invoice" else None
        if job is not None and job.result and not (folder / job.result["file"]).is_file():
            yield f"{expected.name} {job_id}: {job.result['file']} is missing"


def show(conn: Connection, steps: Steps, jobs: Jobs) -> None:
    """What the ledger says: all jobs at a glance, and the history of one of them."""
    click.echo()
    steps.say("What became of the jobs; the rows are in a table like any other:")
    ask(conn, SUMMARY)
    retried = [job_id for job_id, expected in jobs.items() if expected.retry_num and expected.status == "completed"]
    if retried:
        steps.say("How one of them came to its end: the bank was busy, and was asked again.")
        ask(conn, TIMELINE, {"id": str(retried[-1])})
