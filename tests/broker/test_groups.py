"""What operators ask of groups, as the broker as a whole does it: large things go on by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import Broker, send_payload
from txmq.wire.headers import Fetch, Opcode, pack_fetch

WHO = {"operator": "ada", "reason": "no use"}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    """Seven dead letters in a group without members; records touch two of them at most."""
    for module in ("tidying", "resets"):
        monkeypatch.setattr(f"txmq.broker.core.{module}.SLICE", 2)
    broker = Broker()
    broker.start()
    client = broker.connect()
    client.call("topic.create", name="t", partitions=1)
    for sequence in range(7):
        client.ask(Opcode.SEND, send_payload(sequence))
    joined: Any = client.call("consumer.join", group="billing", topics=["t"], instance="i", member="m")
    known: dict[str, Any] = {"group": "billing", "member": "m", "generation": joined["generation"]}
    client.ask(Opcode.FETCH, pack_fetch(Fetch(joined["generation"], 0, 1 << 20, 100, "billing", "m")))
    for offset in range(7):
        client.call("consumer.nack", **known, topic="t", partition=0, offset=offset, dead=True)
    client.call("consumer.leave", group="billing", member="m", instance="i")
    return broker


def test_a_large_reset_ends_by_itself(broker: Broker) -> None:
    reset = broker.ask("group.reset", group="billing", topic="t", to="first", **WHO)
    assert (reset["pending"], [tuple(target) for target in reset["positions"]]) == (True, [(0, 7, 0, 0, 0, 7)])
    shown = broker.ask("group.show", group="billing")
    assert (shown["state"], shown["positions"][0]["reason"]) == ("being reset", "being-reset")
    broker.pass_time(1)
    shown = broker.ask("group.show", group="billing")
    assert (shown["state"], shown["letters"], shown["lag"], shown["positions"][0]["floor"]) == ("empty", 0, 7, 0)


def test_a_large_deletion_ends_by_itself_and_the_name_is_free_at_once(broker: Broker) -> None:
    broker.ask("group.clone", group="billing", to="again", **WHO)
    broker.ask("group.delete", group="billing", **WHO)
    consumers = broker.engine.state.consumers
    assert (list(consumers.groups), len(consumers.doomed)) == (["again"], 1)
    broker.pass_time(1)
    assert consumers.doomed == {}
    assert broker.ask("group.show", group="again")["lag"] == 0


def test_members_get_the_partitions_that_their_topic_has_grown(broker: Broker) -> None:
    client = broker.connect()
    client.call("consumer.join", group="late", topics=["t"], instance="i", member="m", start="last")
    client.call("topic.grow", name="t", partitions=3)
    broker.pass_time(1)
    [member] = broker.ask("group.show", group="late")["member_list"]
    assert [tuple(spot) for spot in member["assignment"]] == [("t", 0), ("t", 1), ("t", 2)]
    client.call("topic.delete", name="t")
    broker.pass_time(1)
    assert broker.ask("group.show", group="late")["member_list"][0]["assignment"] == []


def test_a_topic_is_paused_for_a_group_and_goes_on(broker: Broker) -> None:
    broker.ask("group.pause", group="billing", topic="t", **WHO)
    assert broker.ask("group.show", group="billing")["paused_topics"] == ["t"]
    broker.ask("group.resume", group="billing", topic="t", **WHO)
    assert broker.ask("group.show", group="billing")["paused_topics"] == []


def test_a_group_may_begin_a_duration_ago(broker: Broker) -> None:
    client = broker.connect()
    broker.pass_time(100)
    client.ask(Opcode.SEND, send_payload(7))
    broker.pass_time(10)
    client.call("consumer.join", group="late", topics=["t"], instance="i", start=-50_000_000)
    assert broker.ask("group.show", group="late")["positions"][0]["cursor"] == 7
