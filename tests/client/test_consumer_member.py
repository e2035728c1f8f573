"""A member of a group: what it asks of the broker, and when."""

from __future__ import annotations

from datetime import timedelta
from math import inf, nan
from typing import Any

import pytest

from tests.client.consuming import Spoken, bodies, chunk, places
from txmq.client.protocol.consumer.member import Phase
from txmq.client.protocol.consumer.settings import checked
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


def test_it_joins_with_its_settings_and_then_fetches() -> None:
    spoken = Spoken(
        "ordered",
        start="last",
        on_exhausted="skip",
        retry=RetryPolicy.table(1, 2),
        lease_s=9,
        session_s=6,
    )
    spoken.member.connected(spoken.now)
    assert spoken.asked("consumer.join") == {
        "group": "billing",
        "instance": "i-1",
        "mode": "ordered",
        "topics": ["orders"],
        "start": "last",
        "on_exhausted": "skip",
        "retry": RetryPolicy.table(1, 2).to_json(),
        "lease_ms": 9_000,
        "session_ms": 6_000,
        "consume_timeout_ms": None,
        "strategy": None,
        "max_parked": None,
        "flood_keys": None,
        "span": None,
        "static": False,
        "member": None,
        "held": None,
    }
    spoken.answer("consumer.join", **spoken.seat(0, generation=4))
    fetch = spoken.asked("fetch")
    assert (fetch.group, fetch.member, fetch.generation, fetch.max_messages) == (
        "billing",
        "m-1",
        4,
        16_384,
    )


def test_a_start_may_be_a_duration_by_the_brokers_clock() -> None:
    spoken = Spoken(start=timedelta(hours=2))
    spoken.member.connected(spoken.now)
    assert spoken.asked("consumer.join")["start"] == -7_200_000_000


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
        {"lease_s": inf},
        {"session_s": nan},
        {"lease_s": True},
        {"span": -1},
        {"max_parked": "few"},
        {"start": "2h"},
        {"lease_s": -1.0},
        {"strategy": "best"},
        {"on_failure": "local"},
        {"tag": "paid"},
        {"static": True},
        {"static": True, "member": "one", "mode": "broadcast"},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        checked("billing", ["orders"], **wrong)


def test_topics_are_a_sequence_of_names() -> None:
    with pytest.raises(LocalProtocolError, match="topics"):
        checked("billing", "orders")


def test_a_topic_that_is_missing_is_asked_for_once() -> None:
    spoken = Spoken()
    spoken.member.connected(spoken.now)
    spoken.refuse("consumer.join", UnknownTopic("no topic"))
    assert spoken.asked("topic.describe") == {"names": ["orders"], "create": True}
    spoken.answer("topic.describe", topics=[])
    spoken.refuse("consumer.join", UnknownTopic("no topic"))
    assert isinstance(spoken.member.failure, UnknownTopic)


def test_a_group_with_other_settings_ends_it() -> None:
    spoken = Spoken()
    spoken.member.connected(spoken.now)
    spoken.refuse("consumer.join", GroupMismatch("ordered"))
    with pytest.raises(GroupMismatch):
        spoken.take()


def test_it_fetches_ahead_until_half_of_what_may_wait_is_there() -> None:
    spoken = Spoken(prefetch_messages=4).joined().fetched(chunk("a", "b"))
    assert spoken.asked("fetch").max_messages == 2
    spoken.fetched(chunk("c", at=2))
    assert spoken.names() == []
    spoken.take()
    assert spoken.asked("fetch").max_messages == 2


def test_it_asks_for_no_more_than_a_fetch_can_say() -> None:
    fetch = Spoken(prefetch_messages=1 << 40, prefetch_bytes=1 << 40).joined().asked("fetch")
    assert (fetch.max_messages, fetch.max_bytes) == ((1 << 32) - 1, (1 << 32) - 1)


def test_after_a_lost_connection_it_claims_what_is_in_hand_and_sends_again_what_was_not_confirmed() -> (
    None
):
    spoken = Spoken().joined().fetched(chunk(*"abcdef"))
    messages = spoken.take(4)
    spoken.hands.ack(messages[0], spoken.now)
    spoken.now += 1
    spoken.ask()
    spoken.hands.nack(messages[1], None, "no")
    spoken.ask()
    spoken.lost()
    spoken.hands.ack(messages[2], spoken.now)
    assert spoken.take(9) == []
    spoken.member.connected(spoken.now)
    join = spoken.asked("consumer.join")
    assert (join["member"], join[HELD]) == ("m-1", [["orders", 0, 0, 4]])
    spoken.answer("consumer.join", **spoken.seat(0))
    spoken.now += 1
    assert spoken.names() == ["ack", "consumer.nack", "fetch"]
    assert spoken.asked("ack").ranges == places((0, 1), (2, 3))
    assert spoken.asked("consumer.nack")["offset"] == 1


def test_it_joins_again_when_the_broker_has_forgotten_it() -> None:
    spoken = Spoken().joined().fetched(chunk("a", "b"))
    spoken.take()
    spoken.refuse("fetch", UnknownMember("who?"))
    assert spoken.member.wants_reconnect
    assert spoken.names() == []
    spoken.lost()
    spoken.joined(generation=2).fetched(chunk("a", "b", attempt=2, lease=2))
    assert bodies(spoken.take(9)) == ["b"]
    assert spoken.member.stats.rejoined == 1


def test_one_that_was_replaced_by_another_process_of_its_name_does_not_fight_it() -> None:
    spoken = Spoken(member="one").joined()
    spoken.refuse("fetch", UnknownMember("replaced", detail={"replaced": True}))
    assert not spoken.member.wants_reconnect
    with pytest.raises(UnknownMember):
        spoken.take()


def test_a_rebalance_is_heard_of_and_what_belongs_to_others_is_given_back() -> None:
    spoken = (
        Spoken()
        .joined(0, 1)
        .fetched(chunk("a", "b"), chunk("c", partition=1), chunk("r", at=9, moved=True))
    )
    spoken.take()
    spoken.refuse("fetch", StaleGeneration("old"))
    spoken.answer("consumer.heartbeat", generation=2, assignment=[["orders", 1]])
    given_back = spoken.asked("consumer.return")
    assert (given_back["generation"], given_back["ranges"]) == (2, [["orders", 0, 1, 2]])
    assert bodies(spoken.take(9)) == ["c", "r"]
    assert spoken.asked("fetch").generation == 2


def test_an_ordered_member_keeps_nothing_of_partitions_that_it_lost() -> None:
    spoken = Spoken("ordered").joined(0, 1).fetched(chunk("r", at=9, moved=True))
    spoken.now += 11
    spoken.answer("consumer.heartbeat", generation=2, assignment=[["orders", 1]])
    assert spoken.asked("consumer.return")["ranges"] == [["orders", 0, 9, 10]]


def test_leases_are_extended_from_half_of_their_time_as_long_as_something_is_left() -> None:
    spoken = Spoken().joined().fetched(chunk("a", lease=7), chunk("b", at=1, lease=8))
    first, _second = spoken.take(2)
    extended = []
    for _ in range(4):
        spoken.now += 10
        extended += [
            asked.args["leases"] for asked in spoken.ask() if asked.name == "consumer.extend"
        ]
        spoken.open.clear()
        spoken.member._beaten(b'{"generation": 1, "assignment": [["orders", 0]]}', spoken.now)
    assert extended == [[7, 8]]
    spoken.hands.ack(first, spoken.now)
    spoken.now += 31
    assert spoken.asked("consumer.extend")["leases"] == [8]


@pytest.mark.parametrize("error", [Throttled("full"), BrokerFailed("bug")])
def test_a_broker_in_trouble_gets_a_pause(error: Any) -> None:
    spoken = Spoken().joined()
    spoken.refuse("fetch", error)
    assert spoken.names() == []
    spoken.now += 0.2
    assert spoken.names() == ["fetch"]


def test_it_leaves_when_everything_is_confirmed_and_gives_the_rest_back() -> None:
    spoken = Spoken().joined().fetched(chunk(*"abc"))
    [message] = spoken.take()
    assert spoken.names() == ["fetch"]
    spoken.member.close()
    assert spoken.take() == []
    assert spoken.asked("consumer.return")["ranges"] == [["orders", 0, 1, 3]]
    spoken.hands.ack(message, spoken.now)
    spoken.member.leave()
    spoken.fetched(chunk("late", at=3))
    assert spoken.asked("ack").ranges == places((0, 1))
    spoken.answer("ack", b"")
    spoken.answer("consumer.return", stale=[])
    spoken.answer("consumer.return", stale=[])
    assert spoken.asked("consumer.leave") == {
        "group": "billing",
        "member": "m-1",
        "instance": "i-1",
    }
    spoken.answer("consumer.leave")
    assert spoken.member.phase is Phase.GONE


def test_a_static_member_does_not_leave_and_gives_back_all_it_has() -> None:
    spoken = Spoken(member="one", static=True).joined().fetched(chunk(*"ab"))
    spoken.take()
    spoken.member.leave()
    spoken.answer("consumer.return", stale=[])
    assert spoken.asked("consumer.join")[HELD] == []
    assert "consumer.leave" not in spoken.names()
    spoken.answer("consumer.join", **spoken.seat(0))
    assert spoken.member.phase is Phase.GONE


def test_before_it_leaves_a_fetch_under_way_is_ended_by_a_rejoin() -> None:
    spoken = Spoken().joined()
    spoken.ask()
    spoken.member.leave()
    assert spoken.asked("consumer.join")[HELD] == []
    assert "consumer.leave" not in spoken.names()
    spoken.answer("consumer.join", **spoken.seat(0))
    assert "consumer.leave" in spoken.names()


def test_a_broadcast_member_without_a_name_begins_anew_where_it_was_forgotten() -> None:
    spoken = Spoken("broadcast").joined(group="billing@m-1")
    spoken.lost()
    spoken.member.connected(spoken.now)
    spoken.refuse("consumer.heartbeat", UnknownGroup("gone"))
    assert spoken.asked("consumer.join")["member"] is None


def test_a_broadcast_member_without_a_name_keeps_the_one_it_was_given_while_it_is_known() -> None:
    spoken = Spoken("broadcast").joined(group="billing@m-1")
    spoken.lost()
    spoken.member.connected(spoken.now)
    assert spoken.asked("consumer.heartbeat")["group"] == "billing@m-1"
    spoken.answer("consumer.heartbeat", generation=1, assignment=[])
    assert spoken.asked("consumer.join")["member"] == "m-1"


def test_messages_of_an_earlier_epoch_are_not_processed_any_more() -> None:
    spoken = Spoken().joined().fetched(chunk("a"))
    spoken.now += 11
    spoken.answer("consumer.heartbeat", generation=1, assignment=[["orders", 0]], epoch=2)
    assert spoken.take() == []
    spoken.fetched(chunk("a", lease=2))
    assert spoken.take()[0].parcel.epoch == 2
