"""Rows of an outbox become bundles: in their order, once, without those that wait for
a failed one, and reported when durable.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.broker.engine.test_engine import Rig
from txmq.batch import encode_one
from txmq.broker.requests.outbox_publisher import ROWS_PER_STEP, OutboxPublisher
from txmq.client.protocol.transaction.tokens import new_token
from txmq.config.broker import BrokerSettings
from txmq.core.transactions.model import get
from txmq.errors import Throttled
from txmq.model.bundle import BundleState
from txmq.model.message import Message
from txmq.tx.outbox_entry import OutboxEntry, pack_entries
from txmq.tx.postgres.outbox import OutboxRow, PublishedRow, SetAside


def row(seq: int, topic: str = "t", *, key: int = 1, also: Sequence[int] = ()) -> OutboxRow:
    token = new_token()
    batch = encode_one(Message(b"x", "k"), producer_id=token.bytes, epoch=0, sequence=0, born_at=1)
    content = pack_entries([OutboxEntry(topic, None, "k", batch)])
    return OutboxRow(seq, token, "shop", [key, *also], content)


class OutboxWorld(Rig):
    """An engine, and the rows that were reported as published."""

    def __init__(self, *, create_topics: bool = True) -> None:
        super().__init__()
        self.over: list[int] = []
        self.why = ""
        self._publish = OutboxPublisher(
            self.engine, BrokerSettings(data=Path("/"), create_topics=create_topics), self.clock
        )

    def publish(self, *rows: OutboxRow) -> None:
        self.aside = SetAside()
        self._publish(rows, "shop", self.aside, self._over)

    def _over(self, done: list[PublishedRow], why: str) -> None:
        self.over.append(len(done))
        self.why = why

    def settle(self) -> None:
        while not self.over:
            self.turn()
            if self.thread:
                self.work()

    def state(self, one: OutboxRow) -> BundleState | None:
        found = get(self.engine.state, one.token.bytes)
        return None if found is None else found.state

    def end(self, topic: str = "t") -> int:
        return sum(self.engine.state.topics[topic].end_offsets)


def test_rows_are_reported_once_they_are_durable() -> None:
    world, rows = OutboxWorld(), [row(1), row(2)]
    world.publish(*rows)
    assert (world.over, world.end()) == ([], 2)
    world.settle()
    assert world.over == [2]
    assert [world.state(one) for one in rows] == [BundleState.PUBLISHED] * 2


def test_a_row_that_comes_again_changes_nothing() -> None:
    world, one = OutboxWorld(), row(1)
    for _ in range(2):
        world.over.clear()
        world.publish(one)
        world.settle()
    assert (world.over, world.end()) == ([1], 1)


def test_many_rows_leave_turns_to_others() -> None:
    world = OutboxWorld()
    world.publish(*(row(n) for n in range(2 * ROWS_PER_STEP + 1)))
    assert world.end() == ROWS_PER_STEP
    world.settle()
    assert (world.over, world.end()) == ([2 * ROWS_PER_STEP + 1], 2 * ROWS_PER_STEP + 1)


def test_a_topic_is_made_on_first_use_where_that_is_allowed() -> None:
    world = OutboxWorld()
    world.publish(row(1, "new"))
    world.settle()
    assert (world.over, world.end("new")) == ([1], 1)


def test_a_row_that_cannot_be_published_holds_up_those_of_its_keys_only() -> None:
    world = OutboxWorld(create_topics=False)
    rows = [row(1), row(2, "unknown"), row(3), row(4, key=2)]
    with capture_logs() as logs:
        world.publish(*rows)
    world.settle()
    assert (world.over, world.end(), world.why) == ([2], 2, "")
    assert [(log["event"], log["seq"]) for log in logs] == [("outbox.stuck", 2)]
    assert "topic create" in logs[0]["reason"]
    assert str(world.aside) == f"row 2: {logs[0]['reason']}"


def test_rows_wait_behind_one_that_waits_for_another_key() -> None:
    world = OutboxWorld(create_topics=False)
    rows = [row(1, "unknown"), row(2, also=[2]), row(3, key=2), row(4, key=3)]
    world.publish(*rows)
    world.settle()
    assert [world.state(one) for one in rows] == [None, None, None, BundleState.PUBLISHED]


def test_what_others_would_meet_stops_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    world = OutboxWorld()

    def refuse(_row: OutboxRow) -> None:
        raise Throttled("later")

    monkeypatch.setattr(world._publish, "_publish", refuse)
    with capture_logs() as logs:
        world.publish(row(1), row(2, key=2))
    world.settle()
    assert (world.over, world.aside.rows) == ([0], {})
    assert world.why == "row 1: later"
    assert [log["seq"] for log in logs] == [1]


def test_a_token_that_the_broker_would_not_remember_is_set_aside() -> None:
    world, old = OutboxWorld(), row(1)
    world.engine._now = lambda: 2 * 10**15  # decades later
    with capture_logs() as logs:
        world.publish(old)
        world.settle()
    assert (world.over, world.end()) == ([0], 0)
    assert [log["event"] for log in logs] == ["outbox.stuck"]
    assert old.token.hex in world.aside.rows[1]


def test_a_row_that_is_refused_behind_unwritten_records_says_why() -> None:
    world, old = OutboxWorld(), row(1, "new")
    world.engine._now = lambda: 2 * 10**15  # decades later
    with capture_logs():
        world.publish(old)  # its topic is made, and not durable yet
        world.settle()
    assert "older than the outcomes that are kept" in world.aside.rows[1]
