"""Redrives of dead letters to another topic: copies, each once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.calls.test_letter_edits import EditOffice
from txmq.broker.calls import letter_redrives
from txmq.core.state import failed_messages, log_pins
from txmq.core.topics.topics import AlterTopic, CreateTopic
from txmq.core.transactions.decisions import DecideTransaction
from txmq.errors import BadRequest, RemoteProtocolError, RequestRejected, UnknownTopic
from txmq.model import limits
from txmq.model.message import Decision, Message
from txmq.model.origin import MAX_REDRIVES, REDRIVES, origin_headers
from txmq.store.tables import COPIES
from txmq.wire.data_requests import Ack, AckedRange, Opcode, pack_ack

WHY = {"operator": "ada", "reason": "to the other shop"}


class RedriveOffice(EditOffice):
    """An office beside a topic `other` of two partitions."""

    def __init__(self, number: int = 6) -> None:
        super().__init__(number)
        self.broker.do(CreateTopic("other", 2))

    def redrive(self, *offsets: int, **args: Any) -> Any:
        letters = {"letters": [["t", 0, offset] for offset in offsets]} if offsets else {}
        return self.call("dlq.redrive", group="g", **{"to": "other", **letters, **WHY, **args})

    def copies(self, topic: str = "other") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call(
            "message.find", topic=topic, limit=100, bodies=True
        )["messages"]
        return found


def test_a_copy_is_a_new_message_that_says_where_its_original_is() -> None:
    office = RedriveOffice()
    office.edit(1, body=b"mended")
    reply = office.redrive(3, 1)
    assert [one[:3] for one in reply["done"]] == [("t", 0, 1), ("t", 0, 3)]
    by_origin = {one["headers"]["txmq-origin-offset"]: one for one in office.copies()}
    assert by_origin.keys() == {"1", "3"}
    copy, letter = by_origin["1"], office.show(1)
    assert copy["key"] == letter["key"] == "k1"
    assert copy["message_id"] != letter["message_id"]
    assert copy["size"] == len(b"mended")
    assert copy["headers"] == letter["headers"] | {
        "txmq-origin-topic": "t",
        "txmq-origin-partition": "0",
        "txmq-origin-offset": "1",
        "txmq-origin-group": "g",
        "txmq-origin-id": letter["message_id"],
        "txmq-redriven-by": "ada",
        "txmq-redrives": "1",
    }
    [noted] = letter["copies"]
    assert (noted["topic"], noted["partition"], noted["offset"]) == (
        "other",
        copy["partition"],
        copy["offset"],
    )
    assert (noted["by"], noted["reason"]) == ("ada", "to the other shop")
    assert [one["call"] for one in letter["operations"]][-1] == "dlq.redrive"
    assert letter["state"] == "dead"
    assert office.state_again()


def test_a_letter_is_copied_once_unless_it_dies_again_or_again_is_said() -> None:
    office = RedriveOffice()
    everything: dict[str, Any] = {"select": {}}
    assert len(office.redrive(**everything)["done"]) == 6
    repeated = office.redrive(**everything)
    assert (repeated["done"], len(repeated["refused"]), repeated["next"]) == ((), 6, None)
    assert repeated["refused"][0][3].startswith("it has a copy already: other/")
    assert len(office.copies()) == 6
    assert len(office.redrive(0, again=True)["done"]) == 1
    office.broker.do(CreateTopic("third", 1))
    assert len(office.redrive(0, to="third")["done"]) == 1
    office.replay(2)
    office.fetch()
    assert office.redrive(2)["refused"] == (("t", 0, 2, "not dead: it is retried, see txmq retry"),)
    office.nack(2, {"type": "C", "text": "again", "bases": []})
    assert len(office.redrive(2)["done"]) == 1
    assert [one["number"] for one in office.show(2)["copies"]] == [3, 7]
    assert len(office.copies()) == 8


def test_abandoned_letters_end_in_the_record_of_their_copies() -> None:
    office = RedriveOffice()
    before = office.broker.log.end
    assert len(office.redrive(0, 1, abandon=True)["done"]) == 2
    shown = office.show(0)
    assert (shown["state"], shown["reason"]) == ("abandoned", "to the other shop")
    assert len(shown["copies"]) == 1
    assert len([*office.broker.log.scan(before)]) == 1
    assert office.redrive(0)["refused"] == (("t", 0, 0, "abandoned"),)
    office.client.call("consumer.leave", group="g", member="a", instance="a")
    office.call("group.delete", group="g")
    office.broker.pass_time(5)
    assert [*office.broker.engine.state.tables[COPIES].range(b"")] == []
    assert len(office.copies()) == 2


def test_pages_of_copies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_redrives, "MAX_COPIES", 4)
    office = RedriveOffice(10)
    done: list[int] = []
    cursor: dict[str, Any] = {}
    for _ in range(3):
        page = office.redrive(select={}, **cursor)
        done.append(len(page["done"]))
        cursor = {"cursor": page["next"]}
    assert (done, cursor) == ([4, 4, 2], {"cursor": None})
    assert type(office.redrive(*range(5))) is BadRequest
    assert type(office.redrive(0, select={})) is BadRequest
    assert type(office.redrive()) is BadRequest
    assert type(office.redrive(0, to="nowhere")) is UnknownTopic
    monkeypatch.setattr(letter_redrives, "MAX_BYTES", 1)
    one = office.redrive(0, 1, again=True)
    assert (len(one["done"]), one["left"]) == (1, [("t", 0, 1)])


def test_a_letter_that_cannot_be_copied_is_refused_alone() -> None:
    office = RedriveOffice()
    office.edit(1, headers={REDRIVES: str(MAX_REDRIVES)})
    full = {str(at): "" for at in range(limits.HEADER_PAIRS)}
    office.edit(2, headers=full)
    office.edit(3, headers={REDRIVES: "forged \u0661"})
    reply = office.redrive(1, 2, 3, 99)
    assert [one[2] for one in reply["done"]] == [2, 3]
    reasons = {one[2]: one[3] for one in reply["refused"]}
    assert reasons[1].startswith("it is the copy of a copy, 16 times over")
    assert reasons[99] == "no such letter"
    copies = office.copies()
    assert [copy["headers"][REDRIVES] for copy in copies] == ["1", "1"]
    assert full.items() <= copies[0]["headers"].items()
    office.broker.do(AlterTopic("other", {"writable": False}))
    assert "is closed for writing" in office.redrive(4)["refused"][0][3]


def test_a_copy_does_not_overtake_a_transaction_that_holds_its_key() -> None:
    office = RedriveOffice()
    token = office.broker.half(1, Message(b"first", "k1"))
    refused = office.redrive(1, to="t")
    assert refused["refused"][0][3].startswith("an undecided transaction holds its key")
    assert len(office.redrive(2, to="t")["done"]) == 1
    office.broker.do(DecideTransaction(bytes.fromhex(token), Decision.ROLLBACK, "test"))
    assert len(office.redrive(1, to="t")["done"]) == 1


@pytest.mark.parametrize(
    "args",
    [
        {"reason": ""},
        {"operator": "<script>"},
        {"to": "../x"},
        {"to": "_txmq.audit"},
        {"cursor": "x"},
    ],
)
def test_hostile_arguments_are_refused(args: dict[str, Any]) -> None:
    office = RedriveOffice(2)
    try:
        reply = office.redrive(1, **args)
    except RemoteProtocolError:
        return
    assert isinstance(reply, RequestRejected) or not reply["done"], reply


def test_a_forged_count_of_redrives_is_no_count() -> None:
    at = {"topic": "t", "partition": 0, "offset": 1, "group": "g", "message_id": "i", "by": "ada"}
    for forged in ("-1", "1e9", " 3", "9999", "\u0663", ""):
        assert origin_headers({REDRIVES: forged}, **at)[REDRIVES] == "1"  # type: ignore[arg-type]
    assert origin_headers({REDRIVES: "3", "a": "b"}, **at)["a"] == "b"  # type: ignore[arg-type]


class GivingOffice(RedriveOffice):
    """An office whose group h has processed all messages."""

    def __init__(self) -> None:
        super().__init__(4)
        self.waiting = self.give(0)
        assert len(self.fetch("h", "b")) == 4
        for offset in range(4):
            ack = Ack(self.other["generation"], "h", "b", (AckedRange("t", 0, offset, offset + 1),))
            self.client.ask(Opcode.ACK, pack_ack(ack))

    def give(self, *offsets: int, **args: Any) -> Any:
        return self.redrive(*offsets, to=None, to_group="h", **args)

    def nack_of_other(self, offset: int) -> None:
        place = {"topic": "t", "partition": 0, "offset": offset}
        error = {"type": "H", "text": "", "fingerprint": "h"}
        self.client.call(
            "consumer.nack", group="h", member="b", generation=self.other["generation"],
            **place, error=error, dead=True,
        )  # fmt: skip


def test_another_group_gets_the_messages_themselves_once_each() -> None:
    office = GivingOffice()
    assert office.waiting["refused"][0][3].startswith("group h gets it anyway")
    office.edit(1, body=b"mended")
    before = {offset: office.show(offset)["message_id"] for offset in (0, 1, 2)}
    reply = office.give(0, 1, 2)
    assert (reply["done"], reply["refused"]) == (
        tuple(("t", 0, at, 0, at) for at in (0, 1, 2)),
        (),
    )
    got = office.fetch("h", "b")
    assert {offset: message[0] for offset, message in got.items()} == before
    assert (got[0][4], got[1][4]) == (office.body(0), b"mended")
    assert office.fetch() == {}, "group g has dead letters only"
    [copy] = office.show(1)["copies"]
    assert (copy["group"], copy["by"], copy["reason"]) == ("h", "ada", "to the other shop")
    again = office.give(0)
    assert again["refused"] == (("t", 0, 0, "group h was given it already"),)
    under_way = office.give(0, again=True)
    assert under_way["refused"][0][3] == "group h has it as a failed message: retry"
    office.nack_of_other(0)
    died = office.call("dlq.show", group="h", topic="t", partition=0, offset=0)
    assert (died["given_by"], died["state"]) == ("g", "dead")
    assert office.state_again()


def test_what_the_topic_has_not_as_it_is_is_kept_for_the_other_group() -> None:
    office = GivingOffice()
    office.edit(1, body=b"mended")
    office.give(0, 1)
    state = office.broker.engine.state
    rows = [failed_messages.get(state, state.groups.by_name["h"], (1, 0, at)) for at in (0, 1)]
    pins = [log_pins.get(state, row.position) for row in rows if row is not None]
    other = state.groups.by_name["h"].group_id
    assert (pins[0], pins[1] and pins[1][1:]) == (None, (other, 1, 0, 1))
    office.edit(1, edits=1, revert=True)
    assert office.fetch("h", "b")[1][4] == b"mended"


def test_letters_are_given_and_closed_by_one_record() -> None:
    office = GivingOffice()
    reply = office.give(select={"key": "k3"}, abandon=True)
    assert [one[2] for one in reply["done"]] == [3]
    assert office.show(3)["state"] == "abandoned"
    assert office.fetch("h", "b").keys() == {3}
    assert office.give(3)["refused"][0][3] == "abandoned"
    assert office.state_again()


@pytest.mark.parametrize(
    "args",
    [{"to_group": "g", "to": None}, {"to_group": "h"}, {"to": None}],
)
def test_a_redrive_has_one_aim_which_is_another_group(args: dict[str, Any]) -> None:
    assert type(RedriveOffice(1).redrive(0, **args)) is BadRequest


def test_one_call_decompresses_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_redrives, "MAX_READ", 400_000)
    office = RedriveOffice(0)
    office.kill_packed(3, 300_000)
    page = office.redrive(select={})
    assert (len(page["done"]), page["next"] is None) == (2, False)
    assert len(office.redrive(select={}, cursor=page["next"])["done"]) == 1
