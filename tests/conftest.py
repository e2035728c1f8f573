"""Settings of all tests, and a check that no failure of a Deferred is dropped."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import hypothesis
import pytest
import structlog

from tests import java_archive
from tests.patient_clients import patient_clients  # noqa: F401  # a fixture

# Before modules copy the environment for the processes that they start.
os.environ.update(java_archive.environment())
# A shell's background job (`make test &`) has it ignored, as would what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.fixtures_browser", "tests.fixtures_postgres", "tests.reporting"]

# Shared machines are slow now and then, so examples have no deadline of their own.
# The timeout of pytest limits the whole test.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection() -> None:
    # Modules and tests that are made now stay for good: there is nothing to collect.
    gc.disable()


def pytest_collection_finish() -> None:
    # Imported modules stay for good, so the collection after each test need not walk
    # them, and automatic collections may be less frequent.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.fixture(autouse=True)
def unconfigured_structlog() -> None:
    """Undo what tests before this one told structlog, which is the whole process's: the
    client's events would go there, and a command's log to standard output.
    """
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def no_unhandled_failure() -> Iterator[None]:
    """Fail a test that dropped a Deferred with an unhandled failure."""
    aged = _aging_collections()
    with _no_unhandled_failure():
        yield
        # What the test has made is young, unless the interpreter has collected since.
        gc.collect(1 if _aging_collections() == aged else 2)


@pytest.fixture(autouse=True, scope="module")
def no_unhandled_failure_of_the_module() -> Iterator[None]:
    """Fail the last test of a module where older objects dropped such a Deferred."""
    with _no_unhandled_failure():
        yield
        gc.collect()


def _aging_collections() -> tuple[int, ...]:
    """Return the numbers of collections after which survivors are old."""
    return tuple(generation["collections"] for generation in gc.get_stats()[1:])


@contextmanager
def _no_unhandled_failure() -> Iterator[None]:
    """Fail where Twisted reports an unhandled failure, as it does when it collects a
    Deferred.
    """
    if "twisted.internet.defer" not in sys.modules:
        yield
        return
    from twisted.logger import ILogObserver, globalLogPublisher

    failures: list[str] = []

    def observe(event: dict[str, Any]) -> None:
        if event.get("log_namespace") == "twisted.internet.defer" and "log_failure" in event:
            failures.append(event["log_failure"].getTraceback())

    # any callable is an observer, but mypy cannot see that from zope's interface
    observer = cast("ILogObserver", observe)
    globalLogPublisher.addObserver(observer)
    try:
        yield
    finally:
        globalLogPublisher.removeObserver(observer)
    if failures:
        pytest.fail(
            "a Deferred failed and no code handled the failure:\n" + "\n".join(failures),
            pytrace=False,
        )
