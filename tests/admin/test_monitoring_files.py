"""Dashboards and alert rules name metrics that exist; promtool accepts the rules."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from txmq.testing.wait import PATIENCE_S

ROOT = Path(__file__).parents[2]
PROMETHEUS, GRAFANA = ROOT / "packaging" / "prometheus", ROOT / "packaging" / "grafana"
NAME = re.compile(r"\btxmq_\w+")


@pytest.fixture(scope="module")
def documented() -> set[str]:
    """The series that a scrape has."""
    names = set[str]()
    row = re.compile(r"^\| `(\w+)` \| (\w+) \|", re.MULTILINE)
    for name, kind in row.findall((ROOT / "docs" / "METRICS.md").read_text("utf-8")):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        names.update(name + suffix for suffix in suffixes.get(kind, ("",)))
    return names


@pytest.fixture(scope="module")
def dashboards() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboards", ROOT / "scripts" / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dashboards_are_those_of_the_script(dashboards: ModuleType) -> None:
    texts = dashboards.texts()
    assert {path.name: path.read_text("utf-8") for path in GRAFANA.iterdir()} == texts
    assert len(texts) == 5


def test_dashboards_ask_for_metrics_that_exist(documented: set[str]) -> None:
    for path in GRAFANA.iterdir():
        panels = json.loads(path.read_text("utf-8"))["panels"]
        queries = [target["expr"] for panel in panels for target in panel["targets"]]
        assert queries
        named = {name for query in queries for name in NAME.findall(query)}
        assert named <= documented, path.name


def test_rules_ask_for_metrics_that_exist(documented: set[str]) -> None:
    rules = (PROMETHEUS / "txmq.rules.yml").read_text("utf-8")
    named = {name for line in re.findall(r"expr: (.+)", rules) for name in NAME.findall(line)}
    assert len(named) >= 10
    assert named <= documented


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (package prometheus)")
@pytest.mark.parametrize(
    "command",
    [
        "check config prometheus.yml",
        "check config --syntax-only ../container/prometheus.yml",  # its rules are mounted
        "test rules txmq.rules.test.yml",
    ],
)
def test_promtool_accepts(command: str) -> None:
    ran = subprocess.run(
        ["promtool", *command.split()],
        cwd=PROMETHEUS, capture_output=True, check=False, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
