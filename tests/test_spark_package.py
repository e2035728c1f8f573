"""The package txmq_spark: its arrows, and how it is shipped: on its own, from a zip, as
a command.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.test_layers import circles, imports_of
from txmq_spark import shipping

ROOT = Path(__file__).parents[1]
# The other folders of txmq belong to the broker and to programs of their own.
ALLOWED = "batch client crashpoints errors faces model tx version wire"
# Each folder imports from itself and those before it; then come the jobs, the commands,
# and what is run or imported by the package's name.
ORDER = (
    "source",
    "session",
    "database",
    "evidence",
    "plan",
    "alerts",
    "landing reconcile replay resend watching",
    "commands",
    "__init__ __main__ shipping",
)
PROGRAM = """
import sys
import txmq, txmq_spark
from txmq.tx.postgres import schema
from txmq_spark.commands import command_line
from txmq_spark.plan import report
from txmq_spark.plan.rules import PlanRules
for module in (txmq, txmq_spark, schema):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
assert "$" in report.resources.files("txmq_spark.plan").joinpath("report.html").read_text("utf-8")
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
        yield ".".join(parts).removesuffix(".__init__"), path.read_text("utf-8")


def disorder(sources: Mapping[str, str]) -> list[str]:
    """Return the imports against the order of folders, and circles in a folder."""
    imports = {name: list(imports_of(name, source, sources)) for name, source in sources.items()}
    return [
        f"{name} imports {one.name}"
        for name, found in imports.items()
        for one in found
        if one.name in sources and place(name) < place(one.name)
    ] + circles(imports, sources)


def place(name: str) -> int:
    """Return where the folder or module below txmq_spark stands in the order."""
    below = [*name.split("."), "__init__"][1]
    [found] = [at for at, names in enumerate(ORDER) if below in names.split()]
    return found


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


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("source.planted", "from txmq_spark.plan import rules", "imports txmq_spark.plan.rules"),
        ("session.planted", "def f():\n    import txmq_spark", "imports txmq_spark"),
        ("plan.planted", "from txmq_spark import reconcile", "imports txmq_spark.reconcile"),
        ("plan.planted", "from txmq_spark.plan import rules", ""),
        ("reconcile", "from txmq_spark.plan import rules", ""),
        ("__main__", "import txmq_spark", ""),
    ],
)
def test_a_planted_disorder_is_found(module: str, source: str, found: str) -> None:
    others = dict.fromkeys(("txmq_spark", "txmq_spark.plan.rules", "txmq_spark.reconcile"), "")
    expected = [f"txmq_spark.{module} {found}"] if found else []
    assert disorder({**others, f"txmq_spark.{module}": source}) == expected


def test_a_planted_circle_in_a_folder_is_found() -> None:
    sources = {
        "txmq_spark.plan.parts": "from txmq_spark.plan import rules",
        "txmq_spark.plan.rules": "from txmq_spark.plan import parts",
    }
    [found] = disorder(sources)
    assert found.startswith("txmq_spark.plan: ")


def test_the_folders_of_the_spark_package_import_in_one_direction() -> None:
    sources = {name: source for name, source in modules() if name.startswith("txmq_spark")}
    assert len(sources) > len(ORDER)
    assert disorder(sources) == []


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
