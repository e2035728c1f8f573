"""What tests tell beside "passed", the counts of a run at its end; and how they are
shared out to several processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

COUNTS = "counts"
# Spark starts a Java machine in each process that needs one; all others are kept
# together file by file.
TOGETHER = ("spark",)
# The longest first, so that none is left to one process at the end; those of "system"
# before those that are shorter.
FIRST = ("demo", "spark")
CALCULATES = "simulation"  # waits for nothing: always one of them beside those that wait,
SPREAD = 0.9  # but none at the very end, each being long for one process
Report: TypeAlias = Callable[[Mapping[str, int]], None]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Keeps a test's counts for the end of the run."""

    def keep(counts: Mapping[str, int]) -> None:
        text = ", ".join(f"{name} {number}" for name, number in counts.items())
        request.node.user_properties.append((COUNTS, text))

    return keep


def pytest_xdist_auto_num_workers() -> int | None:
    """Two processes more than there are cores: tests with processes of their own wait
    for them most of the time. PYTEST_XDIST_AUTO_NUM_WORKERS sets another number.
    """
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return 2 + (cores or 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups what shares fixtures of a file or folder, and sorts the groups by when
    they are to begin.
    """
    tests = config.rootpath / "tests"
    groups: dict[pytest.Item, str] = {}
    folders: dict[str, str] = {}
    for item in items:
        place = _place(item, tests)
        groups[item] = _group(item, place)
        folders[groups[item]] = place.parts[0]
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    begins = when_to_begin(folders)
    items.sort(key=lambda item: begins[groups[item]])


def when_to_begin(folders: Mapping[str, str]) -> dict[str, float]:
    """Places in a row for groups of tests, each given with its folder."""
    calculating = [group for group, folder in folders.items() if folder == CALCULATES]
    others = [group for group, folder in folders.items() if folder not in (*FIRST, CALCULATES)]
    others.sort(key=lambda group: folders[group] != "system")
    first = {
        group: FIRST.index(folder) - 2.0 for group, folder in folders.items() if folder in FIRST
    }
    beside = {group: SPREAD * number / len(calculating) for number, group in enumerate(calculating)}
    return first | beside | {group: number / len(others) for number, group in enumerate(others)}


def _place(item: pytest.Item, tests: Path) -> Path:
    """Where it stands among the tests; its whole path where it is not among them."""
    return item.path.relative_to(tests) if item.path.is_relative_to(tests) else item.path


def _group(item: pytest.Item, place: Path) -> str:
    if place.parts[0] in TOGETHER:
        return place.parts[0]
    return item.nodeid if place.parts[0] in ("simulation", "system") else str(place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports: Iterable[pytest.TestReport] = terminalreporter.stats.get("passed", ())
    told = (
        (one.nodeid.rpartition("::")[2], *told) for one in reports for told in one.user_properties
    )
    lines = [f"{test}: {text}" for test, name, text in told if name == COUNTS]
    if lines:
        terminalreporter.section("counts")
    for line in lines:
        terminalreporter.write_line(line)
