"""One JVM and one broker process for all tests of this folder.

Each test has topics and consumer groups of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import txmq
from txmq.testing.own_broker import OwnBroker
from txmq_spark.local_session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


SETTINGS = {
    "spark.log.level": "OFF",
    # Interpreting a few rows is faster than compiling code for them.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session with two cores and up to three attempts per task.

    Speculation is off unless a test turns it on.
    """
    with local_session("local[2,3]", SETTINGS) as session:
        yield session


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a broker process."""
    with OwnBroker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker.url


@pytest.fixture
def client(broker: str) -> Iterator[txmq.Client]:
    with txmq.connect(broker, service="tests") as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return f"t-{request.node.name.replace('[', '-').replace(']', '')}"[:120]
