"""Counts that tests report, tests that are left out, and the order and grouping of
tests in several processes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TypeAlias
from zlib import crc32

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from tests.kinds import is_deep, is_needed

COUNTS = "counts"
# Spark starts a Java machine in each process that needs one. With one only, its folder
# would be at work after all others have ended. Other tests stay together file by file.
PROCESSES = {"spark": 2}
# The cluster has machines of its own. One of the two processes of Spark would have more
# than twice the work of the other one, and be at work after all others have ended.
APART = ("tests/spark/test_cluster.py",)
# Each test of these folders may run in another process.
TEST_BY_TEST = ("simulation", "system")
# The longest folders begin first, so that no process is left with one at the end.
FIRST = ("spark", "demo", "frameworks", "system")
# At the very end there are tests only that take the least, so that all processes end
# together.
SHORT = ("batch", "core", "model", "store", "wire")
OTHERS_UNTIL = 0.9
Report: TypeAlias = Callable[[Mapping[str, int]], None]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """A function that keeps the counts of a test for the end of the run."""

    def keep(counts: Mapping[str, int]) -> None:
        text = ", ".join(f"{name} {number}" for name, number in counts.items())
        request.node.user_properties.append((COUNTS, text))

    return keep


def pytest_xdist_auto_num_workers() -> int | None:
    """Return three processes for each core.

    Tests wait for other processes for two thirds of their time (docs/decisions/0159).
    PYTEST_XDIST_AUTO_NUM_WORKERS sets another number.
    """
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return 3 * (cores or 1)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling | None:
    """Return the scheduler for `--dist loadscope`: it keeps our groups together.

    xdist has groups of its own (`--dist loadgroup`). It marks them in the ids of the
    tests, which pytest 9.2 no longer lets it change: each test was its own group.
    """
    if config.getvalue("dist") != "loadscope":
        return None
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = group_of
    return scheduler


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that `make test` leaves to `make deep`."""
    if is_deep(item.nodeid):
        item.add_marker(pytest.mark.deep)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file for `make test` that it does not need, nor the packages of it."""
    inside = collection_path.suffix == ".py" and collection_path.is_relative_to(config.rootpath)
    if not inside or "not deep" not in config.option.markexpr:
        return None
    return None if is_needed(collection_path.relative_to(config.rootpath).as_posix()) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the groups of tests by their start."""
    groups = [group_of(item.nodeid) for item in items]
    starts = start_order(
        {group: folder_of(item.nodeid) for group, item in zip(groups, items, strict=True)}
    )
    order = sorted(range(len(items)), key=lambda number: starts[groups[number]])
    items[:] = [items[number] for number in order]


def start_order(folders: Mapping[str, str]) -> dict[str, float]:
    """Return a sort key for each group of tests, which is given with its folder.

    The groups of a folder start at even distances: some folders calculate, others wait,
    so the processors have work all the time only if all run beside each other.
    """
    sizes, before = Counter(folders.values()), Counter[str]()
    starts = {}
    for group, folder in folders.items():
        end = 1.0 if folder in SHORT else OTHERS_UNTIL
        starts[group] = (
            FIRST.index(folder) - len(FIRST)
            if folder in FIRST
            else end * before[folder] / sizes[folder]
        )
        before[folder] += 1
    return starts


def folder_of(nodeid: str) -> str:
    """Return the folder of a test below `tests`."""
    return _folder_of_file(nodeid.partition("::")[0])


@cache
def _folder_of_file(file: str) -> str:
    parts = PurePosixPath(file).parts
    return parts[1] if parts[0] == "tests" and len(parts) > 2 else parts[0]


def group_of(nodeid: str) -> str:
    """Return the group of a test, whose tests all run in one process."""
    folder, file = folder_of(nodeid), nodeid.partition("::")[0]
    if folder in PROCESSES and file not in APART:
        return f"{folder}-{crc32(PurePosixPath(file).name.encode()) % PROCESSES[folder]}"
    return nodeid if folder in TEST_BY_TEST else file


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
