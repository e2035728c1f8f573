"""The version of PySpark that this package needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from pyspark.version import __version__ as PYSPARK  # noqa: N812  # a constant

from txmq.errors import ConfigError
from txmq.errors.extras import how_to_install

OLDEST: Final = (4, 3)  # as the extra `spark` has it
_CORE: Final = re.compile(r"spark-core_[\d.]+-(.+)\.jar")


def require_pyspark(version: str = PYSPARK) -> None:
    """Raise ConfigError for a PySpark that lacks what the data source uses."""
    if _release(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            "pyspark",
            f"its version is {version}, and txmq_spark needs {oldest} or newer",
            hint=f"run {how_to_install('spark')}, and use a cluster of Spark {oldest} or newer",
        )


def require_same_spark(home: str, version: str = PYSPARK) -> None:
    """Raise ConfigError where a home has no Spark, or one of another release than
    PySpark: calls into it would fail with names of Java.
    """
    jars = (_CORE.fullmatch(jar.name) for jar in Path(home).glob("jars/spark-core_*.jar"))
    found = next((jar[1] for jar in jars if jar), None)
    hint = "unset it, or name the home of that Spark"
    if found is None:
        raise ConfigError("SPARK_HOME", f"there is no Spark in {home}", hint=hint)
    if _release(found) != _release(version):
        problem = f"{home} has Spark {found}, and PySpark is of version {version}"
        raise ConfigError("SPARK_HOME", problem, hint=hint)


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, as in 4.3.0.dev1."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
