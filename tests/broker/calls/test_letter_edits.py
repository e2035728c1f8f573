"""Edits of dead letters: another version for one group, and the original stays."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

import pytest

from tests.broker.calls.test_letter_calls import HOSTILE, Office
from txmq.batch import BatchView, encode, verify
from txmq.broker.data_directory.verify import verify_index
from txmq.broker.delivery import fetch_service
from txmq.core import machine
from txmq.core.audit import AUDIT_TOPIC_ID
from txmq.core.consumers import letter_edits
from txmq.core.state import failed_messages, log_pins
from txmq.core.state.trial_outcomes import TrialOutcomes
from txmq.core.topics.sends import StoreBatch
from txmq.errors import (
    BadRequest,
    Conflict,
    MessagesDamaged,
    RemoteProtocolError,
    RequestRejected,
    UnknownGroup,
    UnknownLetter,
    UnknownMember,
)
from txmq.model import limits
from txmq.model.message import Message
from txmq.store.log.segment import segment_path
from txmq.store.tables import EDITS, NAMES, SIGN, MemoryTables
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Ack, AckedRange, Fetch, Opcode, pack_ack, pack_fetch
from txmq.wire.frames import encode_frame

PLACE = {"topic": "t", "partition": 0}


class EditOffice(Office):
    """An office whose operator edits letters of group g; group h has the same ones."""

    def __init__(self, number: int = 4) -> None:
        super().__init__(number)
        self.other: Any = self.client.call(
            "consumer.join", group="h", member="b", instance="b", mode="ordered", topics=["t"]
        )

    def edit(self, offset: int, *, edits: int = 0, group: str = "g", **changes: Any) -> Any:
        if isinstance(changes.get("body"), bytes):
            changes["body"] = b64encode(changes["body"]).decode()
        named = {"operator": "ada", "reason": "a wrong amount"} | changes
        return self.call("dlq.edit", group=group, **PLACE, offset=offset, edits=edits, **named)

    def call(self, name: str, /, **args: object) -> Any:
        return self.broker.ask(name, **args)

    def show(self, offset: int, **args: object) -> Any:
        return self.call("dlq.show", group="g", **PLACE, offset=offset, **args)

    def body(self, offset: int, **args: object) -> bytes:
        return b64decode(self.show(offset, **args)["body"])

    def damage(self, offset: int) -> None:
        """Flip a bit of the newest version of a letter."""
        state = self.broker.engine.state
        row = failed_messages.get(state, state.groups.by_name["g"], (1, 0, offset))
        assert row is not None
        file = self.broker.fs.open(segment_path("/data", 0), write=True)
        (byte,) = file.pread(1, row.position + 84)
        file.pwrite([bytes([byte ^ 16])], row.position + 84)

    def replay(self, *offsets: int, group: str = "g") -> Any:
        letters = [["t", 0, offset] for offset in offsets]
        return self.call("dlq.replay", group=group, letters=letters)

    def fetch(self, group: str = "g", member: str = "a") -> dict[int, tuple[Any, ...]]:
        """Return what a member gets: id, key, headers, birth and body, by offset."""
        joined = self.joined if group == "g" else self.other
        wanted = Fetch(joined["generation"], 0, 1 << 22, 10_000, group, member)
        reply = self.client.ask(Opcode.FETCH, pack_fetch(wanted))
        found = {}
        for chunk in unpack_chunks(reply.payload).chunks:
            view = BatchView(bytes(chunk.batch))
            for row in range(chunk.first_row, chunk.first_row + chunk.rows):
                columns = (view.message_ids, view.keys, view.headers, view.born_at, view.bodies)
                found[chunk.base_offset + row] = tuple(column[row] for column in columns)
        return found

    def pins(self) -> int:
        found = log_pins.pins_below(self.broker.engine.state, SIGN)
        return sum(pin.topic_id != AUDIT_TOPIC_ID for pin in found)

    def state_again(self) -> bool:
        """Return whether a snapshot of the state gives the same state again."""
        state, tables = self.broker.engine.state, MemoryTables()
        machine.save(state)
        for name in NAMES:
            for key, row in state.tables[name].range(b""):
                tables[name].put(key, row)
        again = machine.load(tables)
        machine.save(again)
        return all(
            [*again.tables[name].range(b"")] == [*state.tables[name].range(b"")] for name in NAMES
        )


def test_an_edited_letter_is_the_same_message_for_its_group_alone() -> None:
    office = EditOffice()
    for body, headers in ((b"mended", None), (None, {"by": "ada"}), (b"x" * 6_000, {})):
        edits = office.show(1)["edits"]
        shown = office.show(1)
        assert office.edit(1, edits=edits, body=body, headers=headers) == {"edits": edits + 1}
        wanted = shown["headers"] if headers is None else headers
        assert office.show(1)["headers"] == wanted
        assert body is None or office.body(1) == body
    assert office.replay(1, 2)["done"] == (("t", 0, 1), ("t", 0, 2))
    got = office.fetch()
    published = office.fetch("h", "b")  # which begins with the messages of the topic
    message_id, key, headers, born_at, body = published[1]
    assert (headers, body) == ({"tenant": "blue"}, b"x" * 10)
    assert got == {1: (message_id, key, {}, born_at, b"x" * 6_000), 2: published[2]}
    assert office.state_again()


def test_every_version_is_kept_with_its_author_until_the_letter_ends() -> None:
    office = EditOffice()
    office.edit(1, body=b"one", operator="ada", reason=HOSTILE)
    office.edit(1, body=b"two", edits=1, operator="bob")
    assert office.edit(1, revert=True, edits=2, reason="was right") == {"edits": 3}
    shown = office.show(1)
    assert [
        (one["number"], one["by"], one["reason"], one["reverts"]) for one in shown["versions"]
    ] == [
        (0, "", "", False),
        (1, "ada", HOSTILE, False),
        (2, "bob", "a wrong amount", False),
        (3, "ada", "was right", True),
    ]
    assert [office.body(1, version=at) for at in range(4)] == [b"x" * 10, b"one", b"two", b"x" * 10]
    assert shown["headers"] == office.show(1, version=0)["headers"] == {"tenant": "blue"}
    assert type(office.show(1, version=4)) is BadRequest
    assert office.show(2)["versions"] == []
    assert office.pins() == 3
    assert not [*verify_index(office.broker.log, office.broker.engine.state.tables)]  # type: ignore[arg-type]
    # another death of the message is one of the same letter, with its edits
    office.replay(1)
    assert office.fetch()[1][-1] == b"x" * 10
    office.nack(1, {"type": "C", "text": "again", "bases": []})
    assert (office.show(1)["edits"], office.show(1)["replays"]) == (3, 1)
    office.edit(1, edits=3, body=b"four")
    office.replay(1)
    assert office.fetch()[1][-1] == b"four"
    place = {"group": "g", "member": "a", "generation": office.joined["generation"]}
    office.client.call("consumer.return", **place, ranges=[["t", 0, 1, 2]])
    assert office.fetch()[1][-1] == b"four"
    office.client.call("consumer.leave", group="g", member="a", instance="a")
    office.call("group.delete", group="g")
    office.broker.pass_time(5)
    assert [*office.broker.engine.state.tables[EDITS].range(b"")] == []
    assert office.pins() == 0


def test_a_reset_gives_the_group_what_was_published_and_says_so() -> None:
    office = EditOffice()
    office.edit(1, body=b"mended")
    office.edit(2, body=b"mended")
    reset = {"group": "g", "topic": "t", "to": "first"}
    assert office.call("group.reset", **reset, dry_run=True)["edited"] == 2
    assert office.call("group.reset", **reset)["edited"] == 2
    assert [*office.broker.engine.state.tables[EDITS].range(b"")] == []
    office.joined = office.client.call(
        "consumer.join", group="g", member="a", instance="a", mode="concurrent", topics=["t"]
    )
    assert {one[-1] for one in office.fetch().values()} == {b"x" * 10}


def test_only_open_letters_are_edited_and_only_as_they_were_seen() -> None:
    office = EditOffice(6)
    office.replay(0)
    assert office.fetch().keys() == {0}
    reason = office.call("dlq.abandon", group="g", letters=[["t", 0, 2]], reason="no")
    assert reason["done"]
    refused = {
        0: "cannot be edited: a has it in hand",
        2: "cannot be edited: abandoned",
        99: "has no dead letter t/0/99",
    }
    for offset, text in refused.items():
        answer = office.edit(offset, body=b"y")
        assert type(answer) is (UnknownLetter if offset == 99 else Conflict)
        assert text in answer.message
    assert type(office.edit(1, body=b"y", group="nobody")) is UnknownGroup
    assert office.edit(1, body=b"y", edits=0) == {"edits": 1}
    seen = office.edit(1, body=b"z", edits=0)
    assert (type(seen), seen.detail) == (Conflict, {"edits": 1})
    assert office.body(1) == b"y"
    wrong: list[dict[str, Any]] = [
        {},
        {"revert": True},
        {"body": b"x" * 10},
        {"body": b"y", "revert": True},
        {"body": bytes(limits.MESSAGE + 1)},
        {"headers": {str(at): "x" * 1_000 for at in range(40)}},
    ]
    for changes in wrong:
        answer = office.edit(3, **changes)
        assert isinstance(answer, RequestRejected), changes
        assert type(answer) is BadRequest
    assert office.show(3)["edits"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"body": "no base64!"},
        {"body": "=cmd|"},
        {"body": "A" * (limits.MESSAGE * 2)},
        {"body": "eQ==", "reason": ""},
        {"body": "eQ==", "reason": "x" * 5_000},
        {"body": "eQ==", "operator": "<script>"},
        {"body": "eQ==", "operator": None},
        {"body": "eQ==", "edits": -1},
        {"body": "eQ==", "key": "other"},
        {"headers": {"": "x"}},
        {"headers": {"a": 1}},
        {"headers": {str(at): "" for at in range(limits.ALL_HEADER_PAIRS + 1)}},
    ],
)
def test_hostile_arguments_are_refused(changes: dict[str, Any]) -> None:
    office = EditOffice(2)
    with pytest.raises(RemoteProtocolError):
        office.edit(1, **changes)
    assert office.show(1)["edits"] == 0


def test_a_letter_has_so_many_edits_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_edits, "MAX_EDITS", 2)
    office = EditOffice(2)
    office.edit(1, body=b"1")
    office.edit(1, body=b"2", edits=1)
    assert office.edit(1, body=b"3", edits=2).message == "it has 2 edits, the maximum"
    assert type(office.edit(1, revert=True, edits=2)) is BadRequest


def test_what_is_as_it_was_published_is_not_reverted_again() -> None:
    office = EditOffice(2)
    never = office.edit(1, revert=True)
    assert (type(never), never.message) == (BadRequest, "it was never edited")
    office.edit(1, body=b"1")
    assert office.edit(1, revert=True, edits=1) == {"edits": 2}
    again = office.edit(1, revert=True, edits=2)
    assert (type(again), again.message) == (BadRequest, "it is what was published again")
    assert "nothing to revert" in again.hint
    office.edit(1, body=b"1", edits=2)
    assert office.edit(1, revert=True, edits=3) == {"edits": 4}


def test_two_operators_cannot_edit_a_letter_over_one_another() -> None:
    office = EditOffice(2)
    replies: list[Any] = []
    named = {"group": "g", **PLACE, "offset": 1, "edits": 0, "operator": "ada", "reason": "r"}
    for body in (b"one", b"two"):
        args = named | {"body": b64encode(body).decode()}
        office.broker.assembly.calls.ask("dlq.edit", args, replies.append)
    office.broker.pass_time(0)
    assert replies[0] == {"edits": 1}
    assert type(replies[1]) is Conflict
    assert office.body(1) == b"one"


def test_a_letter_of_an_unfinished_plan_is_not_edited() -> None:
    office = EditOffice(4)
    assert office.edit(1, body=b"mended") == {"edits": 1}
    office.broker.start()
    office.call("plan.create", name="p", group="g", select={"key": "k1"}, operator="ada")
    office.broker.pass_time(1)
    refused = office.edit(1, edits=1, body=b"again")
    assert type(refused) is Conflict
    assert "cannot be edited: in plan p" in refused.message
    assert office.edit(2, body=b"not in it") == {"edits": 1}
    office.call("plan.cancel", name="p", operator="ada")
    office.broker.pass_time(1)
    assert office.edit(1, edits=1, body=b"again") == {"edits": 2}


def exported(office: EditOffice, *letters: tuple[int, int, int]) -> Any:
    """Note letters as exported: offset, number of the death, number of edits."""
    named = [["t", 0, *letter] for letter in letters]
    return office.call("dlq.exported", group="g", letters=named, operator="ada", reason="x")


def test_only_what_is_in_the_file_is_noted_as_exported() -> None:
    office = EditOffice(4)
    office.replay(0)
    office.edit(1, body=b"mended")
    reply = exported(office, (0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 9, 0), (9, 1, 0))
    assert reply["done"] == (("t", 0, 2),)
    changed = "it has died again or was edited meanwhile"
    assert [(at, why) for _topic, _partition, at, why in reply["refused"]] == [
        (0, "not dead: it is retried, see txmq retry"),
        (1, changed),
        (3, changed),
        (9, "no such letter"),
    ]
    assert office.show(2)["exported_at"] > 0
    office.edit(2, body=b"mended")
    assert office.show(2)["exported_at"] == 0, "the file has another version"
    exported(office, (2, 3, 1))
    office.replay(2)
    office.fetch()
    office.nack(2, {"type": "C", "text": "again", "bases": []})
    assert office.show(2)["exported_at"] == 0, "it is another death"
    for letters in ([], [(1, -1, 0)], [(1, 2)], [(1, 2, 0)] * 1_001):
        with pytest.raises(RemoteProtocolError):
            exported(office, *letters)


def test_a_letter_is_tried_by_one_member_that_waits_for_messages() -> None:
    office = EditOffice(4)
    office.edit(1, body=b"mended")
    waiting = Fetch(office.joined["generation"], 5_000, 1 << 22, 10, "g", "a")
    office.client.send(encode_frame(Opcode.FETCH, 9, pack_fetch(waiting)))
    assert office.client.replies() == []
    tried = {"group": "g", **PLACE, "offset": 1, "operator": "ada"}
    assert type(office.call("dlq.try", **tried, member="b")) is UnknownMember
    assert office.call("dlq.try", **tried, member="a") == {"number": 2}
    office.broker.pass_time(0)
    [reply] = office.client.replies()
    [chunk] = unpack_chunks(reply.payload).chunks
    assert BatchView(bytes(chunk.batch)).bodies == [b"mended"]
    shown = office.show(1)
    assert (shown["state"], shown["trial_by"]) == ("replaying", "a")
    office.nack(1, {"type": "C", "text": "again", "bases": []})
    shown = office.show(1)
    assert (shown["state"], shown["number"], shown["error_type"]) == ("dead", 5, "C")
    assert office.state_again()


def test_the_outcome_of_a_trial_is_known_whatever_became_of_the_letter() -> None:
    office = EditOffice(4)

    def outcome(offset: int, number: int) -> str:
        place = PLACE | {"offset": offset, "number": number}
        told = office.call("dlq.tried", group="g", **place)
        return f"{told['outcome']}: {told['why']}" if told["why"] else str(told["outcome"])

    for offset in range(3):
        tried = {"group": "g", **PLACE, "offset": offset, "operator": "ada"}
        office.call("dlq.try", **tried, member="a")
    assert outcome(0, 1) == "no answer yet"
    office.fetch()
    ack = Ack(office.joined["generation"], "g", "a", (AckedRange("t", 0, 0, 1),))
    assert office.client.ask(Opcode.ACK, pack_ack(ack)).status == 0
    office.nack(1, {"type": "C", "text": "again", "bases": []})
    assert (outcome(0, 1), outcome(1, 2)) == ("processed", "died again")
    office.call("group.reset", group="g", topic="t", to="first", operator="ada")
    assert outcome(2, 3) == "ended: reset"
    office.broker.engine.state.trials = TrialOutcomes()  # as after many other ones
    assert outcome(0, 1).startswith("unknown: ")
    office.call("topic.delete", name="t")
    assert outcome(0, 1).startswith("ended: its topic was deleted")
    assert type(office.call("dlq.tried", group="x", **PLACE, offset=0, number=1)) is UnknownGroup


def test_a_letter_that_cannot_be_read_is_shown_without_its_body() -> None:
    office = EditOffice(1)
    office.edit(0, body=b"mended")
    office.damage(0)
    assert type(office.show(0)) is MessagesDamaged
    shown = office.show(0, bodies=False)
    assert "damaged" in shown
    assert office.edit(0, edits=shown["edits"], revert=True) == {"edits": 2}
    assert "damaged" not in office.show(0)


def test_a_letter_that_is_damaged_stands_in_nobodys_way() -> None:
    office = EditOffice(4)
    office.damage(1)
    office.replay(0, 1, 2, 3)
    assert (office.fetch() | office.fetch()).keys() == {0, 2, 3}
    shown = office.show(1, bodies=False)
    assert (shown["state"], shown["error_type"], shown["number"]) == ("dead", "MessagesDamaged", 5)
    assert "damaged at position" in shown["error_text"]
    assert office.state_again()


def test_an_edited_body_fits_the_schema_of_its_topic() -> None:
    office = EditOffice(1)
    schema = '{"type": "object", "required": ["amount"]}'
    office.call("topic.schema", name="t", json_schema=schema, operator="ada")
    refused = office.edit(0, body=b'{"price": 1}')
    assert type(refused) is BadRequest
    assert "'amount' is a required property" in refused.message
    assert office.edit(0, body=b'{"amount": 1}') == {"edits": 1}
    assert office.edit(0, edits=1, revert=True) == {"edits": 2}, "it was published so"
    assert office.edit(0, edits=2, headers={"tenant": "blue"}) == {"edits": 3}, "its body stays"
    other = office.edit(0, edits=3, headers={"content-type": "application/msgpack"})
    assert type(other) is BadRequest, "the same body, read in another way"


@pytest.mark.parametrize("told", [{"any_format": True}, {"headers": {"content-type": "text/csv"}}])
def test_an_edited_body_that_was_json_stays_json_unless_told_otherwise(
    told: dict[str, Any],
) -> None:
    office = EditOffice(1)
    assert office.edit(0, body=b'{"amount": 1}') == {"edits": 1}, "it was none"
    refused = office.edit(0, edits=1, body=b'{"amount": 2')
    assert type(refused) is BadRequest
    assert "the body is no JSON: Expecting ',' delimiter" in refused.message
    assert "--any-format" in refused.hint
    assert office.edit(0, edits=1, body=b"17") == {"edits": 2}
    assert office.edit(0, edits=2, body=b'["amount"]') == {"edits": 3}
    assert office.edit(0, edits=3, body=b"amount;2", **told) == {"edits": 4}


def test_a_damaged_letter_of_a_plan_stands_in_nobodys_way() -> None:
    office = EditOffice(6)
    office.broker.start()
    office.damage(0)
    office.damage(3)
    settings = {"rate": 0, "ramp_s": 0, "start": True}
    office.call("plan.create", name="p", group="g", select={}, settings=settings, operator="ada")
    office.broker.pass_time(0.2)
    got = [at for _ in range(4) for at in office.fetch()]
    assert sorted(got) == [1, 2, 4, 5]
    shown = office.call("plan.show", name="p")
    assert (shown["delivered"], shown["died_again"]) == (4, 2)
    letters = office.call("plan.letters", name="p", outcome="died_again")["letters"]
    assert {one["why"] for one in letters} == {"MessagesDamaged"}
    assert office.state_again()


def test_a_plan_goes_on_past_letters_that_are_huge_damaged_or_not_of_their_schema() -> None:
    office = EditOffice(3)
    office.send(Message(b"x" * limits.MESSAGE, "huge"))
    office.fetch()
    office.nack(3, {"type": "C", "text": "y", "bases": []})
    schema = '{"type": "object", "required": ["amount"]}'
    office.call("topic.schema", name="t", json_schema=schema, operator="ada")
    office.edit(2, body=b'{"amount": 1}')
    office.damage(0)
    office.broker.start()
    settings = {"rate": 0, "ramp_s": 0, "in_flight": 1}
    office.call("plan.create", name="p", group="g", select={}, settings=settings, operator="ada")
    office.broker.pass_time(0.2)
    checked = office.call("plan.check", name="p")
    assert (checked["would_replay"], checked["invalid"], checked["edited"]) == (3, 2, 1)
    assert ["damaged" in why for why in checked["would_skip"]] == [True]
    office.call("plan.start", name="p", operator="ada")
    sizes: dict[int, int] = {}
    for _ in range(6):
        office.broker.pass_time(0.2)
        for offset, (*_rest, body) in office.fetch().items():
            sizes[offset] = len(body)
            ack = Ack(
                office.joined["generation"], "g", "a", (AckedRange("t", 0, offset, offset + 1),)
            )
            assert office.client.ask(Opcode.ACK, pack_ack(ack)).status == 0
    office.broker.pass_time(0.2)
    assert sizes == {1: 10, 2: 13, 3: limits.MESSAGE}
    letters = {one["offset"]: one for one in office.call("plan.letters", name="p")["letters"]}
    assert [letters[at]["outcome"] for at in range(4)] == ["died_again", *["processed"] * 3]
    assert letters[0]["why"] == "MessagesDamaged"
    assert office.call("plan.show", name="p")["state"] == "done"


def test_all_letters_of_a_damaged_batch_are_set_aside_by_one_fetch() -> None:
    office = EditOffice(1)
    many = [Message(b"x", f"k{number}") for number in range(5)]
    data = encode(many, producer_id=b"q" * 16, epoch=0, sequence=0, born_at=1)
    office.broker.do(StoreBatch("t", 0, 0, data, verify(data)))
    office.fetch()
    for offset in range(1, 6):
        office.nack(offset, {"type": "C", "text": "", "bases": []})
    office.damage(1)
    office.replay(*range(6))
    assert office.fetch().keys() == {0}
    office.send(Message(b"fresh", "fresh"))
    assert office.fetch().keys() == {6}
    errors = {office.show(offset, bodies=False)["error_type"] for offset in range(1, 6)}
    assert errors == {"MessagesDamaged"}


def test_letters_of_a_damaged_batch_are_set_aside_by_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others have theirs in between. A fetch that waits goes on by itself."""
    monkeypatch.setattr(fetch_service, "SET_ASIDE", 2)
    office = EditOffice(1)
    many = [Message(b"x", f"k{number}") for number in range(5)]
    data = encode(many, producer_id=b"q" * 16, epoch=0, sequence=0, born_at=1)
    office.broker.do(StoreBatch("t", 0, 0, data, verify(data)))
    office.fetch()
    for offset in range(1, 6):
        office.nack(offset, {"type": "C", "text": "", "bases": []})
    office.damage(1)
    office.replay(*range(1, 6))

    def damaged() -> int:
        types = [office.show(offset, bodies=False)["error_type"] for offset in range(1, 6)]
        return types.count("MessagesDamaged")

    assert office.fetch() == {}
    assert damaged() == 2
    office.send(Message(b"fresh", "fresh"))
    wanted = Fetch(office.joined["generation"], 60_000, 1 << 22, 10_000, "g", "a")
    office.client.send(encode_frame(Opcode.FETCH, 9, pack_fetch(wanted)))
    office.broker.pass_time(0.2)
    [reply] = office.client.replies()
    [chunk] = unpack_chunks(reply.payload).chunks
    assert (chunk.base_offset, damaged()) == (6, 5)
    assert office.state_again()
