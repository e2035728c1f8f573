"""A standalone cluster of Spark on this machine: a master and two workers, each a
process with one core.

The workers have different addresses, because Spark runs a speculative copy on another
host only. Their Python sees the packages that txmq depends on, and no txmq: it has to
be shipped with a job, or installed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from txmq.testing.ports import free_port
from txmq.testing.processes import ENVIRONMENT, Running
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq_spark.session.java import java_home
from txmq_spark.session.local_session import spark_home

HOSTS: Final = ("127.0.0.1", "127.0.0.2")
PACKAGES: Final = sysconfig.get_paths()["purelib"]
SUBMIT_S: Final = 2 * PATIENCE_S
SMALL: Final = (
    "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xss4m"
    # Verifying Spark's classes takes each machine half a second.
    " -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
OPENED: Final = (
    "java.lang java.lang.invoke java.lang.reflect java.io java.net java.nio java.util"
    " java.util.concurrent java.util.concurrent.atomic jdk.internal.ref sun.nio.ch sun.nio.cs"
    " sun.security.action sun.util.calendar"
)
SETTINGS: Final = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.extraJavaOptions": SMALL,
    "spark.driver.extraJavaOptions": SMALL,
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
}


class Cluster:
    """A running cluster. Its files are in `directory`."""

    def __init__(self, directory: Path, url: str, environment: Mapping[str, str]) -> None:
        self.directory, self.url, self._environment = directory, url, environment

    def submit(
        self,
        program: Path,
        *arguments: str,
        settings: Mapping[str, str],
        path: str = "",
        cwd: Path | None = None,
        limit_s: float = SUBMIT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run `spark-submit`. `path`: where Python finds txmq, in driver and executors;
        "" = it is shipped. `cwd`: where the driver runs.
        """
        python_path = os.pathsep.join(filter(None, (path, PACKAGES)))
        given = SETTINGS | {"spark.executorEnv.PYTHONPATH": python_path} | dict(settings)
        pairs = [f"--conf={name}={value}" for name, value in given.items()]
        submit = Path(self._environment["SPARK_HOME"], "bin", "spark-submit")
        return subprocess.run(
            [submit, "--master", self.url, *pairs, program, *arguments],
            capture_output=True,
            text=True,
            timeout=limit_s,
            env={**self._environment, "PYTHONPATH": python_path},
            cwd=cwd or self.directory,
            check=False,
        )


@contextmanager
def running_cluster(directory: Path) -> Iterator[Cluster]:
    """Run a cluster for the block."""
    home, python = java_home(directory), directory / "python"
    spark = Path(os.environ.get("SPARK_HOME") or spark_home(directory))
    # Without the module `site`, Python does not see where this checkout is installed.
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n', "ascii")
    python.chmod(0o755)
    environment = {
        **ENVIRONMENT,
        "JAVA_HOME": str(home),
        "SPARK_HOME": str(spark),
        "SPARK_LAUNCHER_OPTS": SMALL,
        "SPARK_SCALA_VERSION": "2.13",  # as bin/load-spark-env.sh sets it
        "SPARK_LOCAL_IP": HOSTS[0],
        "PYSPARK_PYTHON": str(python),
        "PYSPARK_DRIVER_PYTHON": str(python),
        "PYTHONPATH": PACKAGES,
    }
    address = f"{HOSTS[0]}:{free_port()}"
    with ExitStack() as stack:

        def start(name: str, kind: str, *arguments: str, host: str = HOSTS[0]) -> Running:
            opened = [f"--add-opens=java.base/{one}=ALL-UNNAMED" for one in OPENED.split()]
            java = [str(home / "bin" / "java"), "-Xmx192m", *SMALL.split(), *opened]
            process = Running(
                directory / name,
                *(f"org.apache.spark.deploy.{kind}", "--host", host, "--webui-port", "0"),
                *arguments,
                command=[*java, "-cp", class_path(spark)],
                environment={**environment, "SPARK_LOCAL_IP": host},
            )
            stack.callback(process.process.wait)
            stack.callback(process.process.kill)
            return process

        master = start("master", "master.Master", "--port", address.partition(":")[2])
        wait_until(lambda: said(master, "ALIVE"), what="the master is there")
        for number, host in enumerate(HOSTS):
            place = str(directory / f"work-{number}")
            worker = ("-c", "1", "-m", "640m", "-d", place, f"spark://{address}")
            start(f"worker-{number}", "worker.Worker", *worker, host=host)
        registered = len(HOSTS)
        wait_until(lambda: said(master, "Registering worker") == registered, what="two workers")
        yield Cluster(directory, f"spark://{address}", environment)


def class_path(spark: Path) -> str:
    """Return the class path as Spark's own programs have it: an archive of classes is
    for one path only (`tests/java_archive.py`).
    """
    [logging] = (spark / "jars").glob("slf4j-api-*.jar")
    return os.pathsep.join((f"{spark}/conf", str(logging), f"{spark}/jars/*"))


def said(process: Running, words: str) -> int:
    """Return how often the log has these words. Raises ProcessEnded."""
    if not process.alive:
        raise process.unexpected_end()
    return process.err.read_text("utf-8", "replace").count(words)
