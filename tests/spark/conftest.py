"""One JVM and one broker process for all tests of this folder.

Each test has topics and consumer groups of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

import txmq
from txmq.testing.own_broker import OwnBroker
from txmq.testing.wait import PATIENCE_S
from txmq_spark.session import local_session as local
from txmq_spark.session.local_session import TASK_ATTEMPTS, local_session
from txmq_spark.session.spark_session import interruptible_calls

HERE = Path(__file__).parent
SETTINGS = {
    "spark.log.level": "OFF",
    # Interpreting a few rows is faster than compiling code for them.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # Verifying Spark's classes takes a machine half a second.
    "spark.driver.defaultJavaOptions": "-XX:+UnlockDiagnosticVMOptions"
    " -XX:-BytecodeVerificationRemote",
    "spark.eventLog.compress": "false",
    "spark.eventLog.rolling.enabled": "false",
}
# Programs of Spark's workers. It waits 10 s for some of them to start; where nothing is
# compiled yet, and the machine is busy, the first one would be late.
WORKERS = (
    "pyspark.daemon",
    "pyspark.worker",
    "pyspark.sql.streaming.python_streaming_source_runner",
)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, interruptible: None) -> Iterator[SparkSession]:
    """A session with two cores, as many attempts per task as `txmq-spark` has without
    spark-submit, and a log of its events.

    Speculation is off unless a test turns it on.
    """
    for module in WORKERS:
        importlib.import_module(module)
    events = tmp_path_factory.mktemp("events").as_uri()
    events_kept = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": events}
    master = f"local[2,{TASK_ATTEMPTS}]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "JVM_ENDS_S", PATIENCE_S)
        with local_session(master, SETTINGS | events_kept) as session:
            yield session


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Give each test here the time in which a JVM starts on a busy machine."""
    for item in items:
        if item.path.parent == HERE and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(5 * PATIENCE_S))


def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Leave the cores to other tests when one has run out of its time."""
    if call.excinfo is not None and isinstance(call.excinfo.value, pytest.fail.Exception):
        end_jobs()


def end_jobs() -> None:
    """End all jobs and queries of the session, if there is one."""
    context = SparkContext._active_spark_context
    if context is not None:
        session = SparkSession(context)
        for query in session.streams.active:
            query.stop()
        context.cancelAllJobs()
        # A call that was cut leaves the next ones to a new thread of the JVM. By the
        # session that is active there, writes find data sources (4.3.0, 2026-11-29).
        jvm: Any = session._jvm
        jvm.SparkSession.setActiveSession(session._jsparkSession)


@pytest.fixture(scope="session")
def interruptible() -> Iterator[None]:
    """Calls to Java whose connection ends when a test runs out of its time in them."""
    with interruptible_calls():
        yield


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a broker process."""
    with OwnBroker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker.url


@pytest.fixture
def client(broker: str) -> Iterator[txmq.Client]:
    with txmq.connect(broker, service="tests", timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return f"t-{request.node.name.replace('[', '-').replace(']', '')}"[:120]
