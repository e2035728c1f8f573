"""Settings of a session that a job changes for a while."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from txmq_spark.spark_session import ADAPTIVE, planned_once

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # includes the start of a JVM on a loaded machine


def has_adaptive_plans(spark: SparkSession) -> bool:
    counted = spark.range(3).groupBy("id").count()
    return "AdaptiveSparkPlan" in str(counted._jdf.queryExecution().executedPlan())


@pytest.mark.parametrize("chosen", ["true", "false"])
def test_queries_are_planned_once_in_a_block_and_as_the_user_chose_behind_it(
    spark: SparkSession, chosen: str
) -> None:
    default = spark.conf.get(ADAPTIVE)
    spark.conf.set(ADAPTIVE, chosen)
    with suppress(ZeroDivisionError), planned_once(spark):
        assert not has_adaptive_plans(spark)
        _ = 1 // 0
    assert spark.conf.get(ADAPTIVE) == chosen
    assert has_adaptive_plans(spark) is (chosen == "true")
    spark.conf.set(ADAPTIVE, str(default))
