"""Lines on standard error about Spark's work: slow must not look like hung."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, Final

from pyspark.sql import SparkSession

from txmq_spark.session.local_session import JVM_GONE

TOLD_EVERY_S: Final = 10.0


@contextmanager
def progress_told(spark: SparkSession, job: str) -> Iterator[None]:
    """Print a line now and then, as long as the block lasts."""
    over = Event()
    tracker = spark.sparkContext.statusTracker()
    teller = Thread(target=_tell, args=(tracker, job, over), name="txmq-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _tell(tracker: Any, job: str, over: Event) -> None:  # noqa: ANN401  # of pyspark, or a test
    began = time.monotonic()
    while not over.wait(TOLD_EVERY_S):
        try:
            at_work = stages_in_words(tracker)
        except JVM_GONE:  # its job says so
            return
        print(f"{job}: {time.monotonic() - began:.0f} s, {at_work}", file=sys.stderr, flush=True)


def stages_in_words(tracker: Any) -> str:  # noqa: ANN401  # of pyspark, or a test
    """Return the stages that have tasks, and how many of these are done."""
    found = [(number, tracker.getStageInfo(number)) for number in tracker.getActiveStageIds()]
    return (
        "; ".join(
            f"stage {number}: {info.numCompletedTasks} of {info.numTasks} tasks"
            for number, info in sorted(found)
            if info is not None
        )
        or "between stages"
    )
