"""Have Celery do tasks that do nothing, over any broker.

    python -m tests.bench.clients.celery_tasks BROKER_URL TASKS

Prints what the tasks need a second, and the CPU of sender and worker in µs a task:
`per_s` from the first send until the last is done, beside a worker that is there
already; `sent_per_s` of others that nobody takes yet, until the last is sent and the
connection is closed; `done_per_s` of a worker that finds those, from its first to its
last. A worker is a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from celery import Celery, signals
from kombu import pools

import txmq.kombu  # noqa: F401  # URLs that begin with txmq://

READY, DONE = "ready", "done"
CONFIRMED = "?confirmed"  # the broker says when a task is stored
WORKER = ("worker", "--pool=solo", "--loglevel=ERROR", "--without-gossip", "--without-mingle")


def tested(url: str) -> Celery:
    """Return the app, with its task."""
    app = Celery("bench", broker=url.removesuffix(CONFIRMED))
    app.conf.broker_transport_options = {"confirm_publish": url.endswith(CONFIRMED)}
    app.conf.update(task_ignore_result=True, task_acks_late=True, worker_redirect_stdouts=False)
    app.task(nothing, name="nothing")
    return app


def nothing() -> None:
    """Do nothing: the task."""


def work(url: str, tasks: int) -> None:
    """Be the worker; say when it is ready, and what so many tasks have cost."""
    numbers, began = count(1), [0.0, 0.0]

    def counted(**_: object) -> None:
        number = next(numbers)
        if number == 1:
            began[:] = time.perf_counter(), time.process_time()
        if number == tasks:
            took, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
            print(DONE, took, cpu, flush=True)

    def ready(**_: object) -> None:
        print(READY, flush=True)

    signals.task_postrun.connect(counted, weak=False)
    signals.worker_ready.connect(ready, weak=False)
    tested(url).worker_main(WORKER)


@contextmanager
def worker(url: str, tasks: int) -> Iterator[subprocess.Popen[str]]:
    """Run a worker that has said it is ready."""
    argv = [sys.executable, "-m", __spec__.name, url, str(tasks), "worker"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            said(process, READY)
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str], word: str) -> list[float]:
    """Wait for the word, and return the numbers behind it."""
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith(word):
        assert process.poll() is None, "the worker has ended"
    return [float(number) for number in line.split()[1:]]


def send(url: str, tasks: int) -> None:
    """Send the tasks; they are with the broker on return, if it takes them."""
    app = tested(url)
    task = app.tasks["nothing"]
    for _ in range(tasks):
        task.delay()
    pools.reset()


def measure(url: str, tasks: int) -> dict[str, float]:
    """Send tasks to a worker, then others that wait for the next one."""
    with worker(url, tasks) as first:
        began = time.perf_counter()
        send(url, tasks)
        said(first, DONE)
        together = time.perf_counter() - began
    began, cpu = time.perf_counter(), time.process_time()
    send(url, tasks)
    sent, cpu = time.perf_counter() - began, time.process_time() - cpu
    with worker(url, tasks) as second:
        done, worked = said(second, DONE)
    return {
        "per_s": tasks / together,
        "sent_per_s": tasks / sent,
        "done_per_s": tasks / done,
        "sent_us": cpu / tasks * 1e6,
        "done_us": worked / tasks * 1e6,
    }


if __name__ == "__main__":
    if sys.argv[3:] == ["worker"]:
        work(sys.argv[1], int(sys.argv[2]))
    else:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
