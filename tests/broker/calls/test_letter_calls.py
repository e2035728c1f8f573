"""Calls about dead letters: selections in pages, counts, replays, notes, saved ones."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest

from tests.broker.support import BrokerInMemory, Client, FakeNode
from txmq.batch import Codec, decode, encode, verify
from txmq.batch.codecs import decompress
from txmq.broker.calls import letters as letter_calls
from txmq.broker.engine import turn_work
from txmq.core.consumers import letter_notes, letter_selection
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic
from txmq.errors import BadRequest, RemoteProtocolError, RequestRejected, UnknownGroup, UnknownTopic
from txmq.model.message import Message
from txmq.store.log.segment import segment_path
from txmq.store.tables import LETTER_NOTES
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Fetch, Opcode, pack_fetch
from txmq.wire.frames import encode_frame

HOSTILE = "\x1b[2J<script>\u202e\r\nforged=1"


class Office:
    """A broker with dead letters: of each ten the first two have error B, key `k7` is
    in every seventh.
    """

    def __init__(self, number: int = 40, cluster: FakeNode | None = None) -> None:
        self.broker = BrokerInMemory(cluster=cluster)
        self.broker.do(CreateTopic("t", 1))
        self.client: Client = self.broker.connect()
        self.number = self.sequence = 0
        self.joined: Any = self.client.call(
            "consumer.join", group="g", member="a", instance="a", mode="concurrent", topics=["t"]
        )
        self.kill(number)

    def kill(self, number: int, text: str = "no {} here") -> None:
        for at in range(self.number, self.number + number):
            headers = {"tenant": "blue" if at % 5 else "red"} if at % 2 else None
            self.send(Message(b"x" * 10, f"k{at % 7}", headers=headers))
        self.number += number
        self.take()
        for at in range(self.number - number, self.number):
            error: dict[str, Any] = {
                "type": "B" if at % 10 < 2 else "A",
                "text": text.format(at),
                "bases": [],
            }
            error["fingerprint"] = f"f{at % 4}"
            self.nack(at, error)
            self.broker.pass_time(60)

    def kill_packed(self, number: int, size: int) -> None:
        """Kill messages whose batches have a few bytes for bodies of this size."""
        for at in range(number):
            self.send(Message(bytes(size), f"k{at}"), Codec.ZSTD)
        self.take()
        for at in range(number):
            self.nack(at, {"type": "A", "text": "x", "bases": [], "fingerprint": "f"})

    def take(self) -> None:
        wanted = Fetch(self.joined["generation"], 0, 1 << 22, 10_000, "g", "a")
        assert self.client.ask(Opcode.FETCH, pack_fetch(wanted)).status == 0

    def send(self, message: Message, codec: Codec = Codec.NONE) -> None:
        data = encode(
            [message],
            producer_id=b"p" * 16,
            epoch=0,
            sequence=self.sequence,
            born_at=1,
            codec=codec,
        )
        self.sequence += 1
        self.broker.do(StoreBatch("t", 0, 0, data, verify(data)))

    def nack(self, offset: int, error: dict[str, Any]) -> None:
        place = {"topic": "t", "partition": 0, "offset": offset}
        generation = self.joined["generation"]
        self.client.call(
            "consumer.nack", group="g", member="a", generation=generation, **place, error=error,
            dead=True,
        )  # fmt: skip

    def pages(self, limit: int = 7, **select: object) -> list[int]:
        """Return the offsets of a selection, from all of its pages."""
        found: list[int] = []
        after: Any = None
        while True:
            more = {} if after is None else {"cursor": after}
            page = self.broker.ask("dlq.list", group="g", select=select, limit=limit, **more)
            assert not isinstance(page, RequestRejected), page
            found += [letter["offset"] for letter in page["letters"]]
            after = page["next"]
            if after is None:
                return found


@pytest.fixture(scope="module")
def office() -> Office:
    """Letters that no test changes."""
    return Office()


SELECTIONS: list[tuple[dict[str, Any], Callable[[int], bool]]] = [
    ({}, lambda _at: True),
    ({"topic": "t"}, lambda _at: True),
    ({"key": "k3"}, lambda at: at % 7 == 3),
    ({"key": "k"}, lambda _at: False),
    ({"error_type": "B"}, lambda at: at % 10 < 2),
    ({"fingerprint": "f1"}, lambda at: at % 4 == 1),
    ({"fingerprint": "f1", "key": "k3"}, lambda at: at % 4 == 1 and at % 7 == 3),
    ({"header": ["tenant", None]}, lambda at: at % 2 == 1),
    ({"header": ["tenant", "red"]}, lambda at: at % 10 == 5),
    ({"header": ["Tenant", "red"]}, lambda _at: False),
    ({"text": "NO 1"}, lambda at: str(at).startswith("1")),
    ({"min_attempts": 2}, lambda _at: False),
    ({"max_attempts": 1, "text": "here"}, lambda _at: True),
    ({"states": ["abandoned", "replaying", "local"]}, lambda _at: False),
]


@pytest.mark.parametrize(("select", "has"), SELECTIONS)
@pytest.mark.parametrize("limit", [1, 7, 100])
def test_each_property_selects(
    office: Office, select: dict[str, Any], has: Callable[[int], bool], limit: int
) -> None:
    assert office.pages(limit, **select) == [at for at in range(office.number) if has(at)]


def test_times_of_death_select(office: Office) -> None:
    died = [
        letter["dead_at"]
        for letter in office.broker.ask("dlq.list", group="g", select={}, limit=100)["letters"]
    ]
    assert office.pages(died_from=died[10], died_before=died[20]) == [*range(10, 20)]
    assert office.pages(died_from=died[-1] + 1) == []


@pytest.mark.parametrize(("select", "has"), SELECTIONS)
def test_statistics_count_what_is_selected(
    office: Office, select: dict[str, Any], has: Callable[[int], bool]
) -> None:
    stats = office.broker.ask("dlq.stats", group="g", select=select)
    found = [at for at in range(office.number) if has(at)]
    assert (stats["counted"], stats["complete"]) == (len(found), True)
    assert stats["letters"] == office.number
    assert sum(stats["by_fingerprint"].values()) == len(found)
    for one in stats["top_keys"]:
        assert one["letters"] <= stats["counted"]
        assert one["key"] in {f"k{number}" for number in range(7)}
    json.dumps(stats)


def test_a_client_that_knows_no_selections_pages_by_numbers(office: Office) -> None:
    page = office.broker.ask("dlq.list", group="g", limit=30)
    assert (len(page["letters"]), page["next"]) == (30, 30)
    rest = office.broker.ask("dlq.list", group="g", after=30, limit=30)
    assert [letter["offset"] for letter in rest["letters"]] == [*range(30, 40)]
    assert office.broker.ask("dlq.stats", group="g")["by_error_type"] == {"A": 32, "B": 8}


def test_letters_of_a_batch_are_listed_as_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(0)
    several = [
        Message(
            b"%d" % at, f"k{at}" if at % 3 else None, headers={"n": str(at)} if at % 2 else None
        )
        for at in range(60)
    ]
    data = encode(several, producer_id=b"p" * 16, epoch=0, sequence=0, born_at=1)
    office.broker.do(StoreBatch("t", 0, 0, data, verify(data)))
    office.sequence = len(several)
    office.send(Message(b"alone"))
    wanted = Fetch(office.joined["generation"], 0, 1 << 22, 10_000, "g", "a")
    assert office.client.ask(Opcode.FETCH, pack_fetch(wanted)).status == 0
    for at in [*range(60, -1, -2), 1, 3]:
        office.nack(at, {"type": "A", "text": "", "bases": [], "fingerprint": "f"})
    lists = []
    for dense, small in ((1, 1 << 20), (letter_calls.DENSE, 1 << 20), (1 << 30, 1), (1, 1)):
        monkeypatch.setattr(letter_calls, "DENSE", dense)
        monkeypatch.setattr(letter_calls, "SMALL", small)
        args = {"group": "g", "limit": 100}
        lists += [office.broker.ask("dlq.list", bodies=bodies, **args) for bodies in (False, True)]
    assert [len(one["letters"]) for one in lists] == [33] * 8
    assert lists[0] == lists[2] == lists[4] == lists[6]
    assert lists[1] == lists[3] == lists[5] == lists[7]
    offsets = {b64decode(one["body"]): one["offset"] for one in lists[1]["letters"]}
    assert offsets.pop(b"alone") == 60
    assert offsets == {b"%d" % at: at for at in [*range(0, 60, 2), 1, 3]}


def test_bodies_are_hidden_until_they_are_asked_for(office: Office) -> None:
    ask = office.broker.ask
    assert "body" not in ask("dlq.list", group="g", select={}, limit=1)["letters"][0]
    [letter] = ask("dlq.list", group="g", select={}, limit=1, bodies=True)["letters"]
    assert letter["body"] == "eHh4eHh4eHh4eA=="
    place = {"topic": "t", "partition": 0, "offset": 0}
    shown = ask("dlq.show", group="g", **place, bodies=False)
    assert "body" not in shown
    assert (shown["size"], shown["failures"]) == (10, 1)
    assert "body" in ask("dlq.show", group="g", **place)


def test_a_call_reads_a_bounded_number_of_letters_and_says_so(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is a turn of its own, and another connection is answered meanwhile."""
    monkeypatch.setattr(letter_calls, "MAX_SCANNED", 8)
    monkeypatch.setattr(letter_selection, "LEAPS_PER_STEP", 2)
    monkeypatch.setattr(turn_work, "TURN_S", 0.0)
    monkeypatch.setattr(turn_work, "STEP_S", 0.0)
    page = office.broker.ask("dlq.list", group="g", select={"text": "no 39"})
    assert (page["letters"], page["scanned"]) == ([], 8)
    assert office.pages(text="no 39") == [39]
    slow, quick = office.broker.connect(), office.broker.connect()
    call = encode_call("dlq.list", {"group": "g", "select": {"text": "no 39"}})
    slow.session.dataReceived(encode_frame(Opcode.CALL, 3, call))  # type: ignore[attr-defined]
    assert slow.replies() == []
    quick.session.dataReceived(encode_frame(Opcode.PING, 4))  # type: ignore[attr-defined]
    assert len(quick.replies()) == 1
    office.broker.pass_time(0)
    assert len(slow.replies()) == 1


def test_messages_are_read_in_bounded_pieces(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letter_calls, "READ_PER_STEP", 1)
    monkeypatch.setattr(letter_calls, "MAX_READ", 300)
    page = office.broker.ask("dlq.list", group="g", select={"header": ["tenant", "green"]})
    assert 0 < page["scanned"] < 10
    assert office.pages(header=["tenant", "red"]) == [5, 15, 25, 35]


@pytest.mark.parametrize(
    "args",
    [
        {"select": {"topic": "a b"}},
        {"select": {"states": []}},
        {"select": {"states": ["dead"]}},
        {"select": {"died_from": -1}},
        {"select": {"died_before": 2**63}},
        {"select": {"min_attempts": 2**63}},
        {"select": {"text": ""}},
        {"select": {"text": "x" * 257}},
        {"select": {"key": "x" * 1_025}},
        {"select": {"header": ["a"]}},
        {"select": {"colour": "red"}},
        {"select": {}, "saved": "x"},
        {"select": {}, "after": 5},
        {"select": {}, "cursor": "f" * 95},
        {"select": {}, "cursor": "g" * 96},
        {"cursor": "f" * 96},
    ],
)
def test_malformed_selections_are_refused(office: Office, args: dict[str, Any]) -> None:
    assert refusal(office, "dlq.list", args) in (RemoteProtocolError, BadRequest)


def refusal(office: Office, call: str, args: dict[str, Any]) -> type[Exception]:
    """Return the error that a call ends with."""
    try:
        error: type[Exception] = type(office.broker.ask(call, group="g", **args))
    except RemoteProtocolError:
        return RemoteProtocolError
    return error


@pytest.mark.parametrize("digit", "0189f")
def test_forged_cursors_do_no_harm(office: Office, digit: str) -> None:
    page = office.broker.ask("dlq.list", group="g", select={}, cursor=digit * 96)
    assert {letter["offset"] for letter in page["letters"]} <= set(range(office.number))
    assert page["next"] is None


def test_what_is_unknown_is_named(office: Office) -> None:
    ask = office.broker.ask
    assert type(ask("dlq.list", group="nobody", select={})) is UnknownGroup
    assert type(ask("dlq.stats", group="nobody")) is UnknownGroup
    assert type(ask("dlq.list", group="g", select={"topic": "nowhere"})) is UnknownTopic
    assert type(ask("dlq.stats", group="g", saved="nothing")) is BadRequest


def test_a_selection_is_replayed_in_portions_and_what_dies_again_is_not_replayed_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(letter_calls, "MAX_LETTERS", 3)
    office = Office(20)
    done: list[int] = []
    after: Any = None
    while True:
        more = {} if after is None else {"cursor": after}
        page = office.broker.ask(
            "dlq.replay", group="g", select={"fingerprint": "f1"}, operator="ada", **more
        )
        assert page["refused"] == ()
        done += [offset for _topic, _partition, offset in page["done"]]
        assert len(page["done"]) <= 3
        wanted = Fetch(office.joined["generation"], 0, 1 << 22, 10_000, "g", "a")
        office.client.ask(Opcode.FETCH, pack_fetch(wanted))
        for _topic, _partition, offset in page["done"]:
            office.nack(offset, {"type": "A", "text": "", "fingerprint": "f1", "bases": []})
        after = page["next"]
        if after is None:
            break
    assert done == [1, 5, 9, 13, 17]
    assert sorted(office.pages(fingerprint="f1")) == done


def test_a_selection_is_abandoned_and_out_of_the_default_list() -> None:
    office = Office(20)
    page = office.broker.ask("dlq.abandon", group="g", select={"error_type": "B"}, reason="old")
    assert [place[2] for place in page["done"]] == [0, 1, 10, 11]
    assert set(office.pages()) == set(range(20)) - {0, 1, 10, 11}
    assert office.pages(states=["abandoned"]) == [0, 1, 10, 11]
    again = office.broker.ask(
        "dlq.replay", group="g", select={"states": ["abandoned"]}, operator="ada"
    )
    assert [why for *_place, why in again["refused"]] == ["abandoned"] * 4


@pytest.mark.parametrize("args", [{}, {"letters": [["t", 0, 1]], "select": {}}, {"letters": []}])
def test_a_replay_names_letters_or_a_selection(office: Office, args: dict[str, Any]) -> None:
    assert refusal(office, "dlq.replay", args) is BadRequest


def test_a_damaged_letter_is_named_and_never_changed_by_a_selection_that_has_to_read_it() -> None:
    office = Office(4)
    entry: Any = office.broker.engine.state.entries.range(b"")
    position = [at[1][0] for at in entry][2]
    file = office.broker.fs.open(segment_path("/data", 0), write=True)
    (byte,) = file.pread(1, position + 84)
    file.pwrite([bytes([byte ^ 16])], position + 84)
    ask = office.broker.ask
    for bodies in (False, True):
        letters = ask("dlq.list", group="g", select={}, bodies=bodies)["letters"]
        assert [letter["offset"] for letter in letters if "damaged" in letter] == [2]
        assert len(letters) == 4
    page = ask("dlq.replay", group="g", select={"header": ["tenant", None]}, operator="a")
    assert [place[2] for place in page["done"]] == [1, 3]
    [(*place, why)] = page["refused"]
    assert place == ["t", 0, 2]
    assert "damaged" in why or str(position) in why


def test_notes_are_kept_with_the_group_and_their_fingerprint() -> None:
    office = Office(8)
    ask, note = office.broker.ask, f"see ticket 7 {HOSTILE}"
    ask("dlq.note", group="g", fingerprint="f1", text=note, operator="ada")
    noted = {one["fingerprint"]: one["note"] for one in ask("dlq.stats", group="g")["fingerprints"]}
    assert noted == {"f0": "", "f1": note, "f2": "", "f3": ""}
    ask("dlq.note", group="g", fingerprint="gone", text="was mended")
    notes = ask("dlq.stats", group="g", select={"topic": "t"})["notes"]
    assert [(one["fingerprint"], one["note"], one["by"]) for one in notes] == [
        ("f1", note, "ada"),
        ("gone", "was mended", ""),
    ]
    assert type(ask("dlq.note", group="g", fingerprint="f2", text="")) is BadRequest
    long = ask("dlq.note", group="g", fingerprint="é" * 200, text="x")
    assert long.message == "a fingerprint has at most 256 bytes"
    ask("dlq.note", group="g", fingerprint="f1", text="")
    assert not ask("dlq.stats", group="g")["fingerprints"][1]["note"]
    ask("dlq.note", group="g", fingerprint="f1", text="again")
    office.client.call("consumer.leave", group="g", member="a", instance="a")
    ask("group.delete", group="g")
    office.broker.pass_time(5)
    assert [*office.broker.engine.state.tables[LETTER_NOTES].range(b"")] == []


def test_notes_and_selections_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_notes, "MAX_NOTES", 1)
    monkeypatch.setattr(letter_notes, "MAX_SELECTIONS", 1)
    ask = Office(1).broker.ask
    for name, wanted in (("a", {}), ("a", {}), ("b", BadRequest)):
        noted = ask("dlq.note", group="g", fingerprint=name, text="x")
        saved = ask("dlq.save", name=name, select={"text": "x"})
        assert [type(one) if one else one for one in (noted, saved)] == [wanted, wanted]


def test_selections_are_saved_by_name_and_used_by_all_calls(office: Office) -> None:
    ask = office.broker.ask
    select = {"error_type": "B", "states": ["open", "abandoned"]}
    assert ask("dlq.save", name="bees", select=select, operator="ada", reason="for Monday") == {}
    ask("dlq.save", name="ants", select={"text": HOSTILE})
    saved = ask("dlq.saved")["selections"]
    assert [(one["name"], one["select"], one["by"]) for one in saved] == [
        ("ants", {"text": HOSTILE}, ""),
        ("bees", select, "ada: for Monday"),
    ]
    page = ask("dlq.list", group="g", saved="bees", limit=4)
    rest = ask("dlq.list", group="g", saved="bees", cursor=page["next"])
    found = [letter["offset"] for letter in page["letters"] + rest["letters"]]
    assert found == [at for at in range(40) if at % 10 < 2]
    assert ask("dlq.stats", group="g", saved="bees")["counted"] == 8
    assert ask("dlq.save", name="ants") == {}
    assert type(ask("dlq.save", name="ants")) is BadRequest
    assert [one["name"] for one in ask("dlq.saved", limit=1)["selections"]] == ["bees"]
    ask("dlq.save", name="bees")


def test_a_page_of_letters_decompresses_about_as_much_as_it_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch of 1 KiB in the log may have 16 MiB of bodies."""
    office = Office(0)
    office.kill_packed(4, 300_000)
    opened: list[int] = []

    def counted(codec: int, data: bytes, size: int) -> bytes:
        if codec:
            opened.append(size)
        return decompress(codec, data, size)

    def listed(**args: Any) -> Any:
        return office.broker.ask("dlq.list", group="g", **args)

    monkeypatch.setattr(decode, "decompress", counted)
    assert [one["size"] for one in listed()["letters"]] == [300_000] * 4
    assert len(listed(select={"key": "k3"})["letters"]) == 1
    assert opened == []
    monkeypatch.setattr(letter_calls, "MAX_READ", 400_000)
    monkeypatch.setattr(letter_calls, "READ_PER_STEP", 400_000)
    selections: list[dict[str, Any]] = [{}, {"select": {}}]
    for args in selections:
        page = listed(bodies=True, **args)
        assert (len(page["letters"]), len(opened)) == (2, 2)
        assert page["next"] is not None
        opened.clear()
