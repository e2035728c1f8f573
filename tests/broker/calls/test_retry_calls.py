"""Calls about messages that are retried: they are listed, shown, changed and edited."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.calls.test_letter_edits import PLACE, EditOffice
from tests.broker.calls.test_recover_calls import MESSAGES, STORE, World
from txmq.errors import Conflict
from txmq.model.letter_filter import RETRIED, parse_filter, retried
from txmq.model.message import Message
from txmq.model.units import SECOND
from txmq.wire.data_requests import Ack, AckedRange, Opcode, pack_ack

BY = {"operator": "ada", "reason": "why"}
ERROR = {"type": "E", "text": "boom", "fingerprint": "f", "bases": []}
FIRST_DELAY = 10 * SECOND


class RetryOffice(EditOffice):
    """An office with two dead letters, and two messages that are retried."""

    def __init__(self) -> None:
        super().__init__(2)
        for offset in (2, 3):
            self.send(Message(b"x", f"k{offset}"))
        self.fetch()
        for offset in (2, 3):
            self.fail(offset)

    def fail(self, offset: int, **more: object) -> None:
        known = {"group": "g", "member": "a", "generation": self.joined["generation"]}
        self.client.call("consumer.nack", **known, **PLACE, offset=offset, error=ERROR, **more)

    def retried(self, text: str = "") -> list[Any]:
        select = retried(parse_filter(text, 0).select)
        found: list[Any] = self.call("dlq.list", group="g", select=select)["letters"]
        return found

    def change(self, call: str, **chosen: Any) -> Any:
        return self.call(f"retry.{call}", group="g", **chosen, **BY)


@pytest.fixture
def office() -> RetryOffice:
    return RetryOffice()


def test_what_is_retried_is_listed_with_its_next_attempt_and_its_error(
    office: RetryOffice,
) -> None:
    first, second = office.retried()
    assert (first["offset"], first["state"], first["error_text"]) == (2, "retrying", "boom")
    assert (first["next_at"], first["held_by"]) == (office.broker.now() + FIRST_DELAY, "")
    assert office.retried("error:E key:k3") == [second]
    assert office.retried("error:other") == []
    counted = office.call("dlq.stats", group="g", select={"states": [*RETRIED]})
    assert (counted["counted"], counted["fingerprints"][0]["error_type"]) == (2, "E")
    assert office.pages() == [0, 1], "and is no open letter"


def test_a_message_is_shown_where_it_is(office: RetryOffice) -> None:
    shown = office.show(2)
    assert (shown["state"], shown["failures"], shown["held_by"]) == ("retrying", 1, "")
    office.change("now", letters=[["t", 0, 2]])
    office.fetch()
    assert (office.show(2)["held_by"], office.show(2)["next_at"]) == ("a, in hand", 0)


def test_a_selection_of_what_is_retried_is_changed_in_steps(
    office: RetryOffice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txmq.broker.calls.letters.MAX_LETTERS", 1)
    select = {"states": ["retrying"], "error_type": "E"}
    first = office.change("now", select=select)
    rest = office.change("now", select=select, cursor=first["next"])
    assert (first["done"], rest["done"]) == ((("t", 0, 2),), (("t", 0, 3),))
    assert office.fetch().keys() == {2, 3}
    everything = office.change("bury", select={"states": ["retrying"]})
    assert [one[3] for one in everything["refused"]] == ["a has it in hand"]


def test_a_buried_message_keeps_error_and_reason_and_a_skipped_one_is_closed(
    office: RetryOffice,
) -> None:
    office.change("bury", letters=[["t", 0, 2]])
    office.change("skip", letters=[["t", 0, 3]])
    assert office.pages() == [0, 1, 2]
    shown = {offset: office.show(offset) for offset in (2, 3)}
    assert [one["state"] for one in shown.values()] == ["dead", "abandoned"]
    assert {(one["reason"], one["error_text"]) for one in shown.values()} == {("why", "boom")}
    assert [one["call"] for one in shown[2]["operations"]] == ["retry.bury"]
    assert office.replay(2)["done"] == (("t", 0, 2),)
    assert office.fetch().keys() == {2}


def test_an_edited_message_is_retried_in_its_new_version(office: RetryOffice) -> None:
    assert office.edit(2, body=b"mended") == {"edits": 1}
    assert office.show(2)["next_at"] == office.broker.now() + FIRST_DELAY, "not before"
    office.broker.pass_time(FIRST_DELAY / SECOND)
    assert office.fetch()[2][-1] == b"mended"
    assert type(office.edit(2, edits=1, body=b"again")) is Conflict, "a member has it in hand"
    office.fail(2)
    assert office.edit(2, edits=1, revert=True) == {"edits": 2}
    office.change("now", letters=[["t", 0, 2]])
    assert office.fetch()[2][-1] == b"x"
    assert office.state_again()
    acked = (AckedRange("t", 0, 2, 3),)
    ack = Ack(office.joined["generation"], "g", "a", acked)
    assert office.client.ask(Opcode.ACK, pack_ack(ack)).status == 0
    assert office.pins() == 0, "its versions are gone with it"


def local_world() -> World:
    world = World()
    world.fetch()
    world.stored(*((offset, "stored") for offset in range(MESSAGES)))
    return world


def test_what_a_store_has_is_shown_with_its_host_and_the_order_it_has_not_obeyed() -> None:
    world = local_world()
    place = {"group": "g", "topic": "t", "partition": 0, "offset": 0}
    shown = world.broker.ask("dlq.show", **place)
    assert (shown["state"], shown["next_at"]) == ("local", 5)
    assert shown["held_by"] == f"m on h, local store {STORE}"
    world.broker.ask("retry.now", group="g", letters=[["t", 0, 0]])
    assert world.broker.ask("dlq.show", **place)["held_by"].endswith(", ordered to retry it now")
    world.leave()
    assert world.broker.ask("dlq.show", **place)["held_by"].endswith(", which has no owner")


def test_an_edit_takes_a_message_back_from_its_store() -> None:
    world = local_world()
    place = {"group": "g", "topic": "t", "partition": 0, "offset": 1}
    edited = world.broker.ask("dlq.edit", **place, edits=0, body="bmV3", **BY)
    assert edited == {"edits": 1}
    shown = world.broker.ask("dlq.show", **place)
    assert (shown["state"], shown["held_by"]) == ("retrying", "")
    assert world.stored()["orders"] == [["t", 1, 0, 1, "drop"]]
    assert world.stored((1, "stored"))["verdicts"] == ["elsewhere"], "its copy is the old one"
    assert (world.stored()["orders"], world.fetch()) == ([], [1])


def test_a_store_that_comes_back_does_not_bring_the_old_version() -> None:
    world = local_world()
    world.leave()
    place = {"group": "g", "topic": "t", "partition": 0, "offset": 1}
    world.broker.ask("dlq.edit", **place, edits=0, body="bmV3", **BY)
    world.broker.ask("retry.bury", group="g", letters=[["t", 0, 2]], **BY)
    world.broker.ask("dlq.replay", group="g", letters=[["t", 0, 2]], **BY)
    world.join("m")
    told = world.stored((1, "stored"), (2, "stored"), (3, "stored"))
    assert told["verdicts"] == ["elsewhere", "elsewhere", "kept"]
