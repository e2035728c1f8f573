"""Have Celery do tasks that do nothing, over any broker.

    python -m tests.bench.clients.celery_tasks BROKER_URL TASKS

Prints {"per_s", "sent_per_s"}: tasks from the first send until the last is done, and
from the first send until the last is sent. The worker is a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import count

from celery import Celery, signals

import txmq.kombu  # noqa: F401  # URLs that begin with txmq://

READY, DONE = "ready", "done"
CONFIRMED = "?confirmed"  # RabbitMQ says when a task is stored, as txmq does
WORKER = ("worker", "--pool=solo", "--loglevel=ERROR", "--without-gossip", "--without-mingle")


def tested(url: str) -> Celery:
    """Return the app, with its task."""
    app = Celery("bench", broker=url.removesuffix(CONFIRMED))
    if url.endswith(CONFIRMED):
        app.conf.broker_transport_options = {"confirm_publish": True}
    app.conf.update(task_ignore_result=True, task_acks_late=True, worker_redirect_stdouts=False)
    app.task(nothing, name="nothing")
    return app


def nothing() -> None:
    """Do nothing: the task."""


def work(url: str, tasks: int) -> None:
    """Be the worker; say when it is ready, and when so many tasks are done."""
    done = count(1)

    def counted(**_: object) -> None:
        if next(done) == tasks:
            print(DONE, flush=True)

    def ready(**_: object) -> None:
        print(READY, flush=True)

    signals.task_postrun.connect(counted, weak=False)
    signals.worker_ready.connect(ready, weak=False)
    tested(url).worker_main(WORKER)


def measure(url: str, tasks: int) -> dict[str, float]:
    """Send the tasks, and wait until they are done."""
    argv = [sys.executable, "-m", __spec__.name, url, str(tasks), "worker"]
    task = tested(url).tasks["nothing"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        try:
            while worker.stdout.readline().strip() != READY:
                assert worker.poll() is None, "the worker has ended"
            began = time.perf_counter()
            for _ in range(tasks):
                task.delay()
            sent = time.perf_counter()
            while worker.stdout.readline().strip() != DONE:
                assert worker.poll() is None, "the worker has ended"
            ended = time.perf_counter()
        finally:
            worker.kill()
    return {"per_s": tasks / (ended - began), "sent_per_s": tasks / (sent - began)}


if __name__ == "__main__":
    if sys.argv[3:] == ["worker"]:
        work(sys.argv[1], int(sys.argv[2]))
    else:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
