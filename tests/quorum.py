"""The Celery configuration of workers whose queues are quorum queues, RabbitMQ's replicated kind."""

worker_send_task_events = True
task_default_queue_type = "quorum"
task_create_missing_queue_type = "quorum"  # every queue that is not in task_queues; the other is for `default` alone
