"""Actions of Spark that run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, Final
from uuid import uuid4

from pyspark import SparkContext, inheritable_thread_target
from pyspark.sql import SparkSession

CANCEL_EVERY_S: Final = 0.1


def at_once(spark: SparkSession, *actions: Callable[[], Any]) -> tuple[Any, ...]:
    """Return the results of the actions, in their order.

    While the driver plans the stages of one, executors work on those of another. With
    few rows, planning is most of the time. The first failure is raised. The jobs of the
    other actions are cancelled before, those that they begin later as well.
    """
    context, tag = spark.sparkContext, f"txmq-{uuid4().hex}"

    def tagged(action: Callable[[], Any]) -> Any:  # noqa: ANN401  # as of the action
        context.addJobTag(tag)
        return action()

    with ThreadPoolExecutor(len(actions), "txmq-spark") as pool:
        begun: list[Future[Any]] = []
        try:
            for action in actions:
                # With the job group and the tags of this thread, by which jobs are
                # cancelled. Threads that share one such copy take the numbers of one
                # another's queries for their own (Spark 4.3.0, 2026-11-28).
                carried: Any = inheritable_thread_target(spark)
                begun.append(pool.submit(carried(tagged), action))
            ended = wait(begun, return_when=FIRST_EXCEPTION).done
            for one in begun:
                if one in ended:
                    one.result()
        except BaseException:
            _cancel(context, tag, begun)
            raise
    return tuple(one.result() for one in begun)


def _cancel(context: SparkContext, tag: str, begun: Sequence[Future[Any]]) -> None:
    """Cancel the jobs of actions until these have ended. None goes on behind the error:
    the caller frees the frames that it reads.
    """
    while wait(begun, CANCEL_EVERY_S).not_done:
        context.cancelJobsWithTag(tag)
