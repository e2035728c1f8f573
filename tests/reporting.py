"""What tests tell beside "passed", the counts of a run at its end; and how they are shared out to several processes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

COUNTS = "counts"
# Spark starts a Java machine in each process that needs one; all others are kept together file by file.
TOGETHER = ("spark",)
# The longest first, so that none is left to one process at the end; then those that wait beside those that calculate.
EARLY = {"demo": 0, "spark": 1, "system": 2, "simulation": 2}
LATE = 3
Report: TypeAlias = Callable[[Mapping[str, int]], None]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Keeps a test's counts for the end of the run."""

    def keep(counts: Mapping[str, int]) -> None:
        text = ", ".join(f"{name} {number}" for name, number in counts.items())
        request.node.user_properties.append((COUNTS, text))

    return keep


def pytest_xdist_auto_num_workers() -> int | None:
    """One process more than there are cores: tests with processes of their own wait for them a good part of the time.
    PYTEST_XDIST_AUTO_NUM_WORKERS sets another number.
    """
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return 1 + (cores or 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups what shares fixtures of a file or folder, and sorts the groups by when they are to begin."""
    tests = config.rootpath / "tests"
    order: dict[pytest.Item, tuple[int, int]] = {}
    met: Counter[str] = Counter()
    for item in items:
        place = _place(item, tests)
        item.add_marker(pytest.mark.xdist_group(_group(item, place)))
        folder = place.parts[0]
        order[item] = EARLY.get(folder, LATE), met[folder] if folder in EARLY else 0
        met[folder] += 1
    items.sort(key=order.__getitem__)


def _place(item: pytest.Item, tests: Path) -> Path:
    """Where it stands among the tests; its whole path where it is not among them."""
    return item.path.relative_to(tests) if item.path.is_relative_to(tests) else item.path


def _group(item: pytest.Item, place: Path) -> str:
    if place.parts[0] in TOGETHER:
        return place.parts[0]
    return item.nodeid if place.parts[0] in ("simulation", "system") else str(place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports: Iterable[pytest.TestReport] = terminalreporter.stats.get("passed", ())
    told = ((one.nodeid.rpartition("::")[2], *told) for one in reports for told in one.user_properties)
    lines = [f"{test}: {text}" for test, name, text in told if name == COUNTS]
    if lines:
        terminalreporter.section("counts")
    for line in lines:
        terminalreporter.write_line(line)
