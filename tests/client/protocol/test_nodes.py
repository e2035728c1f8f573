"""The addresses that a client tries: of nodes that it was told of, and of its URL."""

from __future__ import annotations

import pytest

from txmq.client.protocol.address import Address, parse_url
from txmq.client.protocol.conversation import Conversation, LogIdentity
from txmq.errors import NotLeader, RemoteProtocolError
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.status import error_reply

GIVEN = parse_url("txmq://a:1,b:2")
A, B, C = Address("a", 1), Address("b", 2), Address("c", 3)


def test_nodes_come_before_the_addresses_of_the_url_each_once() -> None:
    log = LogIdentity()
    assert list(log.in_turn(GIVEN)) == [(A, 2), (B, 1)]
    log.learn(["c:3", "b:2"])
    assert list(log.in_turn(GIVEN)) == [(C, 3), (B, 2), (A, 1)]


def test_the_leader_that_a_node_names_is_the_next_one() -> None:
    log = LogIdentity()
    tried = []
    for address, _left in log.in_turn(GIVEN):
        tried.append(address)
        if address == A:
            log.learn(["c:3", "a:1", "b:2"])
    assert tried == [A, C, B]


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
