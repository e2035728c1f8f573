"""Spark at a broker with TLS and users: it gets in by names of files, and shows no
password, also not one that a URL has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

import txmq
from tests.spark.consuming import let_die
from tests.spark.killed_driver import run_stream
from tests.spark.secured import PASSWORD, Secured, secured_broker
from tests.spark.test_broker_urls import VARIABLES
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq_spark.commands import plan_commands
from txmq_spark.commands.command_line import main

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LAST = 20  # queries on the pages of Spark's UI


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as broker:
        yield broker


def bodies(spark: SparkSession, topic: str, **options: str) -> list[bytes]:
    frame = spark.read.format("txmq").options(**options, topic=topic).load()
    return sorted(bytes(row["body"]) for row in frame.collect())


def test_a_user_gets_in_by_options_and_no_further_than_its_grants(
    spark: SparkSession, secured: Secured
) -> None:
    options = secured.options
    frame = spark.read.format("txmq").options(**options, topic="orders").load()
    writer = frame.select("body", "key").write.format("txmq").mode("append")
    writer.options(**options, topic="copies", idempotency_key="once").save()
    with txmq.connect(secured.url("root"), timeout=PATIENCE_S) as root:
        assert root.call("topic.show", name="copies")["ends"] == [5]
    letters = spark.read.format("txmq").options(**options, letters="billing").load()
    assert [bytes(row["body"]) for row in letters.select("body").collect()] == [b"3"]
    for wrong, says in (
        (options | {"topic": "secrets"}, "AccessDenied"),
        (options | {"topic": "orders", "passwordFile": str(secured.ca)}, "LoginFailed"),
        (options | {"topic": "orders", "user": "eve"}, "LoginFailed"),
        ({"url": options["url"], "ca": options["ca"], "topic": "orders"}, "asks for a login"),
    ):
        with pytest.raises(PySparkException, match=says) as refused:
            bodies(spark, **wrong)
        assert PASSWORD not in str(refused.value)


def test_no_password_is_in_plans_progress_errors_events_or_the_pages_of_sparks_ui(
    spark: SparkSession, secured: Secured, tmp_path: Path
) -> None:
    url = secured.url("root")
    frame = spark.read.format("txmq").options(url=url, topic="doomed").load()
    frame.select("body").write.format("txmq").options(url=url, topic="secrets").mode(
        "append"
    ).save()
    shown = [frame._jdf.queryExecution().toString()]
    stream = spark.readStream.format("txmq").options(url=url, topic="doomed").load()
    query = run_stream(stream.select("body"), url, "secrets", str(tmp_path))
    jvm: Any = query
    shown += [jvm._jsq.explainInternal(True), query.recentProgress[-1].json]
    with txmq.connect(url, timeout=PATIENCE_S) as root:
        root.call("topic.delete", name="doomed")
    with pytest.raises(PySparkException, match="it was deleted") as failed:
        run_stream(stream.select("body"), url, "secrets", str(tmp_path))
    shown.append(str(failed.value))
    # Spark tells its pages and its log in order, a while later.
    spark.sparkContext.setJobDescription(str(tmp_path))
    spark.range(1).collect()
    spark.sparkContext.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]
    wait_until(lambda: str(tmp_path) in "".join(ui_texts(spark)), what="the pages")
    shown += ui_texts(spark)
    assert any("doomed" in text or "AppendData" in text for text in shown)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    shown += [path.read_text("utf-8", "replace") for path in files]
    [log] = Path(str(spark.conf.get("spark.eventLog.dir")).removeprefix("file:")).iterdir()
    wait_until(lambda: str(tmp_path) in log.read_text("utf-8", "replace"), what="the log")
    events = log.read_text("utf-8", "replace")
    assert "SparkListenerEnvironmentUpdate" in events
    assert "SparkListenerSQLExecutionStart" in events
    shown.append(events)
    assert [text for text in shown if PASSWORD in text] == []


def ui_texts(spark: SparkSession) -> list[str]:
    """Return what the pages of Spark's UI say of the last queries."""
    store: Any = spark._jsparkSession.sharedState().statusStore()
    executions = store.executionsList(max(0, store.executionsCount() - LAST), LAST)
    found = [executions.apply(number) for number in range(executions.size())]
    texts = [(one.physicalPlanDescription(), one.description(), one.details()) for one in found]
    return [text or "" for three in texts for text in three]  # null until it is planned


def test_the_command_gets_in_by_its_url_and_environment(
    spark: SparkSession,
    secured: Secured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TXMQ_PASSWORD_FILE", str(secured.words))
    monkeypatch.setattr(plan_commands, "job_session", lambda: nullcontext(spark))
    asked = ["--broker", f"txmqs://spark@{secured.place}?ca={secured.ca}"]
    asked += ["--plan", str(tmp_path / "plan")]
    report = ["--report", str(tmp_path / "report.html")]
    assert main(["reconcile", *asked, "--group", "billing", *report]) == 0
    assert main(["replay", *asked, "--no-wait", "--rate", "0", "--ramp", "0"]) == 0
    told = capsys.readouterr()
    assert "1 " in told.out
    texts = [path.read_text("utf-8", "replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert [text for text in (told.out, told.err, *texts) if PASSWORD in text] == []
    with txmq.connect(secured.url("root"), timeout=PATIENCE_S) as root:
        let_die(root, "billing", "orders", [b"3"])  # again: other tests look for the letter
