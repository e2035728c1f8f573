"""The end of a session whose JVM has ended before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JError
from pyspark import SparkContext

from txmq_spark.local_session import _stop_jvm


def test_a_session_whose_jvm_is_gone_ends_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)

    def stop() -> None:
        raise Py4JError("SparkSession.clearDefaultSession does not exist in the JVM")

    _stop_jvm(SimpleNamespace(stop=stop))  # type: ignore[arg-type] # has what is called
