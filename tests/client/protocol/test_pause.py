"""Members that pause a topic, or all, and resume."""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.scripted_member import ScriptedMember, chunk, keyed


def two_topics(**options: Any) -> ScriptedMember:
    return ScriptedMember(topics=["orders", "refunds"], **options).joined()


def test_a_paused_member_returns_what_waits_and_fetches_again_later() -> None:
    scripted = ScriptedMember().joined().fetched(chunk(*"abc"))
    [message] = scripted.receive()
    scripted.requests()
    scripted.member.pause(paused=True)
    assert scripted.args_of("consumer.return")["ranges"] == [["orders", 0, 1, 3]]
    assert scripted.args_of("consumer.heartbeat")["paused"] == ["orders"]
    assert scripted.receive() == []
    scripted.answer("consumer.return", stale=[])
    scripted.fetched(chunk("d", at=3))
    assert scripted.args_of("consumer.return")["ranges"] == [["orders", 0, 3, 4]]
    assert scripted.operations.ack(message, scripted.now) != 0
    assert "fetch" not in scripted.request_names()
    scripted.member.pause(paused=False)
    assert "fetch" in scripted.request_names()


def test_a_paused_topic_is_returned_and_not_fetched_and_others_are() -> None:
    scripted = two_topics().fetched(chunk(*"ab"), chunk(*"cd", topic="refunds"))
    scripted.requests()
    scripted.member.pause(["orders"], paused=True)
    assert scripted.args_of("consumer.return")["ranges"] == [["orders", 0, 0, 2]]
    assert scripted.args_of("consumer.heartbeat")["paused"] == ["orders"]
    assert [message.body for message in scripted.receive(9)] == [b"c", b"d"]
    assert [asked.args.without for asked in scripted.requests() if asked.name == "fetch"] == [
        (),
        ("orders",),
    ]


def test_messages_in_flight_of_a_paused_topic_are_returned() -> None:
    scripted = two_topics()
    scripted.requests()
    scripted.member.pause(["orders"], paused=True)
    scripted.fetched(chunk("a"), chunk("b", topic="refunds"))
    assert scripted.args_of("consumer.return")["ranges"] == [["orders", 0, 0, 1]]
    assert [message.body for message in scripted.receive(9)] == [b"b"]


@pytest.mark.parametrize("confirmed", [True, False])
def test_an_ordered_member_that_resumes_before_its_returns_are_confirmed_joins_anew(
    *, confirmed: bool
) -> None:
    scripted = ScriptedMember("ordered").joined().fetched(chunk(*keyed("a")))
    scripted.requests()
    scripted.member.pause(paused=True)
    assert scripted.args_of("consumer.return")["ranges"] == [["orders", 0, 0, 1]]
    if confirmed:
        scripted.answer("consumer.return", stale=[])
    scripted.member.pause(paused=False)
    assert scripted.member.needs_reconnect is not confirmed


def test_at_most_two_fetches_are_in_flight_however_often_pauses_change() -> None:
    scripted = two_topics()
    for paused in (True, False, True, False, True):
        scripted.member.pause(["orders"], paused=paused)
        assert scripted.request_names().count("fetch") <= 2
    scripted.fetched()
    assert [asked.args.without for asked in scripted.requests() if asked.name == "fetch"] == [
        (),
        ("orders",),
    ]


def test_a_member_with_all_topics_paused_does_not_fetch() -> None:
    scripted = two_topics().fetched()
    scripted.member.pause(["orders", "refunds"], paused=True)
    assert "fetch" not in scripted.request_names()
    assert scripted.member.wake_at() is not None, "it has heartbeats"


def test_a_pause_outlives_connections_and_is_reported_again() -> None:
    scripted = two_topics()
    scripted.member.pause(["refunds"], paused=True)
    scripted.disconnect()
    scripted.joined()
    assert scripted.args_of("fetch").without == ("refunds",)
    assert scripted.args_of("consumer.heartbeat")["paused"] == ["refunds"]
