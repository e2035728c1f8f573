"""What every test runs under: no failure of a Deferred goes unseen, and examples have
no deadline of their own.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any, cast

import hypothesis
import pytest

pytest_plugins = ["tests.fixtures_postgres", "tests.reporting"]

# Machines that run tests are shared and slow now and then; the limit is pytest's, for
# the test as a whole.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_finish() -> None:
    # What importing left behind stays for good: the collections below need not walk it
    # again after each test, and may come less often in between.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(autouse=True)
def no_unhandled_failure() -> Iterator[None]:
    """Fails a test that dropped a Deferred with a failure nobody handled: Twisted
    notices when it is collected.
    """
    if "twisted.internet.defer" not in sys.modules:
        yield
        return
    from twisted.logger import ILogObserver, globalLogPublisher

    failures: list[str] = []

    def observe(event: dict[str, Any]) -> None:
        if event.get("log_namespace") == "twisted.internet.defer" and "log_failure" in event:
            failures.append(event["log_failure"].getTraceback())

    observer = cast(
        "ILogObserver", observe
    )  # any callable is one, which zope's interfaces cannot tell mypy
    globalLogPublisher.addObserver(observer)
    try:
        yield
        gc.collect()
    finally:
        globalLogPublisher.removeObserver(observer)
    if failures:
        pytest.fail(
            "a Deferred failed and nobody handled it:\n" + "\n".join(failures), pytrace=False
        )
