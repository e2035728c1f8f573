"""The package txmq_spark as it is shipped: on its own, from a zip, as a command."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layers import imports_of
from txmq_spark import shipping

ROOT = Path(__file__).parents[1]
# The other folders of txmq belong to the broker and to programs of their own.
ALLOWED = "batch client crashpoints errors model tx wire"
PROGRAM = """
import sys
import txmq, txmq_spark
from txmq.tx.postgres import schema
from txmq_spark import command_line, report
from txmq_spark.plan import PlanRules
for module in (txmq, txmq_spark, schema):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
assert "$" in report.resources.files("txmq_spark").joinpath("report.html").read_text("utf-8")
sys.exit(command_line.main(["--help"]))
"""


def foreign(name: str, source: str) -> list[str]:
    """Return the imports of a module of txmq_spark that it may not have."""
    found = {one.name for one in imports_of(name, source, {name: source})}
    below = {one: one.split(".")[1] for one in found if one.startswith("txmq.")}
    return sorted(one for one, folder in below.items() if folder not in ALLOWED.split())


def modules() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "spark").rglob("*.py")):
        parts = path.relative_to(ROOT / "spark").with_suffix("").parts
        yield ".".join(parts), path.read_text("utf-8")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from txmq.testing.own_broker import OwnBroker", ["txmq.testing.own_broker"]),
        ("def f():\n    import txmq.broker.engine", ["txmq.broker.engine"]),
        ("import txmq\nfrom txmq.model import limits\nimport pyspark", []),
    ],
)
def test_a_planted_import_is_found(source: str, found: list[str]) -> None:
    assert foreign("txmq_spark.planted", source) == found


def test_the_spark_package_imports_clients_and_formats_only() -> None:
    wrong = {name: found for name, source in modules() if (found := foreign(name, source))}
    assert wrong == {}


def test_the_wheel_has_the_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    assert scripts["txmq-spark"] == "txmq_command:spark"


def test_the_packages_work_from_a_zip_as_py_files_ships_them(tmp_path: Path) -> None:
    shipped = tmp_path / "txmq.zip"
    shipping.write_zip(shipped)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(shipped)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(shipped)},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "reconcile" in done.stdout
