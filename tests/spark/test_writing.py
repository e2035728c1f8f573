"""Writing as one job; the messages are counted by reading the topic back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql.types import StringType, StructField, StructType

from txmq.batch import BatchView
from txmq.errors import ConfigError, Conflict, LocalProtocolError, TransactionAborted
from txmq.model.keys import partition_of
from txmq.model.message import Message
from txmq_spark import TxmqDataSource
from txmq_spark.source.arrow_messages import OffsetRange
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.data_source import MESSAGE_TYPES
from txmq_spark.source.job_bundles import StoredBundle
from txmq_spark.source.message_columns import check_columns
from txmq_spark.source.options import WriteOptions
from txmq_spark.source.writing import JobWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

    import txmq

ROWS = StructType([field for field in MESSAGE_TYPES if field.name in ("body", "key")])


def sent(broker: str, topic: str) -> list[tuple[int, Message]]:
    """Return all messages of the topic with their partitions, in order."""
    found = []
    with BrokerLink(broker) as link:
        for partition, end in enumerate(link.call("topic.show", name=topic)["ends"]):
            for chunk in link.chunks(OffsetRange(topic, partition, 0, end)) if end else ():
                view = BatchView(chunk.batch)
                rows = zip(view.bodies, view.keys, view.tags, view.headers, strict=True)
                found += [
                    (partition, Message(body, key, tag, dict(pairs) or None))
                    for body, key, tag, pairs in rows
                ]
    return found


def bodies(broker: str, topic: str) -> Counter[bytes]:
    return Counter(message.body for _partition, message in sent(broker, topic))


def undecided(client: txmq.Client) -> set[str]:
    """Return the tokens; the broker may end those that other tests have left."""
    return {one["token"] for one in client.call("tx.list")["transactions"]}


# Driver and tasks of a job without Spark, in any order.


def driver(broker: str, topic: str, key: str | None) -> JobWriter:
    return JobWriter.for_schema(WriteOptions(broker, topic, key), ROWS, overwrite=False)


def task(writer: JobWriter, *texts: str) -> StoredBundle:
    return writer.write(
        iter([pa.record_batch({"body": [text.encode() for text in texts], "key": list(texts)})])
    )


@pytest.fixture
def made(client: txmq.Client, topic: str) -> str:
    """The topic, with three partitions."""
    client.call("topic.create", name=topic, partitions=3)
    return topic


def test_nothing_is_visible_before_the_driver_decides(broker: str, made: str) -> None:
    writer = driver(broker, made, None)
    stored = [task(writer, "a", "b"), task(writer, "c"), writer.write(iter([]))]
    assert bodies(broker, made) == Counter()
    writer.commit(stored)
    assert bodies(broker, made) == Counter([b"a", b"b", b"c"])


def test_attempts_that_the_driver_does_not_name_are_dropped(
    broker: str, made: str, client: txmq.Client
) -> None:
    """One task was repeated after it had stored its bundle, another ran twice."""
    writer = driver(broker, made, None)
    before = undecided(client)
    died, winner, copy = task(writer, "a"), task(writer, "a"), task(writer, "a")
    assert len(undecided(client) - before) == 3
    writer.commit([winner])
    assert bodies(broker, made) == Counter([b"a"])
    assert undecided(client) <= before
    assert len({died.token, winner.token, copy.token}) == 3


def test_a_job_that_is_run_again_sends_once(broker: str, made: str) -> None:
    for _ in range(3):
        writer = driver(broker, made, "orders of Monday")
        writer.commit([task(writer, "a"), task(writer, "b")])
    assert bodies(broker, made) == Counter([b"a", b"b"])
    other = driver(broker, made, "orders of Tuesday")
    other.commit([task(other, "a")])
    assert bodies(broker, made) == Counter([b"a", b"a", b"b"])


def test_a_key_names_a_job_of_one_topic(broker: str, made: str, client: txmq.Client) -> None:
    client.call("topic.create", name=f"{made}-2", partitions=1)
    for topic in (made, f"{made}-2"):
        writer = driver(broker, topic, "Monday")
        writer.commit([task(writer, "a")])
    assert (bodies(broker, made), bodies(broker, f"{made}-2")) == (Counter([b"a"]), Counter([b"a"]))


def test_a_job_whose_driver_died_is_run_again_and_sends_once(
    broker: str, made: str, client: txmq.Client
) -> None:
    before = undecided(client)
    task(driver(broker, made, "died"), "a")
    again = driver(broker, made, "died")
    again.commit([task(again, "a")])
    assert bodies(broker, made) == Counter([b"a"])
    assert undecided(client) <= before


def test_a_driver_that_died_after_its_decision_changes_nothing(broker: str, made: str) -> None:
    first = driver(broker, made, "late")
    second = driver(broker, made, "late")
    theirs, ours = task(first, "a"), task(second, "a")
    first.commit([theirs])
    second.commit([ours])
    second.abort([ours])
    assert bodies(broker, made) == Counter([b"a"])


def test_a_job_that_was_rolled_back_can_be_run_again(
    broker: str, made: str, client: txmq.Client
) -> None:
    before = undecided(client)
    for _ in range(2):
        failed = driver(broker, made, "failing")
        failed.abort([task(failed, "a"), None])
    assert bodies(broker, made) == Counter()
    assert undecided(client) <= before
    again = driver(broker, made, "failing")
    again.commit([task(again, "a")])
    assert bodies(broker, made) == Counter([b"a"])


def test_two_runs_at_once_send_once_and_the_loser_raises_an_error(broker: str, made: str) -> None:
    one, other = driver(broker, made, "race"), driver(broker, made, "race")
    mine, theirs = task(one, "a"), task(other, "a")
    other.abort([theirs])
    with pytest.raises(TransactionAborted, match="run it again"):
        one.commit([mine])
    assert bodies(broker, made) == Counter()


def test_a_task_may_have_more_than_fits_in_a_frame(broker: str, made: str) -> None:
    chance = Random(7)
    large = [chance.randbytes(3_000_000) for _ in range(8)]
    writer = driver(broker, made, None)
    one = [pa.record_batch({"body": [body], "key": ["k"]}) for body in large]
    writer.commit([writer.write(iter(one))])
    assert [message.body for _partition, message in sent(broker, made)] == large


def test_rows_name_their_topics(broker: str, made: str, client: txmq.Client) -> None:
    client.call("topic.create", name=f"{made}-2", partitions=1)
    schema = StructType([*ROWS, StructField("topic", StringType())])
    writer = JobWriter.for_schema(WriteOptions(broker, None, None), schema, overwrite=False)
    rows = pa.record_batch(
        {"body": [b"a", b"b", b"c"], "key": ["k", "k", "k"], "topic": [made, f"{made}-2", made]}
    )
    writer.commit([writer.write(iter([rows]))])
    assert (bodies(broker, made), bodies(broker, f"{made}-2")) == (
        Counter([b"a", b"c"]),
        Counter([b"b"]),
    )


@pytest.mark.parametrize(("column", "name"), [([None], "body"), ([b"x"], "topic")])
def test_rows_without_a_body_or_a_topic_are_refused(
    broker: str, made: str, column: list[Any], name: str
) -> None:
    writer = JobWriter(WriteOptions(broker, None, None), driver(broker, made, None)._job)
    topics = [None] if name == "topic" else [made]
    rows = pa.record_batch(
        {"body": pa.array(column, pa.binary()), "topic": pa.array(topics, pa.string())}
    )
    with pytest.raises(ConfigError, match=f"no {name}"):
        writer.write(iter([rows]))


@pytest.mark.parametrize("name", ["key", "tag", "topic", "headers"])
def test_a_string_that_is_no_utf_8_is_refused_by_its_column(
    broker: str, made: str, name: str
) -> None:
    writer = JobWriter(WriteOptions(broker, None, None), driver(broker, made, None)._job)
    data = pa.array([b"\xffabc"], pa.binary()).buffers()
    text = pa.Array.from_buffers(pa.string(), 1, data)
    if name == "headers":
        text = pa.MapArray.from_arrays([0, 1], pa.array(["n"]), text)
    columns = {"body": pa.array([b"x"]), "topic": pa.array([made])} | {name: text}
    with pytest.raises(ConfigError, match=rf"a {name} that is no UTF-8: b'\\xffabc'"):
        writer.write(iter([pa.record_batch(columns)]))
    assert bodies(broker, made) == Counter()


@pytest.mark.parametrize(("name", "limit"), [("key", 1_024), ("tag", 127)])
def test_a_text_beyond_its_limit_is_refused(broker: str, made: str, name: str, limit: int) -> None:
    writer = driver(broker, made, None)
    longest: dict[str, list[Any]] = {"body": [b"x"], name: ["é" * (limit // 2) + "x" * (limit % 2)]}
    longer = longest | {name: [f"{longest[name][0]}x"]}
    with pytest.raises(LocalProtocolError, match=rf"a {name} of \d+ bytes exceeds the limit"):
        writer.write(iter([pa.record_batch(longer)]))
    writer.commit([writer.write(iter([pa.record_batch(longest)]))])
    [(_partition, message)] = sent(broker, made)
    assert getattr(message, name) == longest[name][0]


@pytest.mark.parametrize(
    "kinds", [(pa.string(), pa.binary()), (pa.large_string(), pa.large_binary())]
)
def test_rows_with_and_without_each_column_are_sent(
    broker: str, made: str, kinds: tuple[pa.DataType, pa.DataType]
) -> None:
    """In slices, as after a filter, and in both kinds that Spark has for texts."""
    text, binary = kinds
    rows = pa.record_batch(
        {
            "body": pa.array([b"?", b"a", b"", b"c"], binary),
            "key": pa.array(["?", "k", None, ""], text),
            "tag": pa.array(["?", None, "red", "é"], text),
            "headers": pa.array([None, [("a", "b")], [], None], pa.map_(pa.string(), pa.string())),
        }
    )
    alone = pa.record_batch({"body": pa.array([b"d"], binary)})
    empty = rows.slice(0, 0)
    writer = driver(broker, made, None)
    writer.commit([writer.write(iter([rows.slice(1), alone, empty]))])
    expected = [
        Message(b"a", "k", None, {"a": "b"}),
        Message(b"", None, "red"),
        Message(b"c", None, "é"),
        Message(b"d"),
    ]
    found = sorted((message for _partition, message in sent(broker, made)), key=str)
    assert found == sorted(expected, key=str)


@pytest.mark.parametrize(
    ("ddl", "topic", "says"),
    [
        ("key string", "t", "needs a body"),
        ("body string", "t", "no column body string"),
        ("body binary, key int", "t", "no column key int"),
        ("body binary, Key string", "t", "no column Key string"),
        ("body binary, headers map<string,int>", "t", "no column headers"),
        ("body binary, message_id string", "t", "no column message_id"),
        ("body binary, key string, key string", "t", "two columns key"),
        ("body binary", None, "name the topic"),
        ("body binary, topic string", "t", "name the topic"),
    ],
)
def test_columns_that_are_no_message_are_refused(
    spark: SparkSession, ddl: str, topic: str | None, says: str
) -> None:
    schema = StructType(StructType.fromDDL(ddl).fields)  # type: ignore[attr-defined] # it is one, by its other name
    with pytest.raises(ConfigError, match=says):
        check_columns(schema, topic)


# By Spark.


class FlakySource(TxmqDataSource):
    """A source whose tasks fail once, after they have stored their bundle.

    Its driver fails to commit where requested.
    """

    @classmethod
    def name(cls) -> str:
        return "flaky"

    def writer(self, schema: StructType, overwrite: bool) -> JobWriter:  # noqa: FBT001  # Spark's signature
        broken = self.options.pop("broken", None)
        wanted = TxmqDataSource(self.options).writer(schema, overwrite)
        assert isinstance(wanted, JobWriter)
        return (BrokenDriver if broken else FlakyWriter)(wanted._options, wanted._job)


class FlakyWriter(JobWriter):
    """A writer that fails in the first attempt of the tasks but one."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredBundle:
        stored = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0 and context.partitionId() != 1:
            raise RuntimeError("failed after it had stored its group")
        return stored


class BrokenDriver(JobWriter):
    """A writer whose driver never decides."""

    def commit(self, messages: Sequence[Any]) -> None:
        raise RuntimeError("failed to commit")


def rows(spark: SparkSession, size: int) -> DataFrame:
    frame = spark.range(0, size, 1, 4)
    return frame.selectExpr(
        "CAST(CAST(id AS string) AS binary) body",
        "CASE WHEN id % 5 > 0 THEN concat('k', id % 7) END key",
        "CASE WHEN id % 2 = 0 THEN 'even' END tag",
        "CASE WHEN id % 3 = 0 THEN map('n', CAST(id AS string)) END headers",
    )


def two_tasks(spark: SparkSession) -> DataFrame:
    """Return the rows of two tasks: each one that fails costs a new worker two seconds
    of a processor.
    """
    return rows(spark, 100).coalesce(2)


def to(frame: DataFrame, broker: str, topic: str, source: str = "txmq") -> DataFrameWriter:
    return frame.write.format(source).option("url", broker).option("topic", topic).mode("append")


def test_rows_become_messages_in_the_order_of_their_keys(
    spark: SparkSession, broker: str, made: str
) -> None:
    to(rows(spark, 1_000).coalesce(1), broker, made).save()
    found = sent(broker, made)
    assert Counter(message.body for _partition, message in found) == Counter(
        b"%d" % n for n in range(1_000)
    )
    last: dict[str | None, int] = {}
    for partition, (body, key, tag, headers, *_times) in found:
        n = int(body)
        assert (key, tag) == (f"k{n % 7}" if n % 5 else None, "even" if n % 2 == 0 else None)
        assert headers == ({"n": str(n)} if n % 3 == 0 else None)
        if key:
            assert partition == partition_of(key, 3)
            assert last.get(key, -1) < n
            last[key] = n


def test_a_failed_write_sends_nothing(
    spark: SparkSession, broker: str, made: str, client: txmq.Client
) -> None:
    spark.dataSource.register(FlakySource)
    before = undecided(client)
    broken = to(two_tasks(spark), broker, made, "flaky").option("broken", "1")
    with pytest.raises(PySparkException, match="failed to commit"):
        broken.option("idempotency_key", "k").save()
    assert bodies(broker, made) == Counter()
    assert undecided(client) <= before


def test_repeated_tasks_and_writes_send_once(
    spark: SparkSession, broker: str, made: str, client: txmq.Client
) -> None:
    spark.dataSource.register(FlakySource)
    before = undecided(client)
    for source in ("flaky", "txmq"):  # in the first one, a task is repeated
        to(two_tasks(spark), broker, made, source).option("idempotency_key", "k").save()
    assert bodies(broker, made) == Counter(b"%d" % n for n in range(100))
    assert undecided(client) <= before


def test_a_row_that_is_no_message_fails_the_write_and_sends_nothing(
    spark: SparkSession, broker: str, made: str
) -> None:
    hostile = rows(spark, 100).selectExpr("body", "repeat('k', 2000) key")
    with pytest.raises(PySparkException, match="key"):
        to(hostile, broker, made).save()
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        to(rows(spark, 1), broker, made).mode("overwrite").save()
    assert bodies(broker, made) == Counter()


def test_a_topic_does_not_grow_while_bundles_are_open(
    broker: str, made: str, client: txmq.Client
) -> None:
    """What is stored is for partitions of today; the refusal comes before the client
    gives up waiting for it.
    """
    writer = driver(broker, made, None)
    stored = [task(writer, "a", "b")]
    with pytest.raises(Conflict, match="undecided"):
        client.call("topic.grow", name=made, partitions=7)
    writer.commit(stored)
    assert client.call("topic.grow", name=made, partitions=7)["partitions"] == 7


def test_a_topic_that_grows_while_a_task_gathers_rows_gets_each_message_once(
    broker: str, made: str, client: txmq.Client
) -> None:
    """Each message is in the partition that its key has by then."""
    keys = [f"k{n}" for n in range(60)]
    writer = driver(broker, made, None)

    def rows() -> Iterator[pa.RecordBatch]:
        for number, key in enumerate(keys):
            if number == 10:
                client.call("topic.grow", name=made, partitions=7)
            yield pa.record_batch({"body": [key.encode()], "key": [key]})

    writer.commit([writer.write(rows())])
    found = sent(broker, made)
    assert Counter(message.key for _, message in found) == Counter(keys)
    assert all(partition == partition_of(message.key or "", 7) for partition, message in found)
