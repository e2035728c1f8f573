"""Queries whose worker is late, as on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import StreamingQueryException
from pyspark.errors.exceptions.captured import convert_exception

from txmq_spark.session import query_run
from txmq_spark.session.query_errors import (
    CheckpointShared,
    JobFailed,
    QueryFailed,
    cause_of,
    job_errors,
)
from txmq_spark.session.query_run import STARTS, WORKER_LATE, run_query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LATE = f"[STREAM_FAILED] Query terminated with exception: {WORKER_LATE}. SQLSTATE: XXKST"


class ScriptedWriter:
    """A query of which each start ends as told: with an error's text, or well."""

    def __init__(self, *ends: str) -> None:
        self.left: Iterator[str] = iter(ends)
        self.stopped = 0

    def trigger(self, **_when: object) -> ScriptedWriter:
        return self

    def start(self) -> ScriptedWriter:
        return self

    def awaitTermination(self, _seconds: int) -> bool:  # noqa: N802  # Spark's name
        if end := next(self.left):
            raise StreamingQueryException(message=end)
        return True

    def stop(self) -> None:
        self.stopped += 1


def test_a_query_whose_worker_is_late_is_started_again() -> None:
    writer: Any = ScriptedWriter(LATE, LATE, "")
    run_query(writer, None)
    assert writer.stopped == 3


@pytest.mark.parametrize(("ends", "starts"), [([LATE] * STARTS, STARTS), (["lost"], 1)])
def test_other_errors_end_it(ends: list[str], starts: int) -> None:
    writer: Any = ScriptedWriter(*ends)
    with pytest.raises(QueryFailed):
        run_query(writer, 1)
    assert writer.stopped == starts


@pytest.mark.parametrize("log", ["checkpoint/commits", "lake/_spark_metadata"])
def test_a_run_beside_another_one_of_its_checkpoint_is_told_so(
    spark: SparkSession, tmp_path: Path, log: str
) -> None:
    """The other run is faster in one step of the batch."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "0.txt").write_text("row")
    faster = tmp_path / log / "0"

    def overtaken(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            faster.parent.mkdir(parents=True, exist_ok=True)
            faster.write_text("v1\n{}")
            yield batch

    rows = spark.readStream.text(str(tmp_path / "rows")).mapInArrow(overtaken, "value string")
    writer = rows.writeStream.format("parquet" if "lake" in log else "noop")
    places = {"path": f"{tmp_path}/lake", "checkpointLocation": f"{tmp_path}/checkpoint"}
    writer = writer.options(**places)
    with pytest.raises(CheckpointShared, match="leave that run alone"):
        run_query(writer, None)


@pytest.mark.parametrize(("every_s", "calls"), [(600, [600.0, 1200.0, 1201.0]), (None, [1201.0])])
def test_waits_are_short_however_far_apart_batches_are(
    monkeypatch: pytest.MonkeyPatch, every_s: int | None, calls: list[float]
) -> None:
    """SIGTERM has to wait for the end of one."""
    now = 0.0

    class Query(ScriptedWriter):
        def awaitTermination(self, seconds: int) -> bool:  # noqa: N802  # Spark's name
            nonlocal now
            assert seconds <= 5
            now = min(now + seconds, 1_201)
            return now == 1_201

    monkeypatch.setattr(query_run, "monotonic", lambda: now)
    writer: Any = Query()
    told = list[float]()
    run_query(writer, every_s, lambda _query: told.append(now))
    assert told == calls


def test_an_error_of_python_is_told_by_the_last_line_of_its_traceback() -> None:
    text = (
        "[FAILED] The query has failed: Traceback (most recent call last):\n"
        '  File "a.py", line 2, in main\n    read()\n    ^^^^^^\n'
        "{}\n\tat org.apache.spark.Spark.run(Spark.scala:1)\n"
    )
    for end, told in (
        ("TypeError: no number", "The query has failed: TypeError: no number"),
        ("txmq.errors.UnknownTopic: no topic x", "UnknownTopic: no topic x"),
    ):
        assert cause_of(StreamingQueryException(message=text.format(end))).endswith(told)


def test_a_failed_job_names_the_cause_that_spark_hides(spark: SparkSession) -> None:
    java: Any = spark.sparkContext._jvm
    full = java.java.io.IOException("No space left on device")
    boxed = java.java.lang.RuntimeException("Boxed Exception", full)
    says = r"Boxed Exception, caused by java\.io\.IOException: No space left"
    for error in (Py4JJavaError("", boxed), convert_exception(boxed)):
        with pytest.raises(JobFailed, match=says), job_errors():
            raise error
    with (
        pytest.raises(JobFailed, match=r"IOException: No space left on device \(mend"),
        job_errors(),
    ):
        raise Py4JJavaError("", full)
    told = java.java.lang.RuntimeException("No space left on device", full)
    says = r"RuntimeException: No space left on device \(mend"
    with pytest.raises(JobFailed, match=says), job_errors():
        raise Py4JJavaError("", told)
