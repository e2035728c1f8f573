"""A worker in an ordered consumer group that writes down the messages it has
processed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

from tests.system.supervisor import SupervisorConfig, WorkerSpec
from txmq import ReceivedMessage, RetryPolicy, connect
from txmq.testing.wait import PATIENCE_S

GROUP = "followers"
THREADS = 4
CHECK_EVERY_S = 0.1
FAILS = 40  # one message in so many fails at its first delivery
WORK_S = 0.002  # of a handler, so that messages are always outstanding


class HandlerFailed(Exception):
    """An error that a handler raises now and then."""


def run_worker(
    config: SupervisorConfig, worker: WorkerSpec, keep_running: Callable[[], bool]
) -> None:
    """Append "key version" for each message to the file of all workers, each line by
    one write.
    """
    directory, stop = Path(config.directory), Event()
    (directory / f"{worker.name}.{os.getpid()}.pid").touch()
    effects = os.open(effects_file(directory), os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def handle(message: ReceivedMessage) -> None:
        if message.offset % FAILS == 0 and message.attempt == 1:
            raise HandlerFailed
        time.sleep(WORK_S)
        os.write(effects, f"{message.key} {message.body.decode()}\n".encode())

    def watch() -> None:
        while keep_running():
            stop.wait(CHECK_EVERY_S)
        stop.set()

    Thread(target=watch, daemon=True).start()
    retry = RetryPolicy((0.05,), retries=10_000)
    with (
        connect(config.url, timeout=PATIENCE_S) as client,
        client.consumer(
            GROUP, topics=[config.topic], mode="ordered", retry=retry, prefetch_messages=256
        ) as consumer,
    ):
        consumer.run(handle, workers=THREADS, stop=stop)


def effects_file(directory: Path) -> Path:
    """Return the path of the file with all effects, in their order."""
    return directory / "effects"


def running_pids(config: SupervisorConfig) -> dict[str, int]:
    """Return the pids of the workers that run now, by name."""
    dead = config.dead_pids()
    found = (path.name.split(".") for path in Path(config.directory).glob("*.pid"))
    return {worker: int(pid) for worker, pid, _suffix in found if int(pid) not in dead[worker]}
