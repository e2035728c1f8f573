"""A Spark session in this process, for jobs without spark-submit, tests and the
demonstration.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pyspark
from py4j.clientserver import SHUTDOWN_FINALIZER_WORKER, ClientServer, FinalizerWorker
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

import txmq
from txmq.errors import ConfigError
from txmq_spark.session.java import java_home
from txmq_spark.session.pyspark_version import require_same_spark
from txmq_spark.source.data_source import TxmqDataSource

# Tries of a task: a Python worker that dies does not end the job.
TASK_ATTEMPTS: Final = 3
MASTER: Final = f"local[2,{TASK_ATTEMPTS}]"
# The JVM shares a small machine with a broker, a database and tests.
SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xss4m",
    "spark.sql.shuffle.partitions": "2",
    # A reconciliation has 200 generated classes. With Spark's 100 the next one of the
    # session compiles each of them again (docs/decisions/0109).
    "spark.sql.codegen.cache.maxEntries": "1000",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.catalogImplementation": "in-memory",
    # Notes for people who debug frames or look at the UI. Each expression would ask the
    # session about them, and capture the stack: up to 3 ms.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.dataFrameQueryContext.enabled": "false",
    "spark.sql.ui.explainMode": "simple",
    # Keeping a frame would clone the session, to turn this off. There are no buckets.
    "spark.sql.sources.bucketing.autoBucketedScan.enabled": "false",
}

# Errors of a call after a signal to all processes, as service managers send it: it has
# ended the JVM, too. KeyError: py4j reads an answer of the call that was interrupted.
JVM_GONE: Final = (Py4JError, OSError, KeyError)
COLLECTION_S: Final = 10.0  # one call of a JVM that is idle
JVM_ENDS_S: Final = 30.0

SPARK_PARTS: Final = ("bin", "jars", "sbin")

# Without a configuration Spark logs warnings, and a note that it does; the note also
# comes unless the server for Python has a level of its own. The last loggers print the
# stacks of errors that also reach the driver: jobs tell them in one line.
LOGGING: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
logger.python.name = org.apache.spark.api.python.PythonGatewayServer
logger.python.level = error
logger.query.name = org.apache.spark.sql.execution.streaming
logger.query.level = off
logger.write.name = org.apache.spark.sql.execution.datasources
logger.write.level = off
logger.attempt.name = org.apache.spark.executor.Executor
logger.attempt.level = off
logger.task.name = org.apache.spark.scheduler.TaskSetManager
logger.task.level = off
"""


@contextmanager
def local_session(
    master: str = MASTER, settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Yield a session with the data source `txmq`, which ends with the block, with its
    JVM.

    Raises ConfigError where the machine has no Java, no directory for temporary files,
    or Spark does not start.
    """
    if home := os.environ.get("SPARK_HOME"):
        require_same_spark(home)
    with (
        _own_directory() as name,
        _environment(jvm_environment(Path(name))),
    ):
        builder = SparkSession.builder.master(master).appName("txmq")
        for key, value in (_settings(Path(name)) | dict(settings or {})).items():
            builder = builder.config(key, value)
        try:
            session = builder.getOrCreate()
        except PySparkRuntimeError as error:
            raise ConfigError(
                "Spark",
                f"its JVM has not started: {error}",
                hint="the lines above say why; see JAVA_HOME, JAVA_TOOL_OPTIONS and"
                " PYSPARK_SUBMIT_ARGS",
            ) from error
        session.dataSource.register(TxmqDataSource)
        # A signal to all processes also ends the JVM, and cuts the connection of the
        # thread for accumulators, which would print the stack of that.
        server: Any = session.sparkContext._accumulatorServer  # noqa: SLF001
        server.handle_error = lambda *_cut: None
        try:
            yield session
        finally:
            _stop_jvm(session)


def _own_directory() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="txmq-spark-")
    except OSError as error:
        raise ConfigError(
            "TMPDIR",
            f"no directory for Spark's files can be made: {error.strerror}",
            hint="name a directory that you may write to, and that has some GB free",
        ) from error


def jvm_environment(directory: Path) -> dict[str, str]:
    """Return the environment for a JVM and its Python workers: Java, Python,
    packages.
    """
    roots = [str(Path(txmq.__file__).parents[1]), str(Path(__file__).parents[2])]
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {
        "JAVA_HOME": str(java_home(directory)),
        "SPARK_HOME": os.environ.get("SPARK_HOME") or str(spark_home(directory)),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, [*roots, *known]))),
        "SPARK_LOCAL_IP": "127.0.0.1",  # otherwise Spark searches an address and logs a warning
    }


def spark_home(directory: Path) -> Path:
    """Return a home for Spark without its zip file of PySpark.

    Each new worker would compile what it imports from there, which takes half a second.
    From the installed package it comes compiled.
    """
    home = directory / "spark"
    home.mkdir(exist_ok=True)
    for place in Path(pyspark.__file__).parent.iterdir():
        if place.name in SPARK_PARTS and not (home / place.name).exists():
            (home / place.name).symlink_to(place)
    return home


def _settings(directory: Path) -> dict[str, str]:
    logging = directory / "log4j2.properties"
    logging.write_text(LOGGING, encoding="ascii")
    java = (
        f"{SETTINGS['spark.driver.extraJavaOptions']} -Dlog4j2.configurationFile={logging.as_uri()}"
    )
    places = dict.fromkeys(("spark.local.dir", "spark.sql.warehouse.dir"), str(directory))
    return SETTINGS | places | {"spark.driver.extraJavaOptions": java}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _stop_jvm(session: SparkSession) -> None:
    with suppress(*JVM_GONE):
        session.stop()
    gateway = SparkContext._gateway  # noqa: SLF001
    if gateway is not None:
        SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001
        end_collection(gateway)
        # The JVM ends with its input. A connection that still waits for its calls
        # (`foreachBatch` has one) could not be closed before.
        gateway.proc.stdin.close()
        gateway.proc.wait(JVM_ENDS_S)
        gateway.close()
        gateway.shutdown()


def end_collection(gateway: ClientServer) -> None:
    """End the thread that tells the JVM which of its objects are not used any more.

    While the JVM ends, its calls fail, and py4j would print each with its stack.
    """
    waiting = gateway._gateway_client.finalizer_deque  # noqa: SLF001  # py4j has no other way
    waiting.clear()
    waiting.append(SHUTDOWN_FINALIZER_WORKER)  # the thread takes from this end
    for thread in threading.enumerate():
        if isinstance(thread, FinalizerWorker) and thread.deque is waiting:
            thread.join(COLLECTION_S)
