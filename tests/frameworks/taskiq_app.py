"""A program of tasks for `taskiq worker`. Environment: BROKER, TOPIC, OUT."""

from __future__ import annotations

import os
import time
from pathlib import Path

from txmq.taskiq import TxmqBroker

broker = TxmqBroker(
    os.environ["BROKER"],
    topic=os.environ["TOPIC"],
    group=os.environ["TOPIC"],
    consumer={"session": 1.0},
)
out = Path(os.environ["OUT"])


@broker.task
def work(name: str) -> None:
    """Note the task, and end only where a file allows it."""
    with out.open("a") as file:
        file.write(f"{name} {os.getpid()}\n")
    while not Path(f"{out}.go").exists():
        time.sleep(0.02)
