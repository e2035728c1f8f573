"""A Spark session in this process, for tests, the demo and jobs that nobody submitted to a cluster."""

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
    "spark.log.level": "ERROR",
}


@contextmanager
def local_session(master: str = MASTER, settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A session with the data source `txmq` in it; it ends with the block, and so does its JVM.

    Raises ConfigError where the machine has no Java.
    """
    with tempfile.TemporaryDirectory(prefix="txmq-spark-") as directory:
        prepare(Path(directory))
        from pyspark.sql import SparkSession  # noqa: PLC0415 (an extra, and it takes half a second)

        from txmq_spark import TxmqDataSource  # noqa: PLC0415 (needs pyspark)

        builder = SparkSession.builder.master(master).appName("txmq")
        builder = builder.config("spark.local.dir", directory).config("spark.sql.warehouse.dir", directory)
        for name, value in (SETTINGS | dict(settings or {})).items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        session.dataSource.register(TxmqDataSource)
        try:
            yield session
        finally:
            _end(session)


def prepare(directory: Path) -> None:
    """Sets what the JVM and its Python workers find their parts by: Java, this Python, these packages."""
    import txmq_spark  # noqa: PLC0415 (needs pyspark, which is an extra)

    os.environ["JAVA_HOME"] = str(java_home(directory))
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"  # or it looks for an address and warns of the one it finds
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    roots = [str(Path(package.__file__ or "").parents[1]) for package in (txmq, txmq_spark)]
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, [*roots, *known])))


def _end(session: SparkSession) -> None:
    from pyspark import SparkContext  # noqa: PLC0415 (as above)

    session.stop()
    gateway = SparkContext._gateway  # noqa: SLF001 (Spark keeps the JVM for a next session that would not come)
    if gateway is not None:
        gateway.close()
        gateway.shutdown()
        SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=30)
