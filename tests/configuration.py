"""The Celery configuration of the tests' workers: Celery's events are on, and nothing else is said."""

worker_send_task_events = True
