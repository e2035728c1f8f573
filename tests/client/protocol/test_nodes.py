"""The addresses that a client tries: of nodes that it was told of, and of its URL."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from txmq.client.protocol.address import Address, parse_url
from txmq.client.protocol.conversation import SILENT_S, Conversation, LogIdentity
from txmq.client.protocol.identity import ProducerInstance
from txmq.errors import NotLeader, RemoteProtocolError
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import FrameDecoder, encode_frame
from txmq.wire.hello import BrokerLimits, Welcome
from txmq.wire.status import error_reply

LOG_ID = uuid4()  # whose boot epochs no other test has met
GIVEN = parse_url("txmq://a:1,b:2")
A, B, C = Address("a", 1), Address("b", 2), Address("c", 3)


def six() -> float:
    """Seconds that are left."""
    return 6.0


def test_nodes_come_before_the_addresses_of_the_url_each_once() -> None:
    log = LogIdentity()
    assert list(log.in_turn(GIVEN, six)) == [(A, 3), (B, 6)]
    log.learn(["c:3", "b:2"])
    assert list(log.in_turn(GIVEN, six)) == [(C, 2), (B, 3), (A, 6)]


def test_the_leader_that_a_node_names_is_the_next_one() -> None:
    log = LogIdentity()
    tried = []
    for address, _share in log.in_turn(GIVEN, six):
        tried.append(address)
        if address == A:
            log.learn(["c:3", "a:1", "b:2"])
    assert tried == [A, C, B]


def test_who_was_silent_comes_last_and_not_for_long_until_a_node_leads() -> None:
    log = LogIdentity()
    log.learn(["c:3", "a:1"])
    log.note_silence(C)
    assert list(log.in_turn(GIVEN, six)) == [(A, 2), (B, 3), (C, SILENT_S)]
    log.silent[C] -= 2
    assert 2 <= list(log.in_turn(GIVEN, six))[-1][1] < 3  # as long as it was silent
    log.silent[C] -= 100
    assert list(log.in_turn(GIVEN, six))[-1] == (C, 3)  # and time is left for the others
    log.take_news(welcome(1, "a:1", "c:3"))
    assert list(log.in_turn(GIVEN, six)) == [(A, 2), (C, 3), (B, 6)]


def test_a_single_address_that_was_silent_has_all_the_time() -> None:
    log = LogIdentity()
    log.note_silence(A)
    assert list(log.in_turn([A], six)) == [(A, 6)]


def welcome(epoch: int, *nodes: str, log_id: UUID = LOG_ID) -> Welcome:
    return Welcome(
        version=1, broker="n", log_id=log_id, boot_epoch=epoch,
        limits=BrokerLimits(frame=9_999, message=9_999), nodes=nodes,
    )  # fmt: skip


def correlations(requests: list[bytes]) -> list[int]:
    return [frame.correlation for frame in FrameDecoder().feed(b"".join(requests))]


def greeted(log: LogIdentity, epoch: int, *nodes: str) -> Conversation:
    """Return a conversation after its welcome."""
    conversation = Conversation(None, log)
    (correlation,) = correlations(conversation.hello())
    conversation.receive(encode_frame(Opcode.HELLO, correlation, welcome(epoch, *nodes).encode()))
    return conversation


def test_a_node_is_superseded_once_another_one_proves_that_it_leads() -> None:
    log = LogIdentity()
    first = greeted(log, 1, "a:1", "c:3")
    first.address = B  # another name of the same
    first.note_silence()
    assert log.silent.keys() == {A, B}
    assert not first.is_superseded
    second = greeted(log, 2, "c:3", "a:1")
    assert first.is_superseded
    assert not second.is_superseded
    assert not log.silent


def test_news_is_taken_with_the_welcome_and_until_the_instance_is_registered() -> None:
    log, instance = LogIdentity(), ProducerInstance("a-1")
    conversation, log_id = Conversation("orders", log, instance), uuid4()
    hello, register = correlations(conversation.hello())
    first, then, last = (welcome(1, at, log_id=log_id).encode() for at in ("a:1", "b:2", "c:3"))
    together = encode_frame(Opcode.HELLO, hello, first) + encode_frame(Opcode.HELLO, 0, then)
    assert conversation.receive(together) == []
    assert (log.nodes, conversation.welcome) == ((B,), None)
    conversation.receive(encode_frame(Opcode.HELLO, 0, last))
    assert conversation.receive(encode_frame(Opcode.CALL, register, b'{"epoch":7}')) == []
    assert (log.nodes, instance.epoch) == ((C,), 7)
    assert conversation.welcome is not None
    with pytest.raises(RemoteProtocolError):  # it is no news before the welcome
        Conversation(None, log).receive(encode_frame(Opcode.HELLO, 0, last))


@pytest.mark.parametrize("nodes", [[], [""], ["c:0", "c:port", "txmq://c", "c d:1"]])
def test_what_is_no_address_is_passed_over(nodes: list[str]) -> None:
    log = LogIdentity()
    log.learn(["[::1]:3"])
    log.learn(nodes)
    assert log.nodes == (Address("::1", 3),)


def test_a_refused_hello_names_nodes_and_requests_have_no_correlation_of_news() -> None:
    log = LogIdentity()
    conversation = Conversation(None, log)
    conversation.hello()
    status, payload = error_reply(NotLeader("no", detail={"nodes": ["c:3"]}))
    with pytest.raises(NotLeader):
        conversation.receive(encode_frame(Opcode.HELLO, 0, payload, status=status))
    assert log.nodes == (C,)
    conversation._last = (1 << 32) - 1
    assert conversation.request(Opcode.PING)[0] == 1


def test_news_before_the_welcome_are_a_breach_of_the_protocol() -> None:
    conversation = Conversation(None, LogIdentity())
    conversation.hello()
    with pytest.raises(RemoteProtocolError):
        conversation.receive(encode_frame(Opcode.HELLO, 0, b"{}"))
