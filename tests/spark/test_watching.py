"""Alerts about dead letters: the rules, and a query that was stopped."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spark.consuming import let_die
from tests.spark.stream_driver import texts
from tests.spark.test_writing import sent
from tests.tx.postgres.support import rows
from txmq.errors import ConfigError
from txmq.testing.wait import wait_until
from txmq_spark.alerts.watch_rules import MAX_SEEN, Alert, DeadLetter, GroupMemory, WatchRules
from txmq_spark.commands import command_line, stream_commands
from txmq_spark.landing import LANDING_ID
from txmq_spark.watching import WatchOptions, message_counter, watch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    import txmq

CENTURY = "3153600000"  # seconds: a window in which no letter is too late
RULES = WatchRules(flood=3, window=10, memory=100)


def letter(at: int, fingerprint: str = "a", offset: int = 0) -> DeadLetter:
    return DeadLetter(at, "orders", 0, offset, fingerprint, "shop.Bad", "x" * 5_000)


def judged(memory: GroupMemory, kind: str, *letters: DeadLetter) -> list[int]:
    """Return the times of the letters that alerts of that kind are about."""
    return [one.fields["dead_at"] for one in memory.judge(letters, RULES) if one.kind == kind]


def test_an_error_is_new_once_until_it_is_forgotten() -> None:
    memory = GroupMemory("g")
    assert judged(memory, "new-error", letter(5), letter(6), letter(7, "b")) == [5, 7]
    assert judged(memory, "new-error", letter(106), letter(107, "b")) == []
    assert judged(memory, "new-error", letter(207), letter(207, "b")) == [207]


def test_a_flood_is_told_once_for_each_window() -> None:
    memory = GroupMemory("g")
    memory.judge([letter(1)], RULES)
    assert judged(memory, "flood", *map(letter, range(8, 24))) == [9, 12, 22]
    told = GroupMemory("g").judge([letter(n) for n in range(8)], RULES)
    [flood] = [one.fields for one in told if one.kind == "flood"]
    assert (flood["letters"], flood["from"], flood["until"], flood["group"]) == (3, 0, 10, "g")
    assert len(flood["error_text"]) == 1_000


def test_a_flood_is_a_share_of_the_log_where_that_is_watched() -> None:
    rules = RULES._replace(share=20)
    memory = GroupMemory("g")
    assert kinds(memory.judge(map(letter, range(3)), rules, {0: 30, 10: 5})) == ["new-error"]
    [flood] = memory.judge(map(letter, range(3, 8)), rules)
    # The sixth of 30 messages is the first letter that makes 20 %.
    assert (flood.fields["dead_at"], flood.fields["messages"]) == (5, 30)
    assert memory.judge(map(letter, range(8, 10)), rules) == []
    told = memory.judge(map(letter, range(10, 13)), rules)
    assert [(one.kind, one.fields["messages"]) for one in told] == [("flood", 5)]
    # Windows without letters are forgotten, too.
    for at in range(100, 10_000, 10):
        memory.judge([], rules, {at: 1})
    assert len(memory.to_text()) < 1_000


def test_letters_have_classes_and_alerts_have_names() -> None:
    letters = [
        letter(0, "a")._replace(replays=99),
        letter(1, "b", 1)._replace(key="k"),
        letter(2, "c", 2)._replace(key="k"),
        letter(3, "d", 3)._replace(key="other", parked=4),
        letter(4, "e", 4)._replace(error_text="nul \0"),
    ]
    told = GroupMemory("g").judge(letters, RULES._replace(flood=5))
    classes = [one.fields["class"] for one in told]
    assert classes == ["poison", *["replay_chain"] * 3, *["replay_alone"] * 2]
    assert told[-1].fields["classes"] == {"poison": 1, "replay_alone": 1, "replay_chain": 3}
    assert told[-1].fields["id"] == "flood/g/0"
    assert told[0].fields["id"] == "new-error/g/orders/0/0/0"
    assert all("\0" not in json.loads(one.to_json())["error_text"] for one in told)


def test_the_memory_is_bounded_where_each_letter_has_an_error_of_its_own() -> None:
    rules = RULES._replace(memory=1 << 40)
    memory = GroupMemory("g")
    many = MAX_SEEN + 500
    for at in range(0, many, 250):
        memory.judge([letter(n, f"f{n}") for n in range(at, at + 250)], rules)
    assert len(json.loads(memory.to_text())["seen"]) == MAX_SEEN
    assert judged(memory, "new-error", letter(many, f"f{many - 1}")) == []
    assert judged(memory, "new-error", letter(many, "f0")) == [many]


def kinds(told: list[Alert]) -> list[str]:
    return [one.kind for one in told]


LETTERS = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from("ab")).map(lambda one: letter(*one)),
    max_size=30,
)
COUNTS = st.dictionaries(st.integers(0, 30).map(lambda n: 10 * n), st.integers(1, 9))


@given(LETTERS, COUNTS, st.randoms(use_true_random=False))
def test_a_batch_in_another_order_gives_the_same_alerts_and_memory(
    letters: list[DeadLetter], counts: dict[int, int], chance: Random
) -> None:
    rules, shuffled = RULES._replace(share=50), chance.sample(letters, len(letters))
    one, other = GroupMemory("g"), GroupMemory("g")
    assert one.judge(letters, rules, counts) == other.judge(shuffled, rules, counts)
    assert one.to_text() == other.to_text() == GroupMemory("g", one.to_text()).to_text()


def test_tasks_count_the_log_by_group_and_window() -> None:
    times = pa.array([0, 5, 12, 19, 7], pa.timestamp("us", tz="UTC"))
    batch = pa.record_batch({"topic": ["a", "a", "a", "b", "c"], "stored_at": times})
    [counted] = message_counter({"a": ["g", "h"], "b": ["g"]}, RULES)(iter([batch]))
    rows = [(row["group"], row["dead_at"], row["messages"]) for row in counted.to_pylist()]
    assert sorted(rows) == [("g", 0, 2), ("g", 10, 1), ("g", 10, 1), ("h", 0, 2), ("h", 10, 1)]


def alerts(broker: str, topic: str) -> list[tuple[str, int]]:
    """Return the kinds of the alerts in a topic, with the offsets of their letters."""
    found: list[dict[str, Any]] = [json.loads(one.body) for _n, one in sent(broker, topic)]
    return sorted((one["alert"], one["offset"]) for one in found)


def test_a_watch_tells_each_alert_once_over_its_runs(
    spark: SparkSession,
    broker: str,
    topic: str,
    client: txmq.Client,
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_commands, "job_session", lambda: nullcontext(spark))
    client.call("topic.create", name=topic, partitions=1)
    client.call("topic.create", name=f"{topic}-2", partitions=1)
    checkpoint = tmp_path / "checkpoint"
    arguments = ["watch", "--broker", broker, "--group", topic, "--alerts", f"{topic}-2"]
    arguments += ["--checkpoint", str(checkpoint), "--flood", "3", "--window", CENTURY]
    arguments += ["--share", "75", "--age", "1", "--alerts-table", "public.told"]

    def told() -> list[tuple[str, int]]:
        assert command_line.main([*arguments, "--dsn", database]) == 0
        found = alerts(broker, f"{topic}-2")
        query = "SELECT kind, (alert->>'offset')::int4 FROM told WHERE alert->>'alert' = kind"
        assert sorted(rows(database, query)) == found
        return found

    client.send_many(topic, texts(0, 1))
    let_die(client, topic, topic, texts(0, 1), "concurrent")
    wait_until(lambda: old_letter(client, topic), what="the first letter is a second old")
    assert told() == [("new-error", 0), ("old", 0)]
    for commit in (checkpoint / "commits").glob("*0*"):
        commit.unlink()  # as if it had died behind its decision
    client.send_many(topic, texts(*range(2, 8)))
    let_die(client, topic, topic, texts(2, 4, 6, 7), "concurrent")
    assert told() == [("flood", 7), ("new-error", 0), ("old", 0)]  # the sixth of 8 messages


def old_letter(client: txmq.Client, group: str) -> bool:
    before = int(time.time() * 1e6) - 1_000_000
    return bool(client.call("dlq.list", group=group, select={"died_before": before})["letters"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--alerts-table", "t", "--dsn", ""], "needs a database"),
        (["--group", "nobody", "--share", "5"], "nobody"),
    ],
)
def test_a_watch_that_cannot_begin_says_why(
    spark: SparkSession,
    broker: str,
    more: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(stream_commands, "job_session", lambda: nullcontext(spark))
    arguments = ["watch", "--broker", broker, "--group", "nobody", "--alerts", "a"]
    assert command_line.main([*arguments, "--checkpoint", "c", *more]) == 1
    assert says in capsys.readouterr().err


def test_a_watch_does_not_take_the_checkpoint_of_a_landing(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / LANDING_ID).write_text("7f4e")
    options = WatchOptions("txmq://nowhere:1", ("g",), "alerts", str(tmp_path))
    with pytest.raises(ConfigError, match="is that of a landed directory"):
        watch(spark, options)
    assert [one.name for one in tmp_path.iterdir()] == [LANDING_ID]
