"""Sessions whose JVM has ended before, or whose call was interrupted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError
from pyspark import SparkContext

from tests.spark.conftest import end_jobs
from txmq.testing.wait import wait_until
from txmq_spark.local_session import _stop_jvm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE_S = 60.0


def test_a_session_whose_jvm_is_gone_ends_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)

    def stop() -> None:
        raise Py4JError("SparkSession.clearDefaultSession does not exist in the JVM")

    _stop_jvm(SimpleNamespace(stop=stop))  # type: ignore[arg-type] # has what is called


@pytest.mark.timeout(300)  # includes the start of a JVM on a loaded machine
def test_a_test_that_runs_out_of_its_time_leaves_the_session_to_others(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Their calls get answers of their own, and the cores are free."""
    begun = tmp_path / "begun"

    def stuck(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begun.touch()
        while True:
            time.sleep(1)
        yield from batches

    def fail(_signal: int, _frame: FrameType | None) -> None:
        pytest.fail("out of time")

    def interrupt() -> None:
        wait_until(begun.exists, PATIENCE_S, what="the job has begun")
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, fail)
    interrupting = Thread(target=interrupt)
    try:
        interrupting.start()
        with pytest.raises(pytest.fail.Exception, match="out of time"):
            spark.range(2, numPartitions=2).mapInArrow(stuck, "id bigint").collect()
    finally:
        interrupting.join(PATIENCE_S)
        signal.signal(signal.SIGUSR1, before)
    end_jobs()
    assert spark.range(3).count() == 3
