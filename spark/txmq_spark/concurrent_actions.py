"""Actions of Spark that run at the same time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyspark import inheritable_thread_target
from pyspark.sql import SparkSession


def at_once(spark: SparkSession, *actions: Callable[[], Any]) -> tuple[Any, ...]:
    """Return the results of the actions, in their order.

    While the driver plans the stages of one, executors work on those of another. With
    few rows, planning is most of the time. If actions fail, the first of them raises
    once all have ended.
    """
    with ThreadPoolExecutor(len(actions), "txmq-spark") as pool:
        # with the job group and the tags of this thread, by which jobs are cancelled
        carried: Any = inheritable_thread_target(spark)
        begun = [pool.submit(carried(action)) for action in actions]
    return tuple(one.result() for one in begun)
