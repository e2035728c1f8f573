"""Kombu's and Celery's own integration tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.frameworks.suites import CELERY, KOMBU, Suite, run, source_of, unexpected
from txmq.testing.broker_thread import BrokerThread


@pytest.mark.timeout(3_600)  # they are a hundred tests
@pytest.mark.parametrize("suite", [KOMBU, CELERY], ids=lambda suite: suite.package)
def test_their_own_tests_pass(suite: Suite, tmp_path: Path) -> None:
    try:
        source_of(suite.package)
    except subprocess.CalledProcessError:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the source of {suite.package} cannot be had: is there a package index?")
    with BrokerThread(tmp_path / "data") as broker:
        outcomes = run(suite, broker.url, tmp_path)
    assert not unexpected(outcomes)
    assert len(outcomes.passed) >= suite.passing
