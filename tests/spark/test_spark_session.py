"""Signals of a job, and a JVM that ends by itself."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pyspark.core.context
import pytest
from py4j.clientserver import ClientServerConnection, JavaParameters, PythonParameters
from py4j.protocol import Py4JNetworkError

from txmq_spark.session import spark_session
from txmq_spark.session.query_errors import JobFailed
from txmq_spark.session.spark_session import job_session


def test_a_job_handles_interrupts_itself_also_while_spark_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pyspark_starts() -> None:
        """Set its handler as the constructor of a context does."""
        context: Any = pyspark.core.context
        context.signal.signal(
            context.signal.SIGINT, lambda *_caught: pytest.fail("PySpark calls the JVM")
        )

    @contextmanager
    def started(_master: str) -> Iterator[None]:
        pyspark_starts()
        yield

    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setattr(spark_session, "local_session", started)
    before = signal.getsignal(signal.SIGINT)
    try:
        with job_session():
            assert signal.getsignal(signal.SIGINT) is before
        pyspark_starts()
        assert signal.getsignal(signal.SIGINT) is not before
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_submitted_job_whose_jvm_is_gone_ends_by_its_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone:
        def stop(self) -> None:
            raise Py4JNetworkError("connection refused")

        def cancelAllJobs(self) -> None:  # noqa: N802  # Spark's name
            self.stop()

        @property
        def sparkContext(self) -> Gone:  # noqa: N802  # Spark's name
            return self

    class Builder:
        def appName(self, _name: str) -> Builder:  # noqa: N802  # Spark's name
            return self

        def getOrCreate(self) -> Gone:  # noqa: N802  # Spark's name
            return Gone()

    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    monkeypatch.setattr(spark_session, "SparkSession", SimpleNamespace(builder=Builder()))
    monkeypatch.setattr(spark_session, "register", lambda _spark: None)
    with pytest.raises(SystemExit) as ended, job_session():
        sys.exit(143)
    assert ended.value.code == 143


class Busy:
    """A session, its context and the tracker of its jobs, which end when they have been
    cancelled often enough.
    """

    cancelled = 0

    @property
    def sparkContext(self) -> Busy:  # noqa: N802  # Spark's name
        return self

    def cancelAllJobs(self) -> None:  # noqa: N802  # Spark's name
        self.cancelled += 1

    def statusTracker(self) -> Busy:  # noqa: N802  # Spark's name
        return self

    def getActiveJobsIds(self) -> list[int]:  # noqa: N802  # Spark's name
        return [7] if self.cancelled < 3 else []


class CutSocket:
    """A socket in whose calls the process ends."""

    closed = False

    def sendall(self, _command: bytes) -> None:
        sys.exit(143)

    def shutdown(self, _how: int) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_a_call_that_the_end_of_the_process_cuts_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy, cut = Busy(), CutSocket()
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setattr(spark_session, "local_session", lambda _master: nullcontext(busy))
    monkeypatch.setattr(spark_session, "CANCEL_EVERY_S", 0)
    gateway: Any = SimpleNamespace(pool={})
    connection: Any = ClientServerConnection(JavaParameters(), PythonParameters(), gateway, None)
    connection.socket = cut
    before = ClientServerConnection.send_command
    with pytest.raises(SystemExit), job_session():
        connection.send_command("collect")
    assert cut.closed
    assert busy.cancelled == 3
    assert ClientServerConnection.send_command is before


def test_a_jvm_that_ends_by_itself_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setattr(spark_session, "local_session", nullcontext)
    for error in (Py4JNetworkError("Answer from Java side is empty"), ConnectionRefusedError()):
        with pytest.raises(JobFailed, match="the JVM of Spark has ended") as failed, job_session():
            raise error
        assert "\n" not in str(failed.value)


def test_a_signal_while_spark_starts_waits_for_its_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    @contextmanager
    def starting(_master: str) -> Iterator[Busy]:
        signal.raise_signal(signal.SIGTERM)
        steps.append("started")
        try:
            yield Busy()
        finally:
            steps.append("ended")

    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setattr(spark_session, "local_session", starting)
    before = signal.signal(signal.SIGTERM, lambda *_caught: sys.exit(143))
    try:
        with pytest.raises(SystemExit), job_session():
            pytest.fail("it goes on")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert steps == ["started", "ended"]
