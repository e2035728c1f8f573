"""Waiting fetches: a retry is delivered in time, and what others give back at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import BrokerInMemory
from txmq.broker.delivery import group_paces
from txmq.core.transactions.decisions import DecideTransaction
from txmq.model.keys import tag_filter
from txmq.model.message import Decision, Message
from txmq.model.units import SECOND
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Fetch, Opcode, pack_fetch
from txmq.wire.frames import encode_frame

MESSAGES, LATE_US, STEP_S = 40, SECOND // 10, 0.005


def test_each_retry_comes_within_a_tenth_of_a_second_of_its_time() -> None:
    broker = BrokerInMemory()
    broker.start()
    token = broker.half(1, *(Message(b"m", f"k{number}") for number in range(MESSAGES)))
    broker.do(DecideTransaction(bytes.fromhex(token), Decision.COMMIT, "producer shop"))
    client = broker.connect()
    options: dict[str, Any] = {"topics": ["t"], "instance": "i", "member": "m", "flood_keys": 0}
    joined: Any = client.call("consumer.join", group="g", **options)
    generation = joined["generation"]
    fetch = encode_frame(
        Opcode.FETCH, 9, pack_fetch(Fetch(generation, 60_000, 1 << 20, 1_000, "g", "m"))
    )
    client.send(fetch)
    assert len(client.replies()) == 1
    due = {}
    for offset in range(MESSAGES):
        delay_ms = 500 + offset * 37
        place = {
            "group": "g",
            "member": "m",
            "generation": generation,
            "topic": "t",
            "partition": 0,
            "offset": offset,
        }
        nacked: Any = client.call("consumer.nack", **place, delay_ms=delay_ms)
        due[offset] = nacked["due_at"]
    client.send(fetch)
    late: dict[int, int] = {}
    while len(late) < MESSAGES:
        broker.clock.advance(STEP_S)
        for reply in client.replies():
            for chunk in unpack_chunks(reply.payload).chunks:
                late[chunk.base_offset + chunk.first_row] = (
                    broker.now() - due[chunk.base_offset + chunk.first_row]
                )
            client.send(fetch)
    assert min(late.values()) >= 0
    assert max(late.values()) <= LATE_US


def test_a_waiting_member_gets_what_another_returns_without_a_timer() -> None:
    broker = BrokerInMemory()
    broker.start()
    token = broker.half(1, Message(b"m"))
    broker.do(DecideTransaction(bytes.fromhex(token), Decision.COMMIT, "producer shop"))
    holder, waiter = broker.connect(), broker.connect()
    generations = {}
    for client, member in ((holder, "holder"), (waiter, "waiter")):
        joined: Any = client.call(
            "consumer.join", group="g", topics=["t"], instance=member, member=member
        )
        generations[member] = joined["generation"]
        client.send(fetch_of(member, joined["generation"]))
    [held] = holder.replies()
    assert len(unpack_chunks(held.payload).chunks) == 1
    assert waiter.replies() == []
    holder.call(
        "consumer.return",
        group="g",
        member="holder",
        generation=generations["holder"],
        ranges=[("t", 0, 0, 1)],
    )
    broker.clock.advance(0)
    [reply] = waiter.replies()
    assert len(unpack_chunks(reply.payload).chunks) == 1


def test_a_fetch_whose_connection_is_lost_while_it_plans_leases_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = BrokerInMemory()
    broker.start()
    lost, other = broker.connect(), broker.connect()
    unwanted = broker.half(1, Message(b"m", tag="a"))
    broker.do(DecideTransaction(bytes.fromhex(unwanted), Decision.COMMIT, "producer shop"))
    joined: Any = other.call("consumer.join", group="g", topics=["t"], instance="m", member="m")
    fetch = fetch_of("m", joined["generation"], tag_filter(["b"]))
    submit = broker.engine.submit

    def losing(command: Any, answer: Any) -> None:
        def answered(reply: object) -> None:
            lost.session.connectionLost()  # type: ignore[attr-defined]
            answer(reply)

        submit(command, answered)

    with monkeypatch.context() as patched:
        patched.setattr(broker.engine, "submit", losing)
        lost.send(fetch)
    wanted = broker.half(2, Message(b"m", tag="b"))
    broker.do(DecideTransaction(bytes.fromhex(wanted), Decision.COMMIT, "producer shop"))
    broker.clock.advance(0)
    group = broker.engine.state.groups.by_name["g"]
    assert [position.cursor for position in group.positions.values()] == [1]
    assert not group.leases


def fetch_of(member: str, generation: int, tags: int = 0) -> bytes:
    request = Fetch(generation, 60_000, 1 << 20, 1_000, "g", member, tags)
    return encode_frame(Opcode.FETCH, 9, pack_fetch(request))


class Consuming(BrokerInMemory):
    """A broker with messages of topic t in one batch each, and a member of group g."""

    def __init__(self, messages: int, most: int = 1_000) -> None:
        super().__init__()
        self.start()
        token = self.half(1, *(Message(b"m" * 100) for _ in range(messages)))
        self.do(DecideTransaction(bytes.fromhex(token), Decision.COMMIT, "producer shop"))
        self.client = self.connect()
        joined: Any = self.client.call(
            "consumer.join", group="g", topics=["t"], instance="i", member="m"
        )
        self.fetch = encode_frame(
            Opcode.FETCH,
            9,
            pack_fetch(Fetch(joined["generation"], 1_000, 1 << 20, most, "g", "m")),
        )

    def messages_in(self, seconds: float) -> int:
        """Fetch for some time, and return how many messages there were."""
        found = 0
        self.client.send(self.fetch)
        for _ in range(round(seconds / 0.05)):
            self.clock.advance(0.05)
            for reply in self.client.replies():
                found += sum(chunk.rows for chunk in unpack_chunks(reply.payload).chunks)
                self.client.send(self.fetch)
        return found


def test_a_group_gets_its_messages_at_the_rate_that_an_operator_sets() -> None:
    broker = Consuming(200)
    broker.client.call("group.alter", group="g", messages_per_s=10, operator="ada")
    assert 38 <= broker.messages_in(3.0) <= 42, "a second's worth at once, then ten a second"
    assert broker.ask("broker.show")["throttled"]["groups"]["g"]["messages_per_s"] > 0
    reasons = [one["why"] for one in broker.ask("group.show", group="g")["positions"]]
    assert "messages_per_s of 10" in str(reasons)
    broker.client.call("group.alter", group="g", messages_per_s=0, operator="ada")
    assert broker.messages_in(1.0) >= 158
    assert broker.ask("broker.show")["throttled"]["groups"] == {}


@pytest.mark.parametrize("other", [0, 1_000_000], ids=["the only limit", "one of two"])
def test_the_debt_of_a_group_stays_when_its_limit_is_removed_and_set_again(
    monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    monkeypatch.setattr(group_paces, "HOT_BYTES", -(1 << 40))  # all of the log is cold
    broker = Consuming(40, most=5)

    def limit(cold_bytes_per_s: int) -> None:
        broker.clock.advance(2.0)
        broker.client.replies()  # the last fetch has ended
        limits = {"cold_bytes_per_s": cold_bytes_per_s, "messages_per_s": other}
        broker.client.call("group.alter", group="g", operator="ada", **limits)

    limit(1)
    assert broker.messages_in(1.0) == 5, "hundreds of bytes, and then their debt"
    limit(0)
    assert (broker.ask("broker.show")["throttled"]["groups"] == {}) == (not other)
    limit(1)
    assert broker.messages_in(1.0) == 0
    limit(0)
    assert broker.messages_in(2.0) == 35


def test_a_group_reads_cold_messages_at_the_rate_of_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_paces, "HOT_BYTES", -(1 << 40))  # all of the log is cold
    broker = Consuming(40, most=5)
    broker.client.call("group.alter", group="g", cold_bytes_per_s=100, operator="ada")
    assert broker.messages_in(2.0) == 5, "a reply that has begun is whole, and then its debt"
    assert broker.ask("broker.show")["throttled"]["groups"]["g"]["cold_bytes_per_s"] > 0
    monkeypatch.setattr(group_paces, "HOT_BYTES", 1 << 40)
    assert broker.messages_in(2.0) == 35, "what is hot is not limited"
