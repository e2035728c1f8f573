"""Operators' work on consumer groups: large requests continue in steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import BrokerInMemory, send_payload
from txmq.core.events.consumers import GroupTidied
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Fetch, Opcode, pack_fetch
from txmq.wire.frames import encode_frame

WHO = {"operator": "ada", "reason": "no use"}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> BrokerInMemory:
    """A broker with seven dead letters in a group without members. A record touches at
    most two of them.
    """
    for module in ("background_work", "resets", "clones"):
        monkeypatch.setattr(f"txmq.core.consumers.{module}.STEP_ROWS", 2)
    broker = BrokerInMemory()
    broker.start()
    client = broker.connect()
    client.call("topic.create", name="t", partitions=1)
    for sequence in range(7):
        client.ask(Opcode.SEND, send_payload(sequence))
    joined: Any = client.call(
        "consumer.join", group="billing", topics=["t"], instance="i", member="m"
    )
    known: dict[str, Any] = {"group": "billing", "member": "m", "generation": joined["generation"]}
    client.ask(
        Opcode.FETCH, pack_fetch(Fetch(joined["generation"], 0, 1 << 20, 100, "billing", "m"))
    )
    for offset in range(7):
        client.call("consumer.nack", **known, topic="t", partition=0, offset=offset, dead=True)
    client.call("consumer.leave", group="billing", member="m", instance="i")
    return broker


def test_a_large_reset_ends_by_itself(broker: BrokerInMemory) -> None:
    reset = broker.ask("group.reset", group="billing", topic="t", to="first", **WHO)
    assert (reset["pending"], [tuple(target) for target in reset["positions"]]) == (
        True,
        [(0, 7, 0, 0, 0, 7)],
    )
    shown = broker.ask("group.show", group="billing")
    assert (shown["state"], shown["positions"][0]["reason"]) == ("being reset", "being-reset")
    broker.pass_time(1)
    shown = broker.ask("group.show", group="billing")
    assert (
        shown["state"],
        shown["letters"],
        shown["unsettled"],
        shown["positions"][0]["floor"],
    ) == (
        "empty",
        0,
        7,
        0,
    )


def test_a_large_deletion_ends_by_itself_and_the_name_is_free_at_once(
    broker: BrokerInMemory,
) -> None:
    assert broker.ask("group.clone", group="billing", to="again", **WHO) == {"pending": True}
    assert broker.ask("group.show", group="again")["state"] == "being cloned"
    broker.pass_time(1)
    broker.ask("group.delete", group="billing", **WHO)
    consumers = broker.engine.state.groups
    assert (list(consumers.by_name), len(consumers.deleted)) == (["again"], 1)
    broker.pass_time(1)
    assert consumers.deleted == {}
    shown = broker.ask("group.show", group="again")
    assert (shown["state"], shown["unsettled"]) == ("empty", 0)


def test_a_broker_that_drains_leaves_a_large_deletion_to_the_next_start(
    broker: BrokerInMemory,
) -> None:
    broker.engine.listen(GroupTidied, lambda _event, _place: broker.assembly.stop())
    broker.ask("group.delete", group="billing", **WHO)
    broker.pass_time(1)
    assert broker.engine.try_drain()
    assert broker.engine.state.groups.deleted


def test_members_get_the_partitions_that_their_topic_has_grown(broker: BrokerInMemory) -> None:
    client = broker.connect()
    client.call("consumer.join", group="late", topics=["t"], instance="i", member="m", start="last")
    client.call("topic.grow", name="t", partitions=3)
    broker.pass_time(1)
    [member] = broker.ask("group.show", group="late")["member_list"]
    assert [tuple(spot) for spot in member["assignment"]] == [("t", 0), ("t", 1), ("t", 2)]
    client.call("topic.delete", name="t")
    broker.pass_time(1)
    assert broker.ask("group.show", group="late")["member_list"][0]["assignment"] == []


def test_a_topic_is_paused_for_a_group_and_goes_on(broker: BrokerInMemory) -> None:
    broker.ask("group.pause", group="billing", topic="t", **WHO)
    assert broker.ask("group.show", group="billing")["paused_topics"] == ["t"]
    broker.ask("group.resume", group="billing", topic="t", **WHO)
    assert broker.ask("group.show", group="billing")["paused_topics"] == []


def test_a_group_may_begin_a_duration_ago(broker: BrokerInMemory) -> None:
    client = broker.connect()
    broker.pass_time(100)
    client.ask(Opcode.SEND, send_payload(7))
    broker.pass_time(10)
    client.call("consumer.join", group="late", topics=["t"], instance="i", start=-50_000_000)
    assert broker.ask("group.show", group="late")["positions"][0]["cursor"] == 7


class Fetcher:
    """A member of a group of two topics, on a connection of its own."""

    def __init__(self, broker: BrokerInMemory) -> None:
        self.client = broker.connect()
        self.client.call("topic.create", name="u", partitions=1)
        args = {
            "group": "two",
            "topics": ["t", "u"],
            "start": "last",
            "instance": "i",
            "member": "m",
        }
        joined: Any = self.client.call("consumer.join", **args)
        self.generation = joined["generation"]

    def fetch(self, number: int, *without: str) -> None:
        wanted = Fetch(self.generation, 20_000, 1 << 20, 100, "two", "m", without=without)
        self.client.send(encode_frame(Opcode.FETCH, number, pack_fetch(wanted)))

    def answers(self) -> dict[int, list[str]]:
        """Return the topics of each fetch's reply, by the fetch's number."""
        replies = self.client.replies()
        return {
            reply.correlation: [c.topic for c in unpack_chunks(reply.payload).chunks]
            for reply in replies
        }


def test_a_newer_fetch_of_a_member_ends_one_that_waits_and_gets_nothing_of_topics_left_out(
    broker: BrokerInMemory,
) -> None:
    member, sender = Fetcher(broker), broker.connect()
    member.fetch(1)
    assert member.answers() == {}
    member.fetch(2, "t", "no-such-topic")
    assert member.answers() == {1: []}
    sender.ask(Opcode.SEND, send_payload(7))
    broker.pass_time(1)
    assert member.answers() == {}, "it is of the topic left out"
    sender.ask(Opcode.SEND, send_payload(8, topic="u"))
    broker.pass_time(1)
    assert member.answers() == {2: ["u"]}
    member.fetch(3)
    assert member.answers() == {3: ["t"]}


def test_topics_that_a_member_has_paused_are_shown_until_it_resumes_or_is_gone(
    broker: BrokerInMemory,
) -> None:
    member = Fetcher(broker)
    broker.connect().ask(Opcode.SEND, send_payload(7))
    known: dict[str, Any] = {
        "group": "two",
        "member": "m",
        "generation": member.generation,
        "instance": "i",
    }

    def told() -> tuple[list[str], list[str]]:
        shown = broker.ask("group.show", group="two")
        return shown["member_list"][0]["paused"], [
            position["reason"] for position in shown["positions"]
        ]

    member.client.call("consumer.heartbeat", **known, paused=["t"])
    assert told() == (["t"], ["member-paused", ""])
    member.client.call("consumer.heartbeat", **known, paused=[])
    assert told() == ([], ["", ""])
