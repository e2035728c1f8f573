"""One JVM and one broker process for all tests here; each test has topics and groups of
its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import txmq
from txmq.testing.broker import OwnBroker
from txmq.testing.spark import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


SETTINGS = {
    "spark.log.level": "OFF",
    # A handful of rows is sooner interpreted than compiled for.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Two cores, up to three attempts for a task, speculation where a test turns it
    on.
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
    """A name that no other test has."""
    return f"t-{request.node.name.replace('[', '-').replace(']', '')}"[:120]
