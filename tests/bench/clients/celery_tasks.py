"""Have Celery do tasks that do nothing, over any broker.

    python -m tests.bench.clients.celery_tasks BROKER_URL TASKS

Prints {"per_s", "sent_per_s"}: tasks from the first send until the last is done, and
from the first send until the last is sent. Sender and worker share this process.
"""

from __future__ import annotations

import json
import sys
import time
from threading import Event

from celery import Celery, signals
from celery.contrib.testing.worker import start_worker

import txmq.kombu  # noqa: F401  # URLs that begin with txmq://


def measure(url: str, tasks: int) -> dict[str, float]:
    """Send the tasks, and wait until they are done."""
    app = Celery("bench", broker=url)
    app.conf.update(task_ignore_result=True, task_acks_late=True)
    over, done = Event(), iter(range(1, tasks + 1))

    @app.task(name="nothing")  # type: ignore[untyped-decorator]  # Celery has no types
    def nothing() -> None:
        pass

    @signals.task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]  # as above
    def count(**_: object) -> None:
        if next(done) == tasks:
            over.set()

    with start_worker(app, perform_ping_check=False, pool="solo", loglevel="ERROR"):
        began = time.perf_counter()
        for _ in range(tasks):
            nothing.delay()
        sent = time.perf_counter()
        if not over.wait(600):
            raise TimeoutError(f"not all of {tasks} tasks were done")
        ended = time.perf_counter()
    return {"per_s": tasks / (ended - began), "sent_per_s": tasks / (sent - began)}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
