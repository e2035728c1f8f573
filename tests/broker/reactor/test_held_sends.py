"""Sends wait while the disk is behind; decisions, acks and all else do not."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred

from tests.broker.support import BrokerInMemory, Client
from txmq.batch import encode
from txmq.broker.reactor import held_sends, protocol
from txmq.core.topics.topics import CreateTopic
from txmq.errors import Throttled
from txmq.model.decider import ByChecker
from txmq.model.message import Decision, Message
from txmq.wire import data_requests
from txmq.wire.batched import pack_requests
from txmq.wire.bundle import BundleDescription, BundlePart, PartBatch, pack_part
from txmq.wire.data_requests import Decide, Opcode, pack_decide
from txmq.wire.frames import Frame, encode_frame
from txmq.wire.status import STATUS_BY_ERROR, to_error


class Busy(BrokerInMemory):
    """A broker with topic t whose disk takes nothing until `catch_up`, and that is
    behind with the first record.
    """

    def __init__(self) -> None:
        super().__init__()
        self.do(CreateTopic("t", 1))
        self.fall_behind()

    def fall_behind(self) -> None:
        """Have a thread write two records, and not return."""
        self.hanging = Deferred()
        for name in (f"one{self.engine.store.end}", f"two{self.engine.store.end}"):
            self.engine.submit(CreateTopic(name, 1), lambda _reply: None)
        self.clock.advance(0)
        self.engine.budget.bytes = 1
        assert self.engine.is_behind

    def catch_up(self, budget: int = 64 << 20) -> None:
        """Let the disk finish all writes."""
        self.engine.budget.bytes = budget
        hanging, self.hanging = self.hanging, None
        assert hanging is not None
        hanging.callback(None)
        self.pass_time(0.1)

    @property
    def held(self) -> held_sends.HeldSends:
        return self.assembly.sessions.sends


def payload(producer: bytes, sequence: int, size: int = 1) -> bytes:
    message = Message(bytes(size))
    batch = encode([message], producer_id=producer, epoch=0, sequence=sequence, born_at=1)
    return data_requests.send_header("t", 0, 0) + batch


def half(token: bytes) -> bytes:
    batch = encode([Message(b"m")], producer_id=token, epoch=0, sequence=0, born_at=1)
    description = BundleDescription(ByChecker("s"), "s", (), 6_000_000, ())
    part = BundlePart(
        token=token,
        part=0,
        epoch=0,
        batches=(PartBatch("t", 0, 0, batch),),
        sealed=True,
        commit=False,
        digest=b"d" * 32,
        description=description,
    )
    return b"".join(pack_part(part))


def send(client: Client, opcode: int, correlation: int, data: bytes) -> list[Frame]:
    client.send(encode_frame(opcode, correlation, data))
    return client.replies()


def test_sends_wait_for_the_disk_and_keep_their_order() -> None:
    broker = Busy()
    end, client = broker.engine.store.end, broker.connect()
    for sequence in range(3):
        assert not send(client, Opcode.SEND, sequence, payload(b"p" * 16, sequence))
    assert (broker.held.waiting, broker.engine.store.end) == (3, end)
    assert [reply.status for reply in send(client, Opcode.PING, 9, b"")] == [0]
    broker.clock.advance(2.0)
    assert broker.held.waiting_s == 2.0
    broker.catch_up()
    assert [(reply.correlation, reply.status) for reply in client.replies()] == [
        (0, 0), (1, 0), (2, 0)]  # fmt: skip
    assert (broker.held.bytes, broker.held.waiting_s) == (0, 0.0)
    assert (broker.held.requests, round(broker.held.seconds)) == (3, 6)


def test_a_decision_goes_before_sends_and_halves_that_wait() -> None:
    broker = Busy()
    broker.catch_up()
    token = bytes.fromhex(broker.half(1, Message(b"a"), decider=ByChecker("s")))
    broker.fall_behind()
    clients = [broker.connect() for _ in range(2)]
    for number, client in enumerate(clients):
        producer = bytes([number]) * 16
        for sequence in range(20):
            client.send(encode_frame(Opcode.SEND, sequence, payload(producer, sequence, 10_000)))
    assert broker.assembly.sessions.sends.waiting == 40
    behind = broker.engine.store.end
    # on the connection of sends that wait
    decision = pack_decide(Decide(Decision.COMMIT, token, 0, "s"))
    assert not send(clients[0], Opcode.DECIDE, 99, decision)
    assert broker.engine.state.undecided == 0
    assert broker.engine.store.end - behind < 1_000, "only the decision is in the log"
    broker.catch_up()
    assert 99 in [reply.correlation for reply in clients[0].replies()]


@pytest.mark.parametrize("together", [False, True])
def test_a_decision_stays_behind_its_own_half_message(*, together: bool) -> None:
    broker = Busy()
    client, token = broker.connect(), broker.token(5)
    decide = pack_decide(Decide(Decision.COMMIT, token, 0, "s"))
    other = pack_decide(Decide(Decision.COMMIT, broker.token(6), 0, "s"))
    client.send(encode_frame(Opcode.GROUP, 1, half(token)))
    assert broker.held.waiting == 1
    if together:
        client.send(encode_frame(Opcode.DECISIONS, 2, b"".join(pack_requests([other, decide]))))
    else:
        client.send(encode_frame(Opcode.DECIDE, 2, decide))
    assert broker.held.waiting == 2
    broker.catch_up()
    assert [(reply.correlation, reply.status) for reply in client.replies()] == [(1, 0), (2, 0)]
    assert broker.engine.state.undecided == 0


def test_a_decision_does_not_wait_where_its_half_message_has_gone() -> None:
    broker = Busy()
    client, token = broker.connect(), broker.token(5)
    assert not send(client, Opcode.GROUP, 1, half(token))
    broker.catch_up()
    assert [reply.correlation for reply in client.replies()] == [1]
    broker.fall_behind()
    client.send(encode_frame(Opcode.GROUP, 2, half(broker.token(6))))
    decide = pack_decide(Decide(Decision.COMMIT, token, 0, "s"))
    assert not send(client, Opcode.DECIDE, 3, decide)
    assert (broker.held.waiting, broker.engine.state.undecided) == (1, 0)
    broker.catch_up()
    assert [reply.status for reply in client.replies()] == [0, 0]


def test_beyond_the_bounds_a_send_is_refused_with_the_pause_to_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_sends, "HELD_BYTES", 4_500_000)
    monkeypatch.setattr(held_sends, "LEAST_SHARE", 4_500_000)
    broker = Busy()
    client = broker.connect()
    for _ in range(60):
        broker.engine.budget.observe(1 << 10, 0.01)
        broker.engine.budget.observe(1 << 20, 1.01)
    broker.engine.budget.bytes = 1
    for sequence in range(4):
        assert not send(client, Opcode.SEND, sequence, payload(b"p" * 16, sequence, 1_000_000))
    assert not send(client, Opcode.SEND, 4, payload(b"p" * 16, 4, 1_000_000)), "in its turn"
    assert broker.held.refused == 1
    broker.catch_up()
    *replies, reply = client.replies()
    assert [reply.status for reply in replies] == [0] * 4
    error = to_error(reply.status, reply.payload)
    assert isinstance(error, Throttled)
    assert 3.0 < error.retry_after_s <= 5.0


def test_refused_sends_keep_no_payload_and_nobody_waits_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_sends, "HELD_BYTES", 1_000_000)
    monkeypatch.setattr(protocol, "REQUEST_BYTES", 1_000_000)
    broker = Busy()
    client = broker.connect()
    for sequence in range(30):
        data = payload(b"p" * 16, sequence, 900_000)
        send(client, Opcode.SEND, sequence, data)
        client.send(encode_frame(Opcode.PING, 99, bytes(20_000)))
        assert [reply.correlation for reply in client.replies()] == [99]
    assert broker.held.refused == 29
    assert broker.assembly.sessions._shared.request_bytes == broker.held.bytes == len(data)
    broker.catch_up()
    answers = [(one.correlation, one.status) for one in client.replies()]
    busy = STATUS_BY_ERROR[Throttled]
    assert answers == [(one, busy if one else 0) for one in range(30)]
    assert broker.assembly.sessions._shared.request_bytes == 0


def test_one_that_is_alone_has_all_that_may_wait_and_who_comes_later_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_sends, "LEAST_SHARE", 10_000)
    monkeypatch.setattr(held_sends, "HELD_BYTES", 400_000)
    monkeypatch.setattr(held_sends, "MOST_BYTES", 800_000)
    broker = Busy()
    waits: list[int] = []
    for number in range(3):
        client, before = broker.connect(), broker.held.bytes
        if number == 2:
            client.transport.peerAddr = IPv4Address("TCP", "10.0.0.9", 1)
            client.session.__dict__.pop("owner", None)
        for sequence in range(50):
            data = payload(bytes([number]) * 16, sequence, 10_000)
            client.send(encode_frame(Opcode.SEND, sequence, data))
        waits.append((broker.held.bytes - before) // len(data))
    assert waits == [39, 19, 19], "all, half beside it, and half for another host"


def test_who_ignores_the_pause_costs_no_memory_and_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_sends, "LEAST_SHARE", 100_000)
    monkeypatch.setattr(held_sends, "HELD_BYTES", 400_000)
    broker = Busy()
    rude, polite = broker.connect(), broker.connect()
    for sequence in range(3_000):
        rude.send(encode_frame(Opcode.SEND, sequence, payload(b"r" * 16, sequence, 10_000)))
    assert broker.held.waiting == held_sends.HELD_FRAMES, "then it is not read"
    send(polite, Opcode.SEND, 0, payload(b"p" * 16, 0, 10_000))
    assert broker.held.bytes < 450_000, "the share of one connection, and one send"
    assert broker.assembly.sessions._shared.request_bytes == broker.held.bytes
    broker.engine.budget.bytes = 15_000
    hanging, broker.hanging = broker.hanging, None
    assert hanging is not None
    hanging.callback(None)
    broker.pass_time(0.01)
    assert [(one.correlation, one.status) for one in polite.replies()] == [(0, 0)]


def test_small_sends_are_bounded_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_sends, "HELD_FRAMES", 3)
    broker = Busy()
    client = broker.connect()
    for sequence in range(5):
        send(client, Opcode.SEND, sequence, payload(b"p" * 16, sequence))
    assert broker.held.waiting == 3, "the others are not begun"
    broker.catch_up()
    broker.pass_time(0.1)
    answers = [(one.correlation, one.status) for one in client.replies()]
    assert answers == [(number, 0) for number in range(5)], "in their order"


def test_each_connection_has_its_turn() -> None:
    broker = Busy()
    clients = [broker.connect() for _ in range(3)]
    for number, client in enumerate(clients):
        for sequence in range(2):
            send(client, Opcode.SEND, sequence, payload(bytes([number]) * 16, sequence))
    waiting = broker.held
    begun: list[object] = []
    sessions = [client.session for client in clients]
    for session in sessions:
        session.begin = lambda _frame, session=session: begun.append(session)  # type: ignore[attr-defined]
    broker.engine.budget.bytes = 64 << 20
    waiting.resume()
    assert begun == sessions * 2


def test_many_connections_of_one_host_are_no_more_than_one_of_another() -> None:
    broker = Busy()
    crowd = [broker.connect() for _ in range(60)]
    for number, client in enumerate(crowd):
        for sequence in range(10):
            data = payload(bytes([number]) * 16, sequence, 100_000)
            client.send(encode_frame(Opcode.SEND, sequence, data))
    assert broker.held.refused > 0, "the host has all that one may have"
    polite = broker.connect()
    polite.transport.peerAddr = IPv4Address("TCP", "10.0.0.9", 1)
    polite.session.__dict__.pop("owner", None)
    for sequence in range(10):
        data = payload(b"polite".ljust(16), sequence, 1_000_000)
        assert not send(polite, Opcode.SEND, sequence, data)
    assert broker.held.bytes <= held_sends.MOST_BYTES
    begun: list[object] = []
    for client in (*crowd, polite):
        session: Any = client.session
        session.begin = lambda _frame, session=session: begun.append(session)
    broker.engine.budget.bytes = 1 << 40
    broker.held.resume()
    assert [one is polite.session for one in begun[:16]] == [False, True] * 8
    assert len(set(begun[:16:2])) == 8, "each of the crowd in its turn, too"


def test_who_waits_as_the_disk_fills_up_is_refused_at_once() -> None:
    broker = Busy()
    client = broker.connect()
    for number in range(3):
        assert not send(client, Opcode.SEND, number, payload(bytes([number]) * 16, 0))
    broker.log._writer.read_only = True
    broker.log._writer.accepting = False
    broker.held.resume()
    names = [type(to_error(one.status, one.payload)).__name__ for one in client.replies()]
    assert names == ["ReadOnly"] * 3
    assert (broker.held.waiting, broker.held.bytes, broker.held.waiting_s) == (0, 0, 0.0)


def test_a_connection_that_is_lost_leaves_nothing_behind() -> None:
    broker = Busy()
    client = broker.connect()
    send(client, Opcode.SEND, 0, payload(b"p" * 16, 0, 5_000))
    client.session.connectionLost()  # type: ignore[attr-defined]
    assert (broker.held.waiting, broker.held.bytes, broker.held.waiting_s) == (0, 0, 0.0)
    broker.catch_up()


def test_a_full_disk_refuses_at_once_and_lets_nobody_wait() -> None:
    broker = Busy()
    broker.log._writer.read_only = True
    broker.log._writer.accepting = False
    [reply] = send(broker.connect(), Opcode.SEND, 0, payload(b"p" * 16, 0))
    assert type(to_error(reply.status, reply.payload)).__name__ == "ReadOnly"
