"""Topics as Parquet by date, by the command, over a batch that is run again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.stream_driver import texts
from txmq.errors import ConfigError
from txmq_spark import landing
from txmq_spark.commands import command_line, stream_commands
from txmq_spark.landing import LandOptions, land, require_same_batches
from txmq_spark.session.hadoop_files import Directory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    import txmq


@pytest.fixture
def run_land(
    spark: SparkSession, broker: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """The command `txmq-spark land` of the topic, in the session of the tests."""
    monkeypatch.setattr(stream_commands, "job_session", lambda: nullcontext(spark))

    def run(*options: str | Path) -> int:
        words = ["land", "--broker", broker, "--topic", topic, *map(str, options)]
        return command_line.main(words)

    return run


def landed(spark: SparkSession, path: Path) -> list[int]:
    """Return the numbers that landed messages have as bodies, in order."""
    rows = spark.read.parquet(str(path)).select("body").collect()
    return sorted(int(row.body) for row in rows)


def test_each_message_lands_once_though_a_batch_is_run_again(
    spark: SparkSession,
    run_land: Callable[..., int],
    topic: str,
    client: txmq.Client,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client.send_many(topic, texts(*range(30)))
    path = tmp_path / "lake"
    # The disk was full while the first batch was planned.
    unfinished = path / "_checkpoint" / "offsets" / ".0.a.tmp"
    unfinished.parent.mkdir(parents=True)
    unfinished.touch()
    assert run_land("--path", path) == 0
    assert capsys.readouterr().out == "landed: 30 messages, skipped 0\n"
    client.send_many(topic, texts(*range(30, 40)))
    # The first run died after it had written its files and before it had said so.
    for commit in (path / "_checkpoint" / "commits").glob("*0*"):
        commit.unlink()
    assert run_land("--path", path) == 0
    assert landed(spark, path) == list(range(40))
    client.call("topic.delete", name=topic)
    assert run_land("--path", path) == 1
    assert "it was deleted (find out what was lost" in capsys.readouterr().err
    assert list((path / f"topic={topic}").glob("date=20??-??-??/*.parquet"))


def test_a_topic_that_a_run_leaves_out_lands_once(
    spark: SparkSession, broker: str, topic: str, client: txmq.Client, tmp_path: Path
) -> None:
    other = f"{topic}-other"
    for name in (topic, other):
        client.send(name, name.encode())
    options = LandOptions(broker, str(tmp_path / "lake"), str(tmp_path / "lake" / "_checkpoint"))
    landed = [
        land(spark, options._replace(topics=topics)).messages
        for topics in ((topic,), (other,), (topic, other))
    ]
    assert landed == [1, 1, 0]


def test_a_directory_of_another_checkpoint_is_refused(
    spark: SparkSession,
    run_land: Callable[..., int],
    topic: str,
    client: txmq.Client,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client.send_many(topic, texts(*range(5)))
    path, other = tmp_path / "lake", tmp_path / "other"
    assert run_land("--path", path) == 0
    client.send_many(topic, texts(*range(5, 9)))
    assert run_land("--path", path, "--checkpoint", other) == 1
    assert "was not landed with the checkpoint" in capsys.readouterr().err
    (path / "_checkpoint").rename(other)  # without it Spark would begin at batch 0 again
    assert run_land("--path", path) == 1
    assert run_land("--path", path, "--checkpoint", other) == 0
    assert landed(spark, path) == list(range(9))


def test_a_checkpoint_with_as_many_batches_is_another_one(
    spark: SparkSession,
    run_land: Callable[..., int],
    topic: str,
    client: txmq.Client,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client.send_many(topic, texts(*range(5)))
    path, other = tmp_path / "lake", tmp_path / "other"
    assert run_land("--path", path) == 0
    assert run_land("--path", other) == 0
    client.send_many(topic, texts(*range(5, 9)))
    exchanged = ("--path", path, "--checkpoint", other / "_checkpoint")
    assert run_land(*exchanged) == 1
    assert "was not landed with the checkpoint" in capsys.readouterr().err
    # Without ids, both belong together from now on.
    for place in (path, path / "_checkpoint"):
        (place / "_txmq_landing").unlink()
    assert run_land("--path", path) == 0
    assert run_land(*exchanged) == 1
    assert landed(spark, path) == list(range(9))


def test_two_first_runs_at_the_same_time_leave_one_id(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = str(tmp_path / "lake")
    options = LandOptions("txmq://127.0.0.1:7650", lake, f"{lake}/_checkpoint", ("t",))
    write, written = Directory.write, list[str]()

    def in_turns(self: Directory, name: str, text: str) -> None:
        written.append(self.path)
        if written == [options.checkpoint, options.path]:
            # The other run had seen no id, either, and has just written its own.
            for place in (options.checkpoint, options.path):
                write(Directory(spark, place), name, "b" * 32)
        write(self, name, text)

    monkeypatch.setattr(Directory, "write", in_turns)
    require_same_batches(spark, options)
    require_same_batches(spark, options)
    ids = {Directory(spark, place).read("_txmq_landing", 100) for place in set(written)}
    assert ids == {"b" * 32}


def test_a_run_that_is_at_work_is_no_other_checkpoint(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: dict[str, int] = {"offsets": 0, "_spark_metadata": -1, "commits": -1}
    steps = ("_spark_metadata", "commits", "offsets")

    def last_batch(_spark: SparkSession, log: str) -> int:
        found = numbers[Path(log).name]
        for step in steps:  # the other run has come to its next batch meanwhile
            numbers[step] += 1
        return found

    monkeypatch.setattr(landing, "last_batch", last_batch)
    options = LandOptions("txmq://h", str(tmp_path / "lake"), str(tmp_path / "progress"))
    require_same_batches(spark, options)
    numbers.update(_spark_metadata=-1)
    with pytest.raises(ConfigError, match="was not landed with the checkpoint"):
        require_same_batches(spark, options)


def test_a_landing_needs_topics(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(stream_commands, "job_session", lambda: nullcontext(spark))
    assert command_line.main(["land", "--path", str(tmp_path)]) == 1
    assert "either topics or a pattern" in capsys.readouterr().err
    assert command_line.main(["land", "--path", "nowhere://lake", "--topic", "t"]) == 1
    assert "No FileSystem for scheme" in capsys.readouterr().err
