"""Deliveries of messages, read back from the log: who had them, and how it ended."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from tests.broker.calls.test_plan_calls import Desk
from txmq.broker.search import deliveries
from txmq.client.protocol.calls import calls_by
from txmq.client.protocol.life_events import FILTERED, events_of
from txmq.client.protocol.lives import add_deliveries, add_life
from txmq.core.transactions.decisions import DecideTransaction
from txmq.core.transactions.half_storage import StorePart
from txmq.errors import RequestRejected, StoreError
from txmq.faces import run
from txmq.model.decider import ByPostgres
from txmq.model.message import Decision, Message
from txmq.model.units import MILLISECOND
from txmq.store.log.decoder import Damage
from txmq.wire.data_requests import Ack, AckedRange, Opcode, pack_ack


@pytest.fixture
def desk() -> Desk:
    """Forty letters."""
    return Desk()


def lives(desk: Desk, *offsets: int, replies: int = 4) -> list[dict[str, Any]]:
    """Return messages with their lives, as a trace has them."""
    found = [
        {"topic": "t", "partition": 0, "offset": at, "message_id": str(at), "state": "published"}
        for at in offsets
    ]

    def ask(name: str, **args: Any) -> Any:
        reply = desk.ask(name, **args)
        if isinstance(reply, RequestRejected):
            raise type(reply)(reply.message)
        return reply

    for one in found:
        run(add_life(calls_by(ask), one))
    run(add_deliveries(calls_by(ask), found, replies=replies))
    return found


def told(message: dict[str, Any]) -> list[tuple[Any, ...]]:
    [group] = message["life"]["groups"]
    return [(one["consumer"], one["attempt"], one["ended"]) for one in group["deliveries"]]


def call(desk: Desk, name: str, **args: Any) -> Any:
    return desk.client.call(name, **args)


def ack(desk: Desk, start: int, end: int, *, filtered: bool = False) -> None:
    ranges = (AckedRange("t", 0, start, end),)
    acks = ((), ranges) if filtered else (ranges, ())
    acked = Ack(desk.joined["generation"], "g", "a", *acks)
    assert desk.client.ask(Opcode.ACK, pack_ack(acked)).status == 0


def test_the_log_tells_who_had_a_message_and_how_it_ended(desk: Desk) -> None:
    for number in range(40, 43):
        desk.send(Message(b"x", f"k{number}"))
    desk.consume()
    ack(desk, 40, 41)
    back = {"group": "g", "member": "a", "generation": desk.joined["generation"]}
    assert "error" not in call(desk, "consumer.return", **back, ranges=[["t", 0, 41, 42]])
    desk.consume()
    desk.nack(41, {"type": "E", "text": "no", "fingerprint": "f"})
    desk.ask("dlq.replay", group="g", letters=[["t", 0, 41]], operator="ada")
    desk.consume()
    ack(desk, 41, 42)
    plain, letter, held = lives(desk, 40, 41, 42)
    assert told(plain) == [("a", 1, "processed")]
    assert told(letter) == [("a", 1, "returned"), ("a", 1, "failed"), ("a", 1, "processed")]
    assert told(held) == [("a", 1, None)]
    assert plain["life"]["deliveries_known"] | {"from_at": 0, "until_at": 0} == {
        "whole": True, "more": False, "from_at": 0, "until_at": 0,
    }  # fmt: skip
    words = [event.what for event in events_of([letter])]
    assert words.count("delivered") == 3
    assert words.count("failed") == words.count("returned") == words.count("processed") == 1


def test_what_a_filter_passed_over_is_not_called_processed(desk: Desk) -> None:
    for number in range(40, 43):
        desk.send(Message(b"x", f"k{number}"))
    desk.consume()
    ack(desk, 40, 41)
    ack(desk, 41, 42, filtered=True)
    plain, passed, held = lives(desk, 40, 41, 42)
    assert (told(plain), told(passed)) == ([("a", 1, "processed")], [("a", 1, "filtered")])
    last = [events_of([one])[-1].text for one in (plain, passed, held)]
    assert last == ["processed", FILTERED, "leased"]
    del passed["life"]["groups"][0]["deliveries"], passed["life"]["deliveries_known"]
    assert events_of([passed])[-1].text.startswith("settled: processed, or passed over")
    assert desk.ask("group.show", group="g")["filtered"] == 1


def test_a_message_before_the_begin_of_a_group_was_not_delivered(desk: Desk) -> None:
    desk.send(Message(b"x", "k40"))
    late = {"group": "late", "member": "l", "instance": "l", "topics": ["t"], "start": "last"}
    assert "error" not in call(desk, "consumer.join", **late)
    [one] = lives(desk, 40)
    [group] = [group for group in one["life"]["groups"] if group["group"] == "late"]
    one["life"]["groups"] = [group]
    assert events_of([one])[-1].text.startswith("not delivered: the group began behind it")


def test_a_lost_consumer_and_many_replies(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "MAX_RECORDS", 3)
    desk.plan(select={"error_type": "B"})
    desk.consume()
    assert "error" not in call(desk, "consumer.leave", group="g", member="a", instance="a")
    [one] = lives(desk, 0, replies=100)
    assert told(one)[:2] == [("a", 1, "failed"), ("a", 1, "consumer left")]
    assert one["life"]["deliveries_known"]["whole"]
    [cut] = lives(desk, 0, replies=1)
    assert cut["life"]["deliveries_known"]["more"]
    said = [event.text for event in events_of([cut]) if event.what == "deliveries"]
    assert said == ["the log was not read from here on: later deliveries are not known"]


def test_replies_that_end_in_time_tell_the_same_as_one(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"messages": [["t", 0, 3]]}
    whole = desk.ask("message.deliveries", **asked)["deliveries"]
    monkeypatch.setattr(deliveries, "STEP_BYTES", 1)
    times = count(desk.broker.engine.now(), MILLISECOND)
    monkeypatch.setattr(desk.broker.engine, "now", lambda: next(times))
    found, replies = [], 0
    while asked.get("after", 0) is not None:
        page = desk.ask("message.deliveries", **asked, within_ms=3)
        found += page["deliveries"]
        asked |= {"after": page["next"], "known": page["known"]}
        replies += 1
    assert replies > 2
    assert found == whole


def test_what_the_log_has_lost_is_said(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    # as where retention has removed the message, and the group keeps it
    monkeypatch.setattr(deliveries.DeliverySearch, "_first_published", lambda _self: -1)
    [one] = lives(desk, 0)
    assert not one["life"]["deliveries_known"]["whole"]
    [said] = [event for event in events_of([one]) if event.what == "deliveries"]
    assert "earlier deliveries are not known" in said.text


def test_retention_that_is_faster_than_a_reply_is_said(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan, starts = desk.broker.log.scan, list[int]()

    def gone(start: int) -> Any:
        """The second reply begins where the log has nothing any more."""
        starts.append(start)
        if len(starts) == 2:
            raise StoreError("its segment was removed")
        return scan(start)

    monkeypatch.setattr(deliveries, "MAX_RECORDS", 3)
    monkeypatch.setattr(desk.broker.log, "scan", gone)
    [one] = lives(desk, 0, replies=100)
    assert len(starts) > 2
    assert not one["life"]["deliveries_known"]["whole"]
    [said] = [event for event in events_of([one]) if event.what == "deliveries"]
    assert "earlier deliveries are not known" in said.text


def test_a_span_of_the_log_that_is_leapt_over_is_said(desk: Desk) -> None:
    end = desk.broker.log.end
    desk.broker.log.quarantined = (Damage("/data/log", end - 2, end - 1, "a test"),)
    [one] = lives(desk, 0)
    assert not one["life"]["deliveries_known"]["whole"]


@pytest.mark.parametrize("outcome", [Decision.COMMIT, Decision.ROLLBACK])
def test_reading_goes_on_behind_a_transaction_that_was_rolled_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, outcome: Decision
) -> None:
    monkeypatch.setattr(deliveries, "RECORDS_PER_STEP", 1)
    desk.send(Message(b"x", "k"))
    desk.consume()
    acked = ("ack", "g", "a", desk.joined["generation"], "t", 0, 40, 41)
    token = desk.broker.token(1)
    half = StorePart(
        token=token, part=0, sealed=True, commit=False, digest=b"d" * 32, epoch=0, service="s",
        batches=(), actions=(acked,), check_after=6_000_000, decider=ByPostgres(1, 1, 5, 7, 1),
    )  # fmt: skip
    assert not isinstance(desk.broker.do(half), RequestRejected)
    assert not isinstance(desk.broker.do(DecideTransaction(token, outcome, "s")), RequestRejected)
    if outcome is Decision.ROLLBACK:
        desk.consume()
        ack(desk, 40, 41)
    [one] = lives(desk, 40)
    undone = [("a", 1, "ack rolled back"), ("a", 2, "processed")]
    done = [("a", 1, "acked in a transaction")]
    assert told(one) == (undone if outcome is Decision.ROLLBACK else done)


def test_a_place_of_strangers_is_refused(desk: Desk) -> None:
    asked = desk.ask("message.deliveries", messages=[["nowhere", 0, 0]])
    assert isinstance(asked, RequestRejected)
    known = [[100, 1, 1, "a", 1, True]]
    wrong: dict[str, Any]
    for wrong in ({"messages": []}, {"messages": [["t", 0, 0]], "known": known}):
        assert "error" in call(desk, "message.deliveries", **wrong)
