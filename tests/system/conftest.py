"""What the system tests tell: how much was really killed and found out later; and the broker's log where one failed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TypeAlias

import pytest

from txmq.testing.broker import OwnBroker

LOG_TAIL = 4_000  # characters
Report: TypeAlias = Callable[[Mapping[str, int]], None]
_figures: dict[str, str] = {}


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Keeps a test's counts for the end of the run."""

    def keep(counts: Mapping[str, int]) -> None:
        _figures[request.node.name] = ", ".join(f"{name} {number}" for name, number in counts.items())

    return keep


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    for value in item.funcargs.values():
        broker = getattr(value, "broker", value)
        if report.failed and isinstance(broker, OwnBroker):
            report.sections.append(("broker's log", broker.log[-LOG_TAIL:]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("system tests: counts")
    for name, figures in _figures.items():
        terminalreporter.write_line(f"{name}: {figures}")
