"""Doubts of a blocking client whether its broker still leads."""

from __future__ import annotations

import time
from contextlib import closing
from threading import Condition
from typing import cast

import pytest

from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.connections.leader_search import LeaderSearch
from txmq.client.blocking.consumer.thread import MemberThread
from txmq.client.protocol.consumer.member import Member
from txmq.client.protocol.consumer.requests import DOUBT_S, REPLY_S, Request
from txmq.client.protocol.consumer.settings import consumer_settings
from txmq.client.protocol.conversation import Conversation, LogIdentity
from txmq.errors import BrokerUnavailable, ConnectionLost


def test_a_connection_that_was_found_is_closed_where_nobody_takes_it() -> None:
    class Found:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    class Superseded:
        has_other_nodes = is_superseded = True

        def note_silence(self) -> None:
            pass

    found = Found()
    search = LeaderSearch(lambda _deadline: cast("Connection", found))
    with closing(search), pytest.raises(ConnectionLost):
        search.ask(cast("Conversation", Superseded()), 1.0)
    assert found.is_closed


@pytest.mark.parametrize("silent_s", [0.0, REPLY_S])
def test_other_nodes_are_asked_while_nothing_is_heard(silent_s: float) -> None:
    """A request may last where the broker answers others."""
    asked: list[float] = []

    def connect(deadline: float) -> Connection:
        asked.append(deadline)
        raise BrokerUnavailable("nobody leads")

    log = LogIdentity()
    log.learn(["a:1", "b:2"])
    member = Member(consumer_settings("billing", ["orders"]), "instance")
    thread = MemberThread(member, connect, Condition())
    with thread._wakes, thread._waker:
        now = time.monotonic()
        due = now + DOUBT_S - 1
        request = cast("Request", None)
        thread._check_overdue(Conversation(None, log), {1: (request, due)}, now - silent_s)
    assert bool(asked) is bool(silent_s)
