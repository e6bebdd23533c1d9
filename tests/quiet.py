"""The Celery configuration of workers without events, which is Celery's default."""

worker_send_task_events = False
