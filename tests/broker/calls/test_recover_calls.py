"""Control calls about consumers' local stores."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import BrokerInMemory
from txmq.batch import encode
from txmq.model.message import Message
from txmq.model.topic_partition import FIRST_EPOCH
from txmq.wire import data_requests
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Fetch, Opcode, pack_fetch

STORE = "5" * 32
FAILURE = ["KeyError", "text", "print"]
MESSAGES = 7


def send(client: Any, sequence: int, key: str) -> None:
    batch = encode(
        [Message(b"body", key)], producer_id=b"q" * 16, epoch=0, sequence=sequence, born_at=1
    )
    client.ask(Opcode.SEND, data_requests.send_header("t", 0, 0) + batch)


class World:
    """A broker with seven messages, and a member to which they are leased."""

    def __init__(self, mode: str = "concurrent") -> None:
        self.broker = BrokerInMemory()
        self.broker.start()
        self.client = self.broker.connect()
        self.client.call("topic.create", name="t", partitions=1)
        for sequence in range(MESSAGES):
            send(self.client, sequence, "k" if sequence in (0, 3, 5) else f"k{sequence}")
        self.joined = self.join("m", mode)

    def join(self, member: str, mode: str = "concurrent") -> Any:
        joined: Any = self.client.call(
            "consumer.join", group="g", topics=["t"], instance=member, member=member, mode=mode
        )
        self.known = {"group": "g", "member": member, "generation": joined["generation"]}
        return joined

    def fetch(self) -> list[int]:
        fetch = Fetch(self.known["generation"], 0, 1 << 20, 100, "g", self.known["member"])
        reply = self.client.ask(Opcode.FETCH, pack_fetch(fetch))
        return [
            chunk.base_offset + row
            for chunk in unpack_chunks(reply.payload).chunks
            for row in range(chunk.first_row, chunk.first_row + chunk.rows)
        ]

    def stored(self, *entries: tuple[int, str], **more: Any) -> Any:
        rows = [["t", 1, 0, offset, state, 1, 5, FAILURE, 0, 0] for offset, state in entries]
        return self.client.call(
            "consumer.stored", **self.known, store=STORE, host="h", entries=rows, **more
        )

    def leave(self) -> None:
        member = self.known["member"]
        self.client.call("consumer.leave", group="g", member=member, instance=member)


def test_entries_of_one_key_in_one_report_are_judged_in_turn() -> None:
    world = World("ordered")
    world.fetch()
    reply = world.stored((0, "stored"), (3, "stored"), (5, "stored"), (1, "acked"), (0, "stored"))
    assert reply["verdicts"] == ["kept", "parked", "parked", "settled", "kept"]
    assert reply["fences"] == [2, 2, 2, 0, 2]
    reply = world.stored((0, "acked"), (3, "acked"), (5, "stored"))
    assert reply["verdicts"] == ["settled", "settled", "parked"], "a lease may hold the key"
    world.stored((2, "acked"), (4, "acked"), (6, "acked"))
    assert world.fetch() + world.fetch() == [5]
    assert (reply["orders"], reply["more"]) == ([], False)


def test_the_replies_to_members_have_the_policy() -> None:
    world = World()
    beat: Any = world.client.call("consumer.heartbeat", **world.known, instance="m")
    for reply in (world.joined, beat):
        assert reply["retry"]["delays_us"][0] == 10_000_000
        assert reply["on_exhausted"] == "park"


def test_stores_and_their_messages_are_listed_in_pages() -> None:
    world = World()
    world.fetch()
    world.stored(*((offset, "stored") for offset in range(5)))
    listed = world.broker.ask("recover.list")
    [store] = listed["stores"]
    assert listed["next"] is None
    assert {name: store[name] for name in ("group", "store", "state", "member", "host")} == {
        "group": "g", "store": STORE, "state": "owned", "member": "m", "host": "h",
    }  # fmt: skip
    assert (store["messages"], store["attempts"], store["lost_at"]) == (5, 5, None)
    assert world.broker.ask("recover.list", after=f"g/{STORE}") == {"stores": [], "next": None}
    seen: list[Any] = []
    after = None
    while True:
        page = world.broker.ask(
            "recover.show", group="g", store=STORE, after=after, limit=2, bodies=True
        )
        seen += page["list"]
        after = page["next"]
        if after is None:
            break
    assert [message["offset"] for message in seen] == [0, 1, 2, 3, 4]
    assert (seen[0]["key"], seen[0]["body"], seen[0]["due"]) == ("k", "Ym9keQ==", 5)
    assert seen[0]["epoch"] == FIRST_EPOCH
    shown = world.broker.ask("group.show", group="g")
    assert (shown["at_consumers"], len(shown["store_list"])) == (5, 1)


def test_orders_go_out_with_the_next_reply() -> None:
    world = World()
    world.fetch()
    world.stored((0, "stored"), (1, "stored"))
    world.client.call("retry.now", group="g", letters=[["t", 0, 0]])
    world.client.call("retry.skip", group="g", letters=[["t", 0, 1]], reason="no use")
    reply = world.stored()
    assert reply["orders"] == [["t", 1, 0, 0, "retry"], ["t", 1, 0, 1, "drop"]]
    assert world.stored((1, "dead"))["verdicts"] == ["settled"]
    [letter] = world.broker.ask("dlq.list", group="g")["letters"]
    assert (letter["state"], letter["reason"]) == ("abandoned", "no use")


def test_what_was_processed_under_another_name_is_settled_while_its_session_lasts() -> None:
    world = World()
    world.fetch()
    generation = world.known["generation"]
    world.join("restarted")
    told = [
        ["t", 1, 0, offset, state, 1, 5, None, begun, 0]
        for offset, state, begun in [
            (0, "acked", generation),
            (1, "acked", 0),
            (2, "acked", generation + 1),
            (3, "stored", generation),
            (4, "dead", generation),
        ]
    ]
    reply: Any = world.client.call(
        "consumer.stored", **world.known, store=STORE, host="h", entries=told
    )
    assert reply["verdicts"] == ["settled", *["elsewhere"] * 4]
    world.known["member"] = "m"
    world.leave()
    world.join("restarted")
    assert world.fetch() == [1, 2, 3, 4, 5, 6]


def test_a_message_that_its_store_has_lost_is_retried_with_its_attempts() -> None:
    world = World()
    world.fetch()
    world.stored((0, "stored"))
    world.client.call("retry.now", group="g", letters=[["t", 0, 0]])
    assert world.stored()["orders"] == [["t", 1, 0, 0, "retry"]]
    lost = [["t", 1, 0, 0, "returned", 0, 0, None, 0, 0]]
    reply: Any = world.client.call(
        "consumer.stored", **world.known, store=STORE, host="h", entries=lost
    )
    assert (reply["verdicts"], reply["orders"]) == (["settled"], [])
    assert world.broker.ask("recover.list")["stores"] == []
    world.broker.pass_time(1)
    fetch = Fetch(world.known["generation"], 0, 1 << 20, 100, "g", "m")
    [chunk] = unpack_chunks(world.client.ask(Opcode.FETCH, pack_fetch(fetch)).payload).chunks
    assert (chunk.base_offset, chunk.attempt) == (0, 2)


def test_an_adoption_goes_on_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.core.consumers.background_work.STEP_ROWS", 2)
    world = World("ordered")
    world.fetch()
    world.stored(*((offset, "stored") for offset in range(MESSAGES)))
    refused: Any = world.client.call("recover.adopt", group="g", store=STORE)
    assert "a member of" in refused["message"]
    world.leave()
    [store] = world.broker.ask("recover.list")["stores"]
    assert (store["state"], store["lost_at"] is None) == ("no owner", False)
    told: Any = world.client.call(
        "recover.tell", group="g", store=STORE,
        entries=[
            ["t", 1, 0, 1, "acked", 1, 0, None, 0, 0],
            ["t", 1, 0, 2, "stored", 4, 0, None, 0, 0],
        ],
    )  # fmt: skip
    assert told["verdicts"] == ["settled", "kept"]
    adopted: Any = world.client.call("recover.adopt", group="g", store=STORE)
    assert adopted["messages"] == 4, "one was acked, and two follow a message of their key"
    world.broker.pass_time(1)
    shown = world.broker.ask("group.show", group="g")
    assert (shown["retrying"], shown["at_consumers"], shown["parked"]) == (4, 0, 2)
    world.join("n", "ordered")
    assert world.fetch() == [0, 2, 4, 6]


def test_two_operators_at_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.core.consumers.background_work.STEP_ROWS", 2)
    world = World()
    world.fetch()
    world.stored(*((offset, "stored") for offset in range(MESSAGES)))
    place: Any = {"group": "g", "store": STORE}
    for _operator in range(2):
        world.client.call("retry.now", group="g", letters=[["t", 0, 0], ["t", 0, 1]])
    dropped: list[Any] = [
        world.client.call("retry.skip", group="g", letters=[["t", 0, 1]], reason="no use")
        for _operator in range(2)
    ]
    assert [reply["done"] for reply in dropped] == [[["t", 0, 1]], []]
    assert dropped[1]["refused"] == [["t", 0, 1, "not retried: it is a dead letter"]]
    late: Any = world.client.call("retry.now", group="g", letters=[["t", 0, 1]])
    assert late["refused"] == dropped[1]["refused"]
    assert world.stored()["orders"] == [["t", 1, 0, 0, "retry"], ["t", 1, 0, 1, "drop"]]
    world.leave()
    adopted: list[Any] = [world.client.call("recover.adopt", **place) for _operator in range(2)]
    assert [reply["messages"] for reply in adopted] == [6, 6]
    refused: Any = world.client.call("retry.skip", group="g", letters=[["t", 0, 2]], reason="x")
    assert "is being adopted" in refused["refused"][0][3]
    world.broker.pass_time(1)
    again: Any = world.client.call("recover.adopt", **place)
    assert again["messages"] == 0
    shown = world.broker.ask("group.show", group="g")
    assert (shown["retrying"], shown["at_consumers"]) == (6, 0)
    world.join("n")
    assert sorted(world.fetch()) == [0, 2, 3, 4, 5, 6]


def test_wrong_arguments_are_refused() -> None:
    world = World()
    wrong: list[Any] = [[["t", 1, 0, 0, "gone", 1, 5, None, 0, 0]], [["t", 1, 0, 0]], [[]] * 1_001]
    for entries in wrong:
        reply: Any = world.client.call(
            "consumer.stored", **world.known, store=STORE, entries=entries
        )
        assert "consumer.stored: entries" in reply["message"]
