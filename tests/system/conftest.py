"""A failed system test reports the end of the log of its broker."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from txmq.testing.own_broker import OwnBroker

LOG_TAIL = 4_000  # characters


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    for value in item.funcargs.values():
        broker = getattr(value, "broker", value)
        if report.failed and isinstance(broker, OwnBroker):
            report.sections.append(("broker's log", broker.log[-LOG_TAIL:]))
    return report
