"""The same bodies as plain Celery tasks: late acknowledgement, all else Celery's defaults."""

from __future__ import annotations

import os
from uuid import UUID, uuid4

from celery import Celery

from tests.chaos.jobs import body

app = Celery("plain", broker=os.environ.get("CHAOS_BROKER"), set_as_current=False)
app.conf.task_acks_late = True


@app.task(name="steady", bind=True)
def steady(self, seconds: float) -> None:  # type: ignore[no-untyped-def]  # a Celery task
    body(UUID(self.request.id), uuid4(), seconds)
