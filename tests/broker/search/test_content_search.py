"""Search by what is in bodies and headers, in one topic, in all, and among letters."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import pytest

from tests.broker.calls.test_letter_calls import Office
from tests.broker.search.test_search import found, places, send
from tests.broker.support import BrokerInMemory, Client
from txmq.batch import decode, encode, verify
from txmq.batch.codecs import decompress
from txmq.batch.header import Codec
from txmq.broker.calls import letters
from txmq.broker.calls.letters import SelectedLetters
from txmq.broker.search import everywhere, search
from txmq.client.protocol.calls import calls_by
from txmq.client.protocol.lives import (
    Searched,
    Trace,
    search_messages,
    trace_messages,
    with_correlated,
)
from txmq.core.topics.sends import StoreBatch
from txmq.errors import BadRequest, LocalProtocolError, RemoteProtocolError
from txmq.faces import run
from txmq.model.message import Message, message_id
from txmq.wire.calls.letters import SelectionArgs
from txmq.wire.data_requests import Fetch, Opcode, pack_fetch


def order(number: int, **headers: str) -> Message:
    return Message(json.dumps({"order": {"id": number}}).encode(), f"key-{number}", None, headers)


@pytest.fixture
def client(broker: BrokerInMemory) -> Client:
    client = broker.connect()
    client.call("topic.create", name="t", partitions=2)
    return client


def everywhere_found(broker: BrokerInMemory, **wanted: Any) -> list[tuple[str, int, Any]]:
    """Return the places in all pages."""
    searched = run(search_messages(calls_by(broker.ask), wanted, 1_000))
    assert searched.next is None
    return [(one["topic"], one["partition"], one["offset"]) for one in searched.messages]


def test_a_topic_is_searched_by_bodies_and_headers(broker: BrokerInMemory, client: Client) -> None:
    send(client, *[order(n, region="eu" if n % 2 else "us") for n in range(6)])
    assert places(found(broker, body="$.order.id=4")) == [(0, 4)]
    assert places(found(broker, body='"id": 4')) == [(0, 4)]
    assert places(found(broker, header=["region", "eu"])) == [(0, 1), (0, 3), (0, 5)]
    assert places(found(broker, header=["region", None], body="$.order.id=2")) == [(0, 2)]
    assert places(found(broker, key="key-1", body="$.order.id=2")) == []
    page = broker.ask("message.find", topic="t", body="$.order.id=9")
    assert (page["messages"], page["next"], page["read"]) == ([], None, 6)


@pytest.mark.parametrize("args", [{"body": "$.order"}, {"body": ""}, {"header": ["", None]}])
def test_a_bad_criterion_is_refused(broker: BrokerInMemory, args: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError, match=r"body|header"):
        broker.ask("message.search", **args)


def test_a_search_of_all_topics_names_what_it_looks_for(broker: BrokerInMemory) -> None:
    for args in ({}, {"id": message_id(b"p" * 16, 0), "body": "x"}):
        refused = broker.ask("message.search", **args)
        assert type(refused) is BadRequest


def test_all_topics_are_searched_with_what_is_in_none_of_them(
    broker: BrokerInMemory, client: Client
) -> None:
    send(client, order(17), partition=1)
    send(client, order(18, origin="17"), producer=2)
    send(client, order(17)._replace(delay=3_600), producer=3)
    broker.half(1, order(17))
    wanted = {"body": "$.order.id=17"}
    # of the transaction, the delayed one, and the published one
    assert everywhere_found(broker, **wanted) == [("t", 0, None), ("t", 0, None), ("t", 1, 0)]
    assert everywhere_found(broker, header=["origin", "17"]) == [("t", 0, 0)]


def test_a_letter_that_retention_has_removed_is_found_by_its_body() -> None:
    office = Office(4)
    office.broker.engine.state.topics["t"].start_offsets[0] = 4
    rows = run(search_messages(calls_by(office.broker.ask), {"header": ["tenant", None]}, 10))
    states = [(row["offset"], row["state"]) for row in rows.messages]
    assert states[:2] == [(1, "removed by retention"), (3, "removed by retention")]


def test_a_search_stops_where_it_is_told_and_goes_on_there(
    broker: BrokerInMemory, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everywhere, "STEPS", 1)
    monkeypatch.setattr(everywhere, "STEP_BATCHES", 2)
    for number in range(10):
        send(client, order(number), producer=number)
    read: list[int] = []

    def told(searched: Searched) -> bool:
        read.append(searched.read)
        return searched.read < 6

    wanted = {"body": "$.order.id=9"}
    first = run(search_messages(calls_by(broker.ask), wanted, 10, told=told))
    assert (first.messages, first.at, read) == ([], "t", [2, 4, 6])
    rest = run(search_messages(calls_by(broker.ask), wanted, 10, after=first.next))
    assert [one["offset"] for one in rest.messages] == [9]
    assert first.read + rest.read == 10


def test_letters_are_selected_by_their_bodies() -> None:
    office = Office(0)
    for number in (17, 18):
        office.send(order(number))
    wanted = Fetch(office.joined["generation"], 0, 1 << 22, 10_000, "g", "a")
    office.client.ask(Opcode.FETCH, pack_fetch(wanted))
    for offset in (0, 1):
        office.nack(offset, {"type": "A", "text": "x", "bases": [], "fingerprint": "f"})
    assert office.pages(body="$.order.id=18") == [1]
    assert office.pages(body="order") == [0, 1]
    stats = office.broker.ask("dlq.stats", group="g", select={"body": "$.order.id=18"})
    assert stats["counted"] == 1
    page = office.broker.ask("dlq.list", group="g", select={"body": "order"}, bodies=False)
    assert all("body" not in letter for letter in page["letters"])


@pytest.fixture
def chain(broker: BrokerInMemory, client: Client) -> list[str]:
    """An order, what followed from it under other keys, and others; their ids."""
    ids = [message_id(bytes([number]) * 16, 0) for number in range(1, 6)]
    send(client, order(17), producer=1)
    broker.pass_time(1)
    for number, cause in ((2, 0), (3, 1), (4, 0)):
        headers = {"causation": ids[cause], "correlation": ids[0]}
        message = Message(b"effect", f"other-{number}", None, headers)
        send(client, message, producer=number, partition=number % 2)
        broker.pass_time(1)
    send(client, order(18), producer=5)
    return ids


@pytest.mark.parametrize(
    "wanted", [{"key": "key-17"}, {"body": "$.order.id=17"}, {"key": "other-3"}, {"id": 2}]
)
def test_a_trace_follows_an_order_through_other_keys(
    broker: BrokerInMemory, chain: list[str], wanted: dict[str, Any]
) -> None:
    if "id" in wanted:
        wanted = {"id": chain[2]}
    traced: Trace = run(trace_messages(calls_by(broker.ask), wanted, 10))
    assert [one["message_id"] for one in traced.messages] == chain[:4]
    assert not traced.more
    less = run(trace_messages(calls_by(broker.ask), wanted, 2))
    assert (len(less.messages), less.more) == (2, True)
    [asked, *_others] = run(search_messages(calls_by(broker.ask), wanted, 1)).messages
    assert asked["message_id"] in [one["message_id"] for one in less.messages]


def test_causes_that_are_nowhere_are_looked_for_within_the_bounds_of_a_search(
    broker: BrokerInMemory, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of another broker, or what a sender has made up."""
    monkeypatch.setattr(everywhere, "STEPS", 1)
    client.call("topic.create", name="other", partitions=2)
    made_up = [message_id(bytes([n]) * 16, 0) for n in range(50, 60)]
    send(client, *[Message(b"x", f"k{n}", None, {"correlation": made_up[n]}) for n in range(10)])
    found = run(search_messages(calls_by(broker.ask), {"body": "x"}, 100))
    asked: list[Searched] = []

    def told(searched: Searched) -> bool:
        asked.append(searched)
        return False

    traced = run(with_correlated(calls_by(broker.ask), found, 100, told=told))
    assert len(asked) == 2, "one cause, and what has a correlation in common"
    assert traced.more
    assert len(traced.messages) == 10


def test_a_trace_of_nothing_is_refused(broker: BrokerInMemory) -> None:
    with pytest.raises(LocalProtocolError):
        run(trace_messages(calls_by(broker.ask), {"key": None}, 10))


def test_bodies_that_are_far_larger_than_their_batches_are_judged_in_many_steps(
    broker: BrokerInMemory, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each MiB of such JSON stands in 1 KiB of the log, and takes 0.2 s."""
    judged: list[int] = []  # bytes, in each step
    monkeypatch.setattr(search, "JUDGED_BYTES", 3_000)
    large = [Message(b"[" * 1_000, f"k{n}") for n in range(10)]
    send(client, *large, order(17))
    send(client, *large, producer=2)

    def noted(_query: search.SearchQuery, view: Any, row: int) -> bool:
        judged[-1] += len(view.bodies[row])
        return bool(view.keys[row] == "key-17")

    real = search.Search.page

    def page(self: search.Search, partitions: range, offset: int) -> search.SearchPage:
        judged.append(0)
        return real(self, partitions, offset)

    monkeypatch.setattr(search.SearchQuery, "wants", noted)
    monkeypatch.setattr(search.Search, "page", page)
    assert places(found(broker, body="$.order.id=17")) == [(0, 10)]
    assert sum(judged) >= 20_000
    assert max(judged) <= 4_000


@pytest.mark.parametrize("call", ["message.find", "message.search"])
def test_a_batch_is_decompressed_once_though_many_steps_judge_it(
    broker: BrokerInMemory, client: Client, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(search, "JUDGED_BYTES", 3_000)
    for producer in (1, 2):
        large = [Message(b"x" * 1_000, f"k{n}") for n in range(10)]
        send(client, *large, order(producer), producer=producer, codec=Codec.ZSTD)
    sizes: list[int] = []

    def counted(codec: int, data: bytes, size: int) -> bytes:
        sizes.append(size)
        return decompress(codec, data, size)

    monkeypatch.setattr(decode, "decompress", counted)
    where = {"topic": "t"} if call == "message.find" else {}
    assert broker.ask(call, **where, body="$.order.id=2")["messages"][0]["offset"] == 21
    assert len(sizes) == 2


def test_pages_of_what_is_in_no_topic_are_bounded(
    broker: BrokerInMemory, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        send(client, Message(b"x" * 1_000, f"k{n}")._replace(delay=3_600), producer=n + 2)
    broker.half(1, *[Message(b"x" * 1_000, f"k{n}") for n in range(3)])
    send(client, Message(b"x"))
    keys: list[str | None] = []
    sizes: list[int] = []
    after: Any = None
    monkeypatch.setattr(everywhere, "REPLY_BYTES", 2_000)
    while after is not None or not sizes:
        page = broker.ask("message.search", body="x", bodies=True, limit=4, after=after)
        keys += [one["key"] for one in page["messages"]]
        sizes.append(len(page["messages"]))
        after = page["next"]
        assert page["at"] in (None, "t")
    assert sorted(keys, key=str) == [None, "k0", "k0", "k1", "k1", "k2", "k2"]
    assert max(sizes) == 2


def test_undecided_messages_of_a_key_come_in_pages(broker: BrokerInMemory, client: Client) -> None:
    for number in range(3):
        broker.half(number, Message(b"1", "k"), Message(b"2", "k"), Message(b"3", "other"))
    send(client, Message(b"4", "k"), producer=9, partition=1)
    bodies: list[bytes] = []
    after: Any = None
    while after is not None or not bodies:
        page = broker.ask("message.search", key="k", bodies=True, limit=2, after=after)
        assert len(page["messages"]) <= 2
        bodies += [b64decode(one["body"]) for one in page["messages"]]
        after = page["next"]
    assert bodies == [b"1", b"2"] * 3 + [b"4"]


def test_bodies_of_letters_are_judged_in_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "READ_PER_STEP", 3_000)
    office = Office(0)
    batch = encode(
        [Message(b"[" * 1_000, f"k{n}") for n in range(10)],
        producer_id=b"p" * 16, epoch=0, sequence=0, born_at=1, codec=Codec.ZSTD,
    )  # fmt: skip
    office.broker.do(StoreBatch("t", 0, 0, batch, verify(batch)))
    wanted = Fetch(office.joined["generation"], 0, 1 << 22, 10_000, "g", "a")
    office.client.ask(Opcode.FETCH, pack_fetch(wanted))
    for offset in range(10):
        office.nack(offset, {"type": "A", "text": "x", "bases": [], "fingerprint": "f"})
    selected = SelectedLetters(
        letters.DeadLetterCalls(office.broker.engine, office.broker.assembly.turns),
        office.broker.engine.state.groups.by_name["g"],
        SelectionArgs(body="$.a=1"),
        None,
    )
    steps = 0
    while not selected.scan.ended:
        assert not list(selected.shown(bodies=False))
        steps += 1
    assert steps >= 4
