"""Actions that run at the same time, over real Spark."""

from __future__ import annotations

from threading import Barrier, Event
from typing import TYPE_CHECKING

import pytest

from txmq.testing.wait import PATIENCE_S, wait_until
from txmq_spark.session.concurrent_actions import at_once

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOR_EVER = 1 << 60  # rows


def test_a_failure_is_raised_at_once_and_the_jobs_of_other_actions_are_cancelled(
    spark: SparkSession,
) -> None:
    tracker, failed = spark.sparkContext.statusTracker(), Event()

    def endless() -> None:
        spark.range(0, FOR_EVER, 1, 1).selectExpr("sum(id % 7)").collect()

    def begins_later() -> None:
        assert failed.wait(PATIENCE_S)
        endless()

    def fails_beside_a_job() -> None:
        wait_until(tracker.getActiveJobsIds, what="the job beside it")
        failed.set()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        at_once(spark, endless, begins_later, fails_beside_a_job)
    wait_until(lambda: not tracker.getActiveJobsIds(), what="Spark tells the ends of the jobs")


def test_actions_have_the_properties_of_the_caller_and_none_of_one_another(
    spark: SparkSession,
) -> None:
    context, both = spark.sparkContext, Barrier(2)

    def told(name: str) -> tuple[str | None, str | None]:
        context.setLocalProperty("txmq.own", name)
        both.wait(PATIENCE_S)
        return context.getLocalProperty("txmq.caller"), context.getLocalProperty("txmq.own")

    context.setLocalProperty("txmq.caller", "c")
    try:
        assert at_once(spark, lambda: told("a"), lambda: told("b")) == (("c", "a"), ("c", "b"))
    finally:
        context.setLocalProperty("txmq.caller", None)  # type: ignore[arg-type]
    assert context.getLocalProperty("txmq.own") is None
