"""The wheel has every file that users need, and is built without a network."""

import configparser
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import release
from tests.wheels import build_wheel

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("source"))) as archive:
        yield archive


def shipped(package: Path) -> set[str]:
    files = (
        file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
    return {file.relative_to(package.parent).as_posix() for file in files}


def test_wheel_holds_every_file_of_both_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert "txmq/py.typed" in inside
    packages = shipped(ROOT / "txmq") | shipped(ROOT / "spark" / "txmq_spark")
    assert inside == packages | {"txmq_command.py"}


def test_wheel_brings_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    [info] = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(f"{info}/entry_points.txt").decode())
    assert dict(scripts["console_scripts"]) == {
        "txmq": "txmq_command:main",
        "txmq-spark": "txmq_command:spark",
    }
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_a_release_is_built_and_checked(tmp_path: Path) -> None:
    version = release.build(tmp_path)
    names = ("txmq", "txmq_faststream")
    ends = ("-py3-none-any.whl", ".tar.gz")
    assert {path.name for path in tmp_path.iterdir()} - {".gitignore"} == {
        f"{name}-{version}{end}" for name in names for end in ends
    }
    with tarfile.open(tmp_path / f"txmq-{version}.tar.gz") as sources:
        sources.extractall(tmp_path, filter="data")
    project, packages = tmp_path / f"txmq-{version}", release.PROJECTS["."]
    wheel, lacking = tmp_path / f"txmq-{version}-py3-none-any.whl", tmp_path / "lacking.whl"
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(lacking, "w") as cut:
        for name in whole.namelist():
            if name != "txmq/tx/postgres/schema.sql":
                cut.writestr(name, whole.read(name))
    with pytest.raises(SystemExit, match=r"differs in \['txmq/tx/postgres/schema\.sql'\]"):
        release.check_wheel(lacking, project, packages, version)
    with pytest.raises(SystemExit, match=r"of version .+ lacks"):
        release.check_wheel(wheel, project, packages, "9.9")
