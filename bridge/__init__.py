"""Keep Celery, and make a PostgreSQL row the truth.

Importing it reads and connects to nothing.
"""

from bridge.api import (
    asubmit,
    cancel,
    finish,
    get_events,
    get_job,
    heartbeat,
    install,
    invoke,
    job,
    submit,
    submit_many,
)
from bridge.errors import (
    BridgeError,
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailable,
    Interrupted,
    InvalidJob,
    InvalidParams,
    KeyTaken,
    Retry,
    UnknownJob,
)
from bridge.lifecycle import user_status as _user_status
from bridge.records import Completion, Context, Job
from bridge.task import JobTask

__all__ = [
    "BridgeError",
    "Completion",
    "ConfigurationError",
    "Context",
    "DatabaseError",
    "DatabaseUnavailable",
    "Interrupted",
    "InvalidJob",
    "InvalidParams",
    "Job",
    "JobTask",
    "KeyTaken",
    "Retry",
    "UnknownJob",
    "asubmit",
    "cancel",
    "finish",
    "get_events",
    "get_job",
    "heartbeat",
    "install",
    "invoke",
    "job",
    "submit",
    "submit_many",
    "user_status",
]


def user_status(job: Job | str) -> str:
    """What a user sees of a job or a status: pending, running, completed or failed.

    Raises:
        ValueError: it is no status of a job.

    Example:
        >>> user_status("aborted")
        'failed'
    """
    return _user_status(job.status if isinstance(job, Job) else job)
