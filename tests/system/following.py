"""A worker that follows a topic: a member of an ordered group that writes down what it
has processed, until it dies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

from tests.system.farm import Job, Lane
from txmq import ReceivedMessage, RetryPolicy, connect

GROUP = "followers"
THREADS = 4
LOOK_EVERY_S = 0.1
FAILS = 40  # one message in so many fails when it is first delivered
WORK_S = 0.002  # so that there is always something in hand
RESTART_S = 60.0  # within which a broker is back


class Stumbled(Exception):
    """What a handler meets now and then."""


def work(job: Job, lane: Lane, go_on: Callable[[], bool]) -> None:
    """Appends "key version" for each message, in the one file of all workers: a line is
    one write.
    """
    directory, stop = Path(job.directory), Event()
    (directory / f"{lane.name}.{os.getpid()}.pid").touch()
    effects = os.open(effects_of(directory), os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def handle(message: ReceivedMessage) -> None:
        if message.offset % FAILS == 0 and message.attempt == 1:
            raise Stumbled
        time.sleep(WORK_S)
        os.write(effects, f"{message.key} {message.body.decode()}\n".encode())

    def watch() -> None:
        while go_on():
            stop.wait(LOOK_EVERY_S)
        stop.set()

    Thread(target=watch, daemon=True).start()
    retry = RetryPolicy.table(0.05, attempts=10_000)
    with (
        connect(job.url, timeout=RESTART_S) as client,
        client.consumer(
            GROUP, topics=[job.topic], mode="ordered", retry=retry, prefetch_messages=256
        ) as consumer,
    ):
        consumer.run(handle, threads=THREADS, stop=stop)


def effects_of(directory: Path) -> Path:
    """The file of all effects, in their order."""
    return directory / "effects"


def alive(job: Job) -> dict[str, int]:
    """The pid of each lane's present worker, where it has begun."""
    dead = job.dead()
    found = (path.name.split(".") for path in Path(job.directory).glob("*.pid"))
    return {lane: int(pid) for lane, pid, _suffix in found if int(pid) not in dead[lane]}
