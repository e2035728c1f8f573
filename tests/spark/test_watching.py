"""Alerts about dead letters: the rules, and a query that was stopped."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spark.consuming import let_die
from tests.spark.stream_driver import texts
from tests.spark.test_writing import sent
from txmq_spark import command_line
from txmq_spark.watch_rules import DeadLetter, GroupMemory, WatchRules

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    import txmq

pytestmark = pytest.mark.timeout(300)  # includes the start of a JVM on a loaded machine
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


LETTERS = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from("ab")).map(lambda one: letter(*one)),
    max_size=30,
)


@given(LETTERS, st.randoms(use_true_random=False))
def test_a_batch_in_another_order_gives_the_same_alerts_and_memory(
    letters: list[DeadLetter], chance: Random
) -> None:
    shuffled = chance.sample(letters, len(letters))
    one, other = GroupMemory("g"), GroupMemory("g")
    assert one.judge(letters, RULES) == other.judge(shuffled, RULES)
    assert one.to_text() == other.to_text() == GroupMemory("g", one.to_text()).to_text()


def alerts(broker: str, topic: str) -> list[tuple[str, int]]:
    """Return the kinds of the alerts in a topic, with the offsets of their letters."""
    found: list[dict[str, Any]] = [json.loads(one.body) for _n, one in sent(broker, topic)]
    return sorted((one["alert"], one["offset"]) for one in found)


def test_a_watch_tells_each_alert_once_over_its_runs(
    spark: SparkSession,
    broker: str,
    topic: str,
    client: txmq.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command_line, "job_session", lambda: nullcontext(spark))
    client.call("topic.create", name=topic, partitions=1)
    client.call("topic.create", name=f"{topic}-2", partitions=1)
    checkpoint = tmp_path / "checkpoint"
    arguments = ["watch", "--url", broker, "--group", topic, "--alerts", f"{topic}-2"]
    arguments += ["--checkpoint", str(checkpoint), "--flood", "3", "--window", "86400"]
    client.send_many(topic, texts(0, 1))
    let_die(client, topic, topic, texts(0, 1), "concurrent")
    assert command_line.main(arguments) == 0
    assert alerts(broker, f"{topic}-2") == [("new-error", 0)]
    for commit in (checkpoint / "commits").glob("*0*"):
        commit.unlink()  # as if it had died behind its decision
    client.send_many(topic, texts(2, 3))
    let_die(client, topic, topic, texts(2, 3), "concurrent")
    assert command_line.main(arguments) == 0
    assert alerts(broker, f"{topic}-2") == [("flood", 2), ("new-error", 0)]
