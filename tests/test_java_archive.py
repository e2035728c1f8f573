"""Where Spark's archive of classes is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.java_archive import ARCHIVE, environment


def test_spark_uses_the_archive_where_there_is_one(tmp_path: Path) -> None:
    assert environment(tmp_path, {}) == {}
    (tmp_path / ARCHIVE).touch()
    homes = environment(tmp_path, {})
    assert homes == {"JAVA_HOME": str(tmp_path), "SPARK_HOME": str(tmp_path / "spark")}
    assert environment(tmp_path, homes) == homes, "in a process of the tests"


@pytest.mark.parametrize("name", ["JAVA_HOME", "SPARK_HOME"])
def test_another_java_or_spark_has_no_use_for_it(tmp_path: Path, name: str) -> None:
    (tmp_path / ARCHIVE).touch()
    assert environment(tmp_path, {name: "/opt/of-the-user"}) == {}
