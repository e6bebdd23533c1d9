"""What a clone's worker adds to the defaults. Correctness never depends on it, and the wheel has none."""

imports = ("bridge.demo.shop",)
worker_send_task_events = True
