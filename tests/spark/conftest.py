"""One JVM and one broker process for all tests here; each test has topics and groups of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import txmq
from txmq.testing.spark import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STOP_LIMIT_S = 30


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Two cores, up to three attempts for a task, speculation where a test turns it on."""
    with local_session("local[2,3]", {"spark.log.level": "OFF"}) as session:
        yield session


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a broker process."""
    directory = tmp_path_factory.mktemp("broker")
    with (directory / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "txmq", "broker", "--data", str(directory / "data"), "--listen", "127.0.0.1:0"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=Path(__file__).parents[2]
        )
    assert process.stdout is not None
    ready, _, url = process.stdout.readline().strip().partition(" ")
    try:
        assert ready == "ready", (directory / "log.txt").read_text()
        yield url
    finally:
        process.terminate()
        process.wait(STOP_LIMIT_S)
        process.stdout.close()


@pytest.fixture
def client(broker: str) -> Iterator[txmq.Client]:
    with txmq.connect(broker, service="tests") as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test has."""
    return f"t-{request.node.name.replace('[', '-').replace(']', '')}"[:120]
