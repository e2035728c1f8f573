"""Rows of an outbox become groups: in their order, once, up to the first that cannot
be, and reported when durable.
"""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from tests.broker.test_engine import Rig
from txmq.batch import encode_one
from txmq.broker.checkback.outbox_publisher import SLICE, Publisher
from txmq.client.protocol.transaction.tokens import new_token
from txmq.config.broker import Broker
from txmq.core.transactions.model import get
from txmq.model.bundle import GroupState
from txmq.model.message import Message
from txmq.tx.outbox_entry import Entry, pack
from txmq.tx.postgres.outbox import Queued


def row(seq: int, topic: str = "t") -> Queued:
    token = new_token()
    batch = encode_one(Message(b"x", "k"), producer_id=token.bytes, epoch=0, sequence=0, born_at=1)
    return Queued(seq, token, "shop", pack([Entry(topic, None, "k", batch)]))


class World(Rig):
    """An engine, and what was said to be published."""

    def __init__(self, *, create_topics: bool = True) -> None:
        super().__init__()
        self.over: list[int] = []
        self.why = ""
        self._publish = Publisher(
            self.engine, Broker(data=Path("/"), create_topics=create_topics), self.clock
        )

    def publish(self, *rows: Queued) -> None:
        self._publish(rows, "shop", self._over)

    def _over(self, count: int, why: str) -> None:
        self.over.append(count)
        self.why = why

    def settle(self) -> None:
        while not self.over:
            self.turn()
            if self.thread:
                self.work()

    def state(self, one: Queued) -> GroupState | None:
        found = get(self.engine.state, one.token.bytes)
        return None if found is None else found.state

    def end(self, topic: str = "t") -> int:
        return sum(self.engine.state.topics[topic].ends)


def test_rows_are_reported_once_they_are_durable() -> None:
    world, rows = World(), [row(1), row(2)]
    world.publish(*rows)
    assert (world.over, world.end()) == ([], 2)
    world.settle()
    assert world.over == [2]
    assert [world.state(one) for one in rows] == [GroupState.PUBLISHED] * 2


def test_a_row_that_comes_again_changes_nothing() -> None:
    world, one = World(), row(1)
    for _ in range(2):
        world.over.clear()
        world.publish(one)
        world.settle()
    assert (world.over, world.end()) == ([1], 1)


def test_many_rows_leave_turns_to_others() -> None:
    world = World()
    world.publish(*(row(n) for n in range(2 * SLICE + 1)))
    assert world.end() == SLICE
    world.settle()
    assert (world.over, world.end()) == ([2 * SLICE + 1], 2 * SLICE + 1)


def test_a_topic_is_made_on_first_use_where_that_is_allowed() -> None:
    world = World()
    world.publish(row(1, "new"))
    world.settle()
    assert (world.over, world.end("new")) == ([1], 1)


def test_what_cannot_be_published_holds_up_those_after_it() -> None:
    world = World(create_topics=False)
    rows = [row(1), row(2, "unknown"), row(3)]
    with capture_logs() as logs:
        world.publish(*rows)
    world.settle()
    assert (world.over, world.end()) == ([1], 1)
    assert [(log["event"], log["seq"]) for log in logs] == [("outbox.stuck", 2)]
    assert "topic create" in logs[0]["reason"]
    assert world.why == logs[0]["reason"]


def test_a_token_that_the_broker_would_not_remember_is_refused() -> None:
    world, old = World(), row(1)
    world.engine._now = lambda: 2 * 10**15  # decades later
    with capture_logs() as logs:
        world.publish(old)
        world.settle()
    assert (world.over, world.end()) == ([0], 0)
    assert [log["event"] for log in logs] == ["outbox.stuck"]
    assert old.token.hex in world.why
