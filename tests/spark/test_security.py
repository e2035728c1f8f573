"""Spark at a broker with TLS and users: it gets in by names of files, and shows no
password, also not one that a URL has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from pyspark.errors import PySparkException

import txmq
from tests.certificates import Authority
from tests.cli.support import run
from tests.spark.consuming import drain
from tests.spark.killed_driver import start_stream
from tests.spark.stream_driver import texts
from tests.spark.test_broker_urls import VARIABLES
from tests.system.test_security import keys
from txmq.testing.processes import Running
from txmq_spark import job_options
from txmq_spark.command_line import main

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # includes the start of a JVM on a loaded machine
LAST = 20  # queries on the pages of Spark's UI
PASSWORD = "a-password-of-a-test"
# what spark/README.md names
GRANTS = (
    ("consumer", "topic:orders"),
    ("producer", "topic:copies"),
    ("producer", "service:txmq-spark"),
    ("consumer", "group:billing"),
    ("operator", "group:billing"),
)


class Secured(NamedTuple):
    """A broker with TLS, and a user named spark."""

    place: str
    words: Path  # a file with the password of all users
    ca: Path

    def url(self, user: str) -> str:
        return f"txmqs://{user}:{PASSWORD}@{self.place}/?ca={self.ca}"

    @property
    def options(self) -> dict[str, str]:
        files = {"passwordFile": str(self.words), "ca": str(self.ca)}
        return {"url": f"txmqs://{self.place}", "user": "spark", **files}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    authority, words = Authority(directory), directory / "words"
    files = authority.sign("broker")
    words.write_text(PASSWORD)
    settings = directory / "broker.toml"
    settings.write_text(
        f'[broker]\ndata = "{directory / "data"}"\nlisten = "127.0.0.1:0"\n'
        f'[tls]\ncert = "{files.cert}"\nkey = "{files.key}"\n'
    )
    data = ("--data", str(directory / "data"), "--password-file", str(words))
    assert run("user", "init-admin", "root", *data).exit_code == 0
    running = Running(directory, "broker", "--config", str(settings))
    place = running.first_line().removeprefix("ready txmqs://").strip()
    broker = Secured(place, words, authority.ca)
    try:
        prepare(broker)
        yield broker
    finally:
        running.terminate()


def prepare(broker: Secured) -> None:
    with txmq.connect(broker.url("root"), service="tests") as root:
        for topic in ("orders", "copies", "secrets", "doomed"):
            root.call("topic.create", name=topic, partitions=1)
        root.call("user.set", name="spark", roles=[], new=True, password=keys(PASSWORD))
        for topic in ("orders", "doomed"):
            root.send_many(topic, texts(*range(5)))
        drain(root, "billing", "orders", lambda message: message.body != b"3")
        for verb, resource in GRANTS:
            root.call("acl.grant", name="spark", what=verb, resource=resource)


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
    with txmq.connect(secured.url("root")) as root:
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
    query = start_stream(stream.select("body"), url, "secrets", str(tmp_path))
    query.awaitTermination()
    jvm: Any = query
    shown += [jvm._jsq.explainInternal(True), query.recentProgress[-1].json]
    with txmq.connect(url) as root:
        root.call("topic.delete", name="doomed")
    with pytest.raises(PySparkException, match="it was deleted") as failed:
        start_stream(stream.select("body"), url, "secrets", str(tmp_path)).awaitTermination()
    shown.append(str(failed.value))
    store: Any = spark._jsparkSession.sharedState().statusStore()
    executions = store.executionsList(max(0, store.executionsCount() - LAST), LAST)
    for number in range(executions.size()):
        one = executions.apply(number)
        texts = (one.physicalPlanDescription(), one.description(), one.details())
        shown += [text or "" for text in texts]  # null until it is planned
    assert any("doomed" in text or "AppendData" in text for text in shown)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    shown += [path.read_text("utf-8", "replace") for path in files]
    [log] = Path(str(spark.conf.get("spark.eventLog.dir")).removeprefix("file:")).iterdir()
    events = log.read_text("utf-8", "replace")
    assert "SparkListenerEnvironmentUpdate" in events
    assert "SparkListenerSQLExecutionStart" in events
    shown.append(events)
    assert [text for text in shown if PASSWORD in text] == []


def test_the_command_gets_in_by_options_and_environment(
    spark: SparkSession,
    secured: Secured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TXMQ_PASSWORD_FILE", str(secured.words))
    monkeypatch.setattr(job_options, "job_session", lambda: nullcontext(spark))
    asked = ["--url", f"txmqs://{secured.place}", "--user", "spark", "--ca", str(secured.ca)]
    asked += ["--plan", str(tmp_path / "plan")]
    report = ["--report", str(tmp_path / "report.html")]
    assert main(["reconcile", *asked, "--group", "billing", *report]) == 0
    assert main(["replay", *asked, "--no-wait", "--rate", "0", "--ramp", "0"]) == 0
    told = capsys.readouterr()
    assert "1 " in told.out
    texts = [path.read_text("utf-8", "replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert [text for text in (told.out, told.err, *texts) if PASSWORD in text] == []
