"""A member of a group: its requests to the broker, and their times."""

from __future__ import annotations

import json
from datetime import timedelta
from math import inf, nan
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.client.scripted_member import GROUP, ScriptedMember, bodies, chunk, places
from txmq.client.protocol.consumer.member import MemberPhase
from txmq.client.protocol.consumer.settings import consumer_settings
from txmq.errors import (
    BrokerFailed,
    GroupMismatch,
    LocalProtocolError,
    StaleGeneration,
    Throttled,
    UnknownGroup,
    UnknownMember,
    UnknownTopic,
)
from txmq.model.retry import RetryPolicy

HELD = "held"


def test_a_member_joins_with_its_settings_and_then_fetches() -> None:
    scripted = ScriptedMember(
        "ordered",
        start="last",
        on_exhausted="skip",
        retry=RetryPolicy((1, 2)),
        lease=9,
        session=6,
    )
    scripted.member.connected(scripted.now)
    assert scripted.args_of("consumer.join") == {
        "group": "billing",
        "instance": "i-1",
        "mode": "ordered",
        "topics": ["orders"],
        "start": "last",
        "on_exhausted": "skip",
        "retry": RetryPolicy((1, 2)).to_json(),
        "lease_ms": 9_000,
        "session_ms": 6_000,
        "consume_timeout_ms": None,
        "strategy": None,
        "max_parked": None,
        "flood_keys": None,
        "span": None,
        "static": False,
        "version": "",
        "filter": "",
        "member": None,
        "held": None,
    }
    scripted.answer("consumer.join", **scripted.join_reply(0, generation=4))
    fetch = scripted.args_of("fetch")
    assert (fetch.group, fetch.member, fetch.generation, fetch.max_messages) == (
        "billing",
        "m-1",
        4,
        16_384,
    )


def test_a_start_may_be_a_duration_by_the_brokers_clock() -> None:
    scripted = ScriptedMember(start=timedelta(hours=2))
    scripted.member.connected(scripted.now)
    assert scripted.args_of("consumer.join")["start"] == -7_200_000_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "queue"},
        {"tags": "paid"},
        {"selector": 7},
        {"selector": "price >"},
        {"start": "now"},
        {"start": timedelta(0)},
        {"on_exhausted": "drop"},
        {"member": "no spaces"},
        {"prefetch_messages": 0},
        {"prefetch_messages": "many"},
        {"prefetch_messages": 1.5},
        {"prefetch_bytes": inf},
        {"lease": inf},
        {"session": nan},
        {"lease": True},
        {"session": 0},
        {"span": -1},
        {"max_parked": "few"},
        {"start": "2h"},
        {"lease": -1.0},
        {"strategy": "best"},
        {"on_failure": "local"},
        {"static": True},
        {"retry": 3},
        {"retry": {"retries": 3}},
        {"static": True, "member": "one", "mode": "broadcast"},
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        consumer_settings("billing", ["orders"], **wrong)


def test_topics_are_a_sequence_of_names() -> None:
    with pytest.raises(LocalProtocolError, match="topics"):
        consumer_settings("billing", "orders")


def test_a_missing_topic_is_requested_once() -> None:
    scripted = ScriptedMember()
    scripted.member.connected(scripted.now)
    scripted.refuse("consumer.join", UnknownTopic("no topic"))
    assert scripted.args_of("topic.describe") == {"names": ["orders"], "create": True}
    with capture_logs() as logs:
        scripted.answer("topic.describe", topics=[], created=["orders"], similar="order")
    assert logs == [
        {
            "event": "topic.created_at_use",
            "log_level": "warning",
            "topics": ["orders"],
            "similar": "order",
        }
    ]
    scripted.refuse("consumer.join", UnknownTopic("no topic"))
    assert isinstance(scripted.member.failure, UnknownTopic)


def test_a_group_with_other_settings_ends_the_member() -> None:
    scripted = ScriptedMember()
    scripted.member.connected(scripted.now)
    scripted.refuse("consumer.join", GroupMismatch("ordered"))
    with pytest.raises(GroupMismatch):
        scripted.receive()


def test_a_member_fetches_ahead_until_half_of_its_queue_is_full() -> None:
    scripted = ScriptedMember(prefetch_messages=4).joined().fetched(chunk("a", "b"))
    assert scripted.args_of("fetch").max_messages == 2
    scripted.fetched(chunk("c", at=2))
    assert scripted.request_names() == []
    scripted.receive()
    assert scripted.args_of("fetch").max_messages == 2


def test_a_fetch_is_limited_to_what_its_fields_can_hold() -> None:
    fetch = (
        ScriptedMember(prefetch_messages=1 << 40, prefetch_bytes=1 << 40).joined().args_of("fetch")
    )
    assert (fetch.max_messages, fetch.max_bytes) == ((1 << 32) - 1, (1 << 32) - 1)


def test_after_a_lost_connection_a_member_claims_its_messages_and_resends_what_is_unconfirmed() -> (
    None
):
    scripted = ScriptedMember().joined().fetched(chunk(*"abcdef"))
    messages = scripted.receive(4)
    scripted.operations.ack(messages[0], scripted.now)
    scripted.now += 1
    scripted.requests()
    scripted.operations.nack(messages[1], None, "no")
    scripted.requests()
    scripted.disconnect()
    scripted.operations.ack(messages[2], scripted.now)
    assert scripted.receive(9) == []
    scripted.member.connected(scripted.now)
    join = scripted.args_of("consumer.join")
    assert (join["member"], join[HELD]) == ("m-1", [["orders", 0, 0, 4]])
    scripted.answer("consumer.join", **scripted.join_reply(0))
    scripted.now += 1
    assert scripted.request_names() == ["ack", "consumer.nack"]
    assert scripted.args_of("ack").ranges == places((0, 1), (2, 3))
    assert scripted.args_of("consumer.nack")["offset"] == 1


def test_a_member_rejoins_when_the_broker_has_forgotten_it() -> None:
    scripted = ScriptedMember().joined().fetched(chunk("a", "b"))
    scripted.receive()
    scripted.refuse("fetch", UnknownMember("who?"))
    assert scripted.member.needs_reconnect
    assert scripted.request_names() == []
    scripted.disconnect()
    scripted.joined(generation=2).fetched(chunk("a", "b", attempt=2, lease=2))
    assert bodies(scripted.receive(9)) == ["b"]
    assert scripted.member.stats.rejoined == 1


def test_a_member_replaced_by_another_process_of_its_name_does_not_rejoin() -> None:
    scripted = ScriptedMember(member="one").joined()
    scripted.refuse("fetch", UnknownMember("replaced", detail={"replaced": True}))
    assert not scripted.member.needs_reconnect
    with pytest.raises(UnknownMember):
        scripted.receive()


def test_after_a_rebalance_messages_of_other_members_are_returned() -> None:
    scripted = (
        ScriptedMember()
        .joined(0, 1)
        .fetched(chunk("a", "b"), chunk("c", partition=1), chunk("r", at=9, moved=True))
    )
    scripted.receive()
    scripted.refuse("fetch", StaleGeneration("old"))
    scripted.answer("consumer.heartbeat", generation=2, assignment=[["orders", 1]])
    given_back = scripted.args_of("consumer.return")
    assert (given_back["generation"], given_back["ranges"]) == (2, [["orders", 0, 1, 2]])
    assert bodies(scripted.receive(9)) == ["c", "r"]
    assert scripted.args_of("fetch").generation == 2


def test_an_ordered_member_returns_all_of_partitions_that_it_lost() -> None:
    scripted = ScriptedMember("ordered").joined(0, 1).fetched(chunk("r", at=9, moved=True))
    scripted.now += 11
    scripted.answer("consumer.heartbeat", generation=2, assignment=[["orders", 1]])
    assert scripted.args_of("consumer.return")["ranges"] == [["orders", 0, 9, 10]]


def test_leases_are_extended_from_half_of_their_time_as_long_as_something_is_left() -> None:
    scripted = ScriptedMember().joined().fetched(chunk("a", lease=7), chunk("b", at=1, lease=8))
    first, _second = scripted.receive(2)
    extended = []
    for _ in range(4):
        scripted.now += 10
        extended += [
            asked.args["leases"] for asked in scripted.requests() if asked.name == "consumer.extend"
        ]
        scripted.open.clear()
        beat = GROUP | {"generation": 1, "assignment": [["orders", 0]]}
        scripted.member._heartbeat_answered(json.dumps(beat).encode(), scripted.now)
    assert extended == [[7, 8]]
    scripted.operations.ack(first, scripted.now)
    scripted.now += 31
    assert scripted.args_of("consumer.extend")["leases"] == [8]


@pytest.mark.parametrize("error", [Throttled("full"), BrokerFailed("bug")])
def test_a_member_backs_off_from_a_broker_in_trouble(error: Any) -> None:
    scripted = ScriptedMember().joined()
    scripted.refuse("fetch", error)
    assert scripted.request_names() == []
    scripted.now += 0.2
    assert scripted.request_names() == ["fetch"]


def test_a_member_leaves_when_everything_is_confirmed_and_returns_the_rest() -> None:
    scripted = ScriptedMember().joined().fetched(chunk(*"abc"))
    [message] = scripted.receive()
    assert scripted.request_names() == ["fetch"]
    scripted.member.close()
    assert scripted.receive() == []
    assert scripted.args_of("consumer.return")["ranges"] == [["orders", 0, 1, 3]]
    scripted.operations.ack(message, scripted.now)
    scripted.member.leave()
    scripted.fetched(chunk("late", at=3))
    assert scripted.args_of("ack").ranges == places((0, 1))
    scripted.answer("ack", b"")
    scripted.answer("consumer.return", stale=[])
    scripted.answer("consumer.return", stale=[])
    assert scripted.args_of("consumer.leave") == {
        "group": "billing",
        "member": "m-1",
        "instance": "i-1",
    }
    scripted.answer("consumer.leave")
    assert scripted.member.phase is MemberPhase.GONE


def test_a_member_tells_of_nacks_that_its_end_leaves_behind() -> None:
    scripted = ScriptedMember().joined().fetched(chunk(*"abc"))
    for message in scripted.receive(3):
        scripted.operations.nack(message, None, "no")
    scripted.member.leave()
    scripted.answer("consumer.nack", moved="retry", attempt=1, due_at=0)
    with capture_logs() as logs:
        scripted.member.leave_behind()
    assert [(log["event"], log["nacks"]) for log in logs] == [("consumer.left_behind", 2)]


def test_a_static_member_does_not_leave_and_returns_all_its_messages() -> None:
    scripted = ScriptedMember(member="one", static=True).joined().fetched(chunk(*"ab"))
    scripted.receive()
    scripted.member.leave()
    scripted.answer("consumer.return", stale=[])
    assert scripted.args_of("consumer.join")[HELD] == []
    assert "consumer.leave" not in scripted.request_names()
    scripted.answer("consumer.join", **scripted.join_reply(0))
    assert scripted.member.phase is MemberPhase.GONE


def test_before_a_member_leaves_a_fetch_in_flight_is_ended_by_a_rejoin() -> None:
    scripted = ScriptedMember().joined()
    scripted.requests()
    scripted.member.leave()
    assert scripted.args_of("consumer.join")[HELD] == []
    assert "consumer.leave" not in scripted.request_names()
    scripted.answer("consumer.join", **scripted.join_reply(0))
    assert "consumer.leave" in scripted.request_names()


def test_a_broadcast_member_without_a_name_begins_anew_where_it_was_forgotten() -> None:
    scripted = ScriptedMember("broadcast").joined(group="billing@m-1")
    scripted.disconnect()
    scripted.member.connected(scripted.now)
    scripted.refuse("consumer.heartbeat", UnknownGroup("gone"))
    assert scripted.args_of("consumer.join")["member"] is None


def test_a_broadcast_member_without_a_name_keeps_the_one_it_was_given_while_it_is_known() -> None:
    scripted = ScriptedMember("broadcast").joined(group="billing@m-1")
    scripted.disconnect()
    scripted.member.connected(scripted.now)
    assert scripted.args_of("consumer.heartbeat")["group"] == "billing@m-1"
    scripted.answer("consumer.heartbeat", generation=1, assignment=[])
    assert scripted.args_of("consumer.join")["member"] == "m-1"


def reset(generation: int, epoch: int, topic_id: int = 7) -> dict[str, Any]:
    """Return the answer to a heartbeat after a reset of partition 0."""
    return GROUP | {
        "generation": generation,
        "assignment": [["orders", 0], ["orders", 1]],
        "epoch": epoch,
        "topics": {"orders": topic_id},
        "resets": [["orders", 0, generation, [[0, epoch]]]],
    }


def two_partitions() -> tuple[ScriptedMember, list[Any]]:
    """Return a member with an outstanding message of partition 0 and one of 1."""
    scripted = ScriptedMember()
    scripted.member.connected(scripted.now)
    scripted.answer("consumer.join", **scripted.join_reply(0, 1) | reset(1, 1) | {"resets": []})
    scripted.fetched(chunk("a", "b", lease=1), chunk("c", "d", partition=1, lease=1))
    received = scripted.receive(4)
    scripted.requests()  # a fetch is in flight
    scripted.now += 11
    return scripted, received


@pytest.mark.parametrize("after", [reset(2, 2), reset(2, 1), reset(2, 1, topic_id=8)])
def test_what_is_held_of_a_partition_that_was_reset_is_forgotten(after: dict[str, Any]) -> None:
    """So is what a handler still says of it: it would be taken for an answer to the new
    delivery.
    """
    scripted, [first, second, *others] = two_partitions()
    [heartbeat] = [one for one in scripted.requests() if one.name == "consumer.heartbeat"]
    scripted.operations.ack(first, scripted.now)
    scripted.operations.nack(second, None, "failed")
    heartbeat.request.reply(json.dumps(after).encode(), scripted.now)
    assert not second.in_hand
    again = after["topics"]["orders"] == 8
    assert [message.in_hand for message in others] == [not again, not again]
    scripted.operations.ack_many([first, second], scripted.now)
    names = scripted.request_names()
    assert "ack" not in names
    assert "consumer.nack" not in names


def test_messages_have_the_identity_that_the_member_knew_when_it_fetched() -> None:
    scripted, _received = two_partitions()
    scripted.answer("consumer.heartbeat", **reset(2, 2))
    scripted.fetched(chunk("a", lease=2), chunk("e", partition=1, at=9, lease=2))
    assert [message.body for message in scripted.receive(9)] == [b"e"]  # of before the reset
    scripted.fetched(chunk("a", lease=3), chunk("f", partition=1, at=10, lease=3))
    received = {one.partition: one.fetched for one in scripted.receive(9)}
    assert [(received[n].epoch, received[n].topic_id) for n in range(2)] == [(2, 7), (1, 7)]


def test_a_member_whose_topic_was_deleted_while_it_was_away_joins_when_it_is_made_again() -> None:
    scripted = ScriptedMember().joined()
    scripted.disconnect()
    scripted.member.connected(scripted.now)
    scripted.refuse("consumer.join", UnknownTopic("no topic"))
    assert scripted.request_names() == [], "it makes no topic that somebody has deleted"
    assert scripted.member.needs_reconnect
    assert scripted.member.failure is None
    scripted.disconnect()
    scripted.joined(generation=3)
    assert "fetch" in scripted.request_names()
