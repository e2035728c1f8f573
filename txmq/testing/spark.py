"""A Spark session in this process, for tests, the demo and jobs that nobody submitted
to a cluster.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import txmq
from txmq.testing.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER: Final = "local[2]"
# A JVM that shares a small machine with a broker, a database and tests.
SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xss4m",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.catalogImplementation": "in-memory",
}


# Without a file of its own Spark logs warnings, and says so.
LOGGING: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""


@contextmanager
def local_session(
    master: str = MASTER, settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """A session with the data source `txmq` in it; it ends with the block, and so does
    its JVM.

    Raises ConfigError where the machine has no Java.
    """
    from pyspark.sql import SparkSession

    from txmq_spark import TxmqDataSource

    with (
        tempfile.TemporaryDirectory(prefix="txmq-spark-") as name,
        _environment(environment(Path(name))),
    ):
        builder = SparkSession.builder.master(master).appName("txmq")
        for key, value in (_settings(Path(name)) | dict(settings or {})).items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
        session.dataSource.register(TxmqDataSource)
        try:
            yield session
        finally:
            _end(session)


def environment(directory: Path) -> dict[str, str]:
    """What a JVM and its Python workers find their parts by: Java, this Python, these
    packages.
    """
    import txmq_spark

    roots = [str(Path(package.__file__ or "").parents[1]) for package in (txmq, txmq_spark)]
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {
        "JAVA_HOME": str(java_home(directory)),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, [*roots, *known]))),
        "SPARK_LOCAL_IP": "127.0.0.1",  # or it looks for an address and warns of the one it finds
    }


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
    """These variables for the block, then what was there before."""
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


def _end(session: SparkSession) -> None:
    from pyspark import SparkContext

    session.stop()
    gateway = SparkContext._gateway
    if gateway is not None:
        gateway.close()
        gateway.shutdown()
        SparkContext._gateway = SparkContext._jvm = None
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=30)
