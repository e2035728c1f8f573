"""Counts that tests report, and the order and grouping of tests in several
processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

COUNTS = "counts"
# These folders stay in one process each, because Spark starts a Java machine in each
# process that needs one. Other tests stay together file by file.
ONE_PROCESS = ("spark",)
# Each test of these folders may run in another process.
TEST_BY_TEST = ("simulation", "system")
# The longest folders begin first, so that no process is left with one at the end.
FIRST = ("demo", "spark")
# Simulations never wait, so one of them always runs beside tests that do. None begins
# at the very end, because each is long for one process.
CALCULATING = "simulation"
SPREAD = 0.9
Report: TypeAlias = Callable[[Mapping[str, int]], None]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """A function that keeps the counts of a test for the end of the run."""

    def keep(counts: Mapping[str, int]) -> None:
        text = ", ".join(f"{name} {number}" for name, number in counts.items())
        request.node.user_properties.append((COUNTS, text))

    return keep


def pytest_xdist_auto_num_workers() -> int | None:
    """Return two more processes than there are cores.

    Tests with processes of their own wait for them most of the time.
    PYTEST_XDIST_AUTO_NUM_WORKERS sets another number.
    """
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return 2 + (cores or 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests that share fixtures, and sort the groups by their start."""
    tests = config.rootpath / "tests"
    groups: dict[pytest.Item, str] = {}
    folders: dict[str, str] = {}
    for item in items:
        path = item.path.relative_to(tests) if item.path.is_relative_to(tests) else item.path
        groups[item] = _group(item, path)
        folders[groups[item]] = path.parts[0]
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    starts = start_order(folders)
    items.sort(key=lambda item: starts[groups[item]])


def start_order(folders: Mapping[str, str]) -> dict[str, float]:
    """Return a sort key for each group of tests, which is given with its folder."""
    calculating = [group for group, folder in folders.items() if folder == CALCULATING]
    others = [group for group, folder in folders.items() if folder not in (*FIRST, CALCULATING)]
    others.sort(key=lambda group: folders[group] != "system")
    first = {
        group: FIRST.index(folder) - 2.0 for group, folder in folders.items() if folder in FIRST
    }
    beside = {group: SPREAD * number / len(calculating) for number, group in enumerate(calculating)}
    return first | beside | {group: number / len(others) for number, group in enumerate(others)}


def _group(item: pytest.Item, path: Path) -> str:
    folder = path.parts[0]
    if folder in ONE_PROCESS:
        return folder
    return item.nodeid if folder in TEST_BY_TEST else str(path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed: Iterable[pytest.TestReport] = terminalreporter.stats.get("passed", ())
    lines = [
        f"{test.nodeid.rpartition('::')[2]}: {text}"
        for test in passed
        for name, text in test.user_properties
        if name == COUNTS
    ]
    if lines:
        terminalreporter.section("counts")
    for line in lines:
        terminalreporter.write_line(line)
