"""What tests tell beside "passed", the counts of a run at its end; and how they are shared out to several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

COUNTS = "counts"
# Spark starts a Java machine in each process that needs one; all others are kept together file by file.
TOGETHER = ("spark",)
LONGEST_FIRST = ("demo", "spark", "system", "simulation")
Report: TypeAlias = Callable[[Mapping[str, int]], None]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Keeps a test's counts for the end of the run."""

    def keep(counts: Mapping[str, int]) -> None:
        text = ", ".join(f"{name} {number}" for name, number in counts.items())
        request.node.user_properties.append((COUNTS, text))

    return keep


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups what shares fixtures of a file or folder, and begins with what takes longest, so that no process is left
    with it at the end.
    """
    tests = config.rootpath / "tests"
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item, _place(item, tests))))
    items.sort(key=lambda item: _rank(_place(item, tests)))


def _place(item: pytest.Item, tests: Path) -> Path:
    """Where it stands among the tests; its whole path where it is not among them."""
    return item.path.relative_to(tests) if item.path.is_relative_to(tests) else item.path


def _group(item: pytest.Item, place: Path) -> str:
    if place.parts[0] in TOGETHER:
        return place.parts[0]
    return item.nodeid if place.parts[0] in ("simulation", "system") else str(place)


def _rank(place: Path) -> int:
    return LONGEST_FIRST.index(place.parts[0]) if place.parts[0] in LONGEST_FIRST else len(LONGEST_FIRST)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports: Iterable[pytest.TestReport] = terminalreporter.stats.get("passed", ())
    told = ((one.nodeid.rpartition("::")[2], *told) for one in reports for told in one.user_properties)
    lines = [f"{test}: {text}" for test, name, text in told if name == COUNTS]
    if lines:
        terminalreporter.section("counts")
    for line in lines:
        terminalreporter.write_line(line)
