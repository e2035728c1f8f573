"""A Celery app of the tests; a worker process imports it, too."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from celery import Celery, signals

import txmq.kombu  # noqa: F401  # URLs that begin with txmq://

app = Celery("tested", broker=os.environ.get("TESTED_BROKER", ""), backend="cache+memory://")
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True


@app.task  # type: ignore[untyped-decorator]  # Celery has no types
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@app.task(bind=True)  # type: ignore[untyped-decorator]  # as above
def die_once(self: Any, folder: str) -> None:
    """Kill the worker the first time, and leave a file the second time: whether the
    task was redelivered.
    """
    first = Path(folder) / "first"
    if not first.exists():
        first.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    said = str(self.request.delivery_info["redelivered"])
    (Path(folder) / "second").write_text(said)


@app.task  # type: ignore[untyped-decorator]  # as above
def hold(file: str) -> None:
    """Leave a file, and never end."""
    Path(file).touch()
    signal.pause()


@signals.setup_logging.connect(weak=False)  # type: ignore[untyped-decorator]  # as above
def leave_logging_alone(**_: object) -> None:
    """Keep Celery from changing the levels of the tests' own process."""
