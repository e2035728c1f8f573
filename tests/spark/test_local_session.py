"""Sessions whose JVM has ended before, or whose call was interrupted."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from py4j.clientserver import FinalizerWorker
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from tests.spark.conftest import end_jobs
from txmq.errors import ConfigError
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq_spark.session import local_session as subject
from txmq_spark.session.local_session import _stop_jvm, end_collection, local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_session_whose_jvm_is_gone_ends_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)

    def stop() -> None:
        raise Py4JError("SparkSession.clearDefaultSession does not exist in the JVM")

    _stop_jvm(SimpleNamespace(stop=stop))  # type: ignore[arg-type] # has what is called


def test_a_machine_without_room_for_temporary_files_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="TMPDIR: no directory for Spark"), local_session():
        pytest.fail("it has started")


class _Jvm:
    """A JVM that tells when it is asked to collect an object, and answers in time."""

    def __init__(self) -> None:
        self.asked, self.answers, self.collected = Event(), Event(), list[str]()

    def garbage_collect_object(self, name: str, _enqueue: bool) -> None:  # noqa: FBT001 # as py4j
        self.asked.set()
        assert self.answers.wait(PATIENCE_S)
        self.collected.append(name)


def test_a_jvm_that_ends_is_not_asked_to_collect_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """py4j would print the stack of each such call that fails."""
    monkeypatch.setattr(subject, "COLLECTION_S", PATIENCE_S)
    jvm, waiting = _Jvm(), deque[object]()
    waiting.appendleft((jvm, "o1"))
    worker = FinalizerWorker(waiting)
    worker.daemon = True
    worker.start()
    assert jvm.asked.wait(PATIENCE_S)
    waiting.extendleft((jvm, f"o{number}") for number in range(2, 100))
    client = SimpleNamespace(finalizer_deque=waiting)
    ending = Thread(target=end_collection, args=[SimpleNamespace(_gateway_client=client)])
    ending.start()
    wait_until(lambda: len(waiting) == 1, what="the objects are forgotten")
    assert ending.is_alive()  # a call is under way
    jvm.answers.set()
    ending.join(PATIENCE_S)
    assert not ending.is_alive()
    assert not worker.is_alive()
    assert jvm.collected == ["o1"]


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
        wait_until(begun.exists, what="the job has begun")
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, fail)
    interrupting = Thread(target=interrupt)
    try:
        interrupting.start()
        with pytest.raises(pytest.fail.Exception, match="out of time"):
            spark.range(2, numPartitions=2).mapInArrow(stuck, "id bigint").collect()
    finally:
        interrupting.join()  # it ends by itself
        signal.signal(signal.SIGUSR1, before)
    end_jobs()
    assert spark.range(3).count() == 3
    with pytest.raises(PySparkException, match="the option is missing"):  # it is found
        spark.range(1).write.format("txmq").mode("append").save()
