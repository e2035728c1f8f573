"""Requests of Java by which PySpark makes columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from py4j.java_gateway import JavaClass
from pyspark.sql import functions as f

from txmq_spark.session.java_classes import KNOWN, java_class, keep_classes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_column_is_one_request_of_java(spark: SparkSession) -> None:
    keep_classes(spark)
    f.col("id")  # the first one asks the session for settings
    client: Any = spark.sparkContext._gateway._gateway_client  # type: ignore[union-attr]
    with patch.object(client, "send_command", wraps=client.send_command) as sent:
        columns = [f.col("id"), f.lit(7)]
    commands = [call.args[0].split("\n")[0] for call in sent.call_args_list]
    # Two calls, and no question for a member. "m" tells Java which objects are free.
    assert [command for command in commands if command != "m"] == ["c", "c"]
    assert spark.range(3).select(*columns).collect() == [(0, 7), (1, 7), (2, 7)]


def test_all_classes_that_are_kept_exist(spark: SparkSession) -> None:
    """Java is asked for the names as PySpark gives them; it may change them."""
    for name, methods in KNOWN.items():
        found = java_class(spark, name)
        assert isinstance(found, JavaClass), f"{name} is a package, or nothing"
        for method in methods:
            assert callable(getattr(found, method)), f"{name}.{method}"
