"""Figures of the system tests: how much was really killed, lost its answer, was found out later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import pytest

Report: TypeAlias = Callable[[Mapping[str, int]], None]
_figures: dict[str, str] = {}


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Keeps a test's counts for the end of the run."""

    def keep(counts: Mapping[str, int]) -> None:
        _figures[request.node.name] = ", ".join(f"{name} {number}" for name, number in counts.items())

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("system tests: counts")
    for name, figures in _figures.items():
        terminalreporter.write_line(f"{name}: {figures}")
