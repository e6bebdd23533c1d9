"""Every metric, named once. Labels are names and queues, never ids or text of a job."""

from __future__ import annotations

from prometheus_client import Histogram

from bridge.records import Job

_WAIT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
_RUN = (0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600)

QUEUE_WAIT = Histogram("bridge_jobs_queue_wait_seconds", "From due to started", ("name", "queue"), buckets=_WAIT)
EXECUTION = Histogram(
    "bridge_jobs_execution_seconds", "From started to the handler's end", ("name", "queue"), buckets=_RUN
)
TOTAL = Histogram(
    "bridge_jobs_total_seconds",
    "From submitted to the end of the job",
    ("name", "queue", "outcome"),
    buckets=_RUN,
)
TASKS_TIMING = Histogram("tasks_timing_seconds", "Execution time by name (legacy)", ("name",), buckets=_RUN)


def started(job: Job) -> None:
    """A run of the job began."""
    if job.started_at is not None:
        wait = (job.started_at - max(job.scheduled_at, job.created_at)).total_seconds()
        QUEUE_WAIT.labels(job.name, job.queue).observe(max(0.0, wait))


def executed(job: Job, seconds: float) -> None:
    """Its handler ended, however."""
    EXECUTION.labels(job.name, job.queue).observe(seconds)
    TASKS_TIMING.labels(job.name).observe(seconds)


def ended(job: Job, seconds: float, outcome: str) -> None:
    """The job itself ended; the write is committed.

    Args:
        seconds: how long the last run took, from its claim.
    """
    if job.started_at is not None:
        waited = (job.started_at - job.created_at).total_seconds()
        TOTAL.labels(job.name, job.queue, outcome).observe(max(0.0, waited) + seconds)
