"""Ports of the broker's reactor."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

from twisted.internet.protocol import Factory, Protocol

from txmq.broker.reactor.epoll_reactor import ACCEPTS, TurnReactor
from txmq.testing.wait import PATIENCE_S


def test_a_port_accepts_few_connections_a_turn_however_many_wait() -> None:
    reactor: Any = TurnReactor()
    factory: Any = Factory.forProtocol(Protocol)
    accepted: list[object] = []
    factory.buildProtocol = accepted.append  # None: it is closed
    port = reactor.listenTCP(0, factory, backlog=100, interface="127.0.0.1")
    with ExitStack() as clients:
        clients.callback(port.socket.close)
        for _ in range(5 * ACCEPTS):
            clients.enter_context(socket.create_connection(port.socket.getsockname(), PATIENCE_S))
        turns: list[int] = []
        while len(accepted) < 5 * ACCEPTS and len(turns) < 10:
            before = len(accepted)
            port.doRead()
            turns.append(len(accepted) - before)
        assert turns == [ACCEPTS] * 5
