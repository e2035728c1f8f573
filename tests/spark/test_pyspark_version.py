"""Versions of PySpark, and of the Spark that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_extras import EXTRAS
from txmq.errors import ConfigError
from txmq.testing.wait import PATIENCE_S
from txmq_spark.session.local_session import local_session
from txmq_spark.session.pyspark_version import OLDEST, require_pyspark, require_same_spark


def test_an_older_pyspark_is_refused_in_one_line() -> None:
    for version in ("4.3.0", "4.3.0.dev1", "4.12.1", "5.0.0rc1"):
        require_pyspark(version)
    for version in ("3.5.7", "4.2.1"):
        with pytest.raises(ConfigError, match=f"its version is {version}, and") as refused:
            require_pyspark(version)
        assert "\n" not in str(refused.value)


def test_the_oldest_version_is_that_of_the_extra() -> None:
    [asked] = [one for one in EXTRAS["spark"] if one.startswith("pyspark")]
    assert asked.startswith(f"pyspark>={OLDEST[0]}.{OLDEST[1]},")


def test_a_home_of_another_spark_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "spark"
    with pytest.raises(ConfigError, match=f"there is no Spark in {home}"):
        require_same_spark(str(home), "4.3.0")
    (home / "jars").mkdir(parents=True)
    (home / "jars" / "spark-core_2.13-4.3.2.jar").touch()
    require_same_spark(str(home), "4.3.0")
    with pytest.raises(ConfigError, match=r"has Spark 4\.3\.2, and PySpark is of version 4\.4"):
        require_same_spark(str(home), "4.4.0")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no Spark in"), local_session():
        pytest.fail("it has started")


def test_a_jvm_that_does_not_start_is_an_error_of_one_line(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "txmq_spark", "land", "--topic=t", f"--path={tmp_path}"],
        env=os.environ | {"PYSPARK_SUBMIT_ARGS": "--nonsense=1 pyspark-shell"},
        capture_output=True, check=False, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("txmq: Spark: its JVM has not started")
