"""The Spark session of a job: that of spark-submit, or a local one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pyspark.core.context
from py4j.clientserver import ClientServerConnection
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkFiles
from pyspark.sql import SparkSession

from txmq_spark.session.local_session import JVM_GONE, TASK_ATTEMPTS, local_session
from txmq_spark.session.query_errors import JobFailed
from txmq_spark.source.data_source import TxmqDataSource

# Where the process that plans a stream's batches looks for shipped files, below the
# place where they are (Spark 4.3.0, 2026-11-23): without this it does not find any.
STREAM_FILES: Final = "streaming_job"
CANCEL_EVERY_S: Final = 0.1
CANCEL_TRIES: Final = 50


def register(spark: SparkSession) -> None:
    """Make the data source `txmq` known to a session, also to streams whose packages
    were shipped by `--py-files`.
    """
    spark.dataSource.register(TxmqDataSource)
    files = Path(SparkFiles.getRootDirectory())
    if files.is_dir() and not (files / STREAM_FILES).exists():
        (files / STREAM_FILES).symlink_to(files)


@contextmanager
def job_session() -> Iterator[SparkSession]:
    """Yield a session with the data source `txmq`.

    Under spark-submit it is the submitted one, else a local one on all cores. Raises
    JobFailed where its JVM ends by itself.
    """
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        with _gone_jvm_told(), interruptible_calls(), _own_interrupts(), ExitStack() as stack:
            with _signals_held():
                own = stack.enter_context(local_session(f"local[*,{TASK_ATTEMPTS}]"))
            with _jobs_cancelled(own):
                yield own
        return
    with _gone_jvm_told(), interruptible_calls():
        with _own_interrupts():
            spark = SparkSession.builder.appName("txmq").getOrCreate()
        register(spark)
        try:
            with _jobs_cancelled(spark):
                yield spark
        finally:
            with suppress(*JVM_GONE):
                spark.stop()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM wait for the end of the block, in which a JVM starts.

    One that nobody waits for any more fails, and stays for ever (4.3.0, 2026-11-29).
    """
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


@contextmanager
def _jobs_cancelled(spark: SparkSession) -> Iterator[None]:
    """End what Spark is at work on before its session where a signal ends the block.

    Spark would print stacks of its own: its threads cannot go on (4.3.0, 2026-11-29).
    """
    try:
        yield
    except SystemExit:
        with suppress(*JVM_GONE):
            context = spark.sparkContext
            for _ in range(CANCEL_TRIES):
                context.cancelAllJobs()
                if not context.statusTracker().getActiveJobsIds():
                    break
                time.sleep(CANCEL_EVERY_S)
        raise


@contextmanager
def _gone_jvm_told() -> Iterator[None]:
    """Turn errors of a JVM that has ended into one of txmq. Raises JobFailed."""
    try:
        yield
    except Py4JJavaError:
        raise
    except (Py4JError, ConnectionError) as error:
        raise JobFailed(
            "the JVM of Spark has ended, as one does that the system kills for its memory"
        ) from error


@contextmanager
def interruptible_calls() -> Iterator[None]:
    """End the connection of each call to Java that the end of the process cuts.

    py4j expects errors of the connection only (0.10.9.9, 2026-11-28). Otherwise the
    next call, on the way out, would wait for the end of the one that was cut, and each
    later call would get the answer to the one before.
    """
    send = ClientServerConnection.send_command

    def send_command(self: ClientServerConnection, command: str) -> str:
        try:
            return str(send(self, command))
        except BaseException as error:
            if not isinstance(error, Exception):
                self.close()
            raise

    ClientServerConnection.send_command = send_command
    try:
        yield
    finally:
        ClientServerConnection.send_command = send


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Keep PySpark from handling Ctrl-C in the block.

    Its handler calls the JVM, within the call that it interrupts: both fail, with their
    stacks on the terminal (4.3.0, 2026-11-29).
    """
    module: Any = pyspark.core.context
    before = module.signal
    module.signal = SimpleNamespace(SIGINT=signal.SIGINT, signal=lambda *_: None)
    try:
        yield
    finally:
        module.signal = before
