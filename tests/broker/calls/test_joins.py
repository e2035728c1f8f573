"""A join that is made in many turns of the reactor."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import BrokerInMemory
from txmq.core.consumers import membership
from txmq.core.consumers.membership import STEP_POSITIONS
from txmq.core.events.consumers import PositionsBegun
from txmq.core.state.consumer_groups import GroupSettings
from txmq.core.topics.topics import CreateTopic, DeleteTopic
from txmq.errors import UnknownTopic
from txmq.model.units import SECOND
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.json import parse
from txmq.wire.status import to_error

TOPICS, PARTITIONS = 200, 8


def test_others_are_answered_while_a_member_joins_with_very_many_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = BrokerInMemory()
    topics = [f"t{number}" for number in range(TOPICS)]
    for name in topics:
        broker.do(CreateTopic(name, PARTITIONS))
    joining, other = broker.connect(), broker.connect()
    seen, begun = list[str](), list[int]()
    write: Any = other.transport.write

    def step(event: PositionsBegun, _context: object) -> None:
        seen.append("begun")
        begun.append(len(event.starts))
        other.session.dataReceived(_call("topic.show", name="t1"))  # type: ignore[attr-defined]

    def answered(data: bytes) -> None:
        seen.append("answered")
        write(data)

    broker.engine.listen(PositionsBegun, step)
    monkeypatch.setattr(other.transport, "write", answered)
    joining.send(_call("consumer.join", group="g", topics=topics, member="m", instance="i"))
    [reply] = joining.replies()
    joined: Any = parse(reply.payload)
    assert len(joined["assignment"]) == TOPICS * PARTITIONS
    assert max(begun) < STEP_POSITIONS + PARTITIONS
    assert seen == ["begun", "answered"] * (TOPICS * PARTITIONS // STEP_POSITIONS)


def test_a_join_that_is_refused_midway_leaves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "STEP_POSITIONS", 2)
    broker = BrokerInMemory()
    for name in ("t", "u"):
        broker.do(CreateTopic(name, 2))
    joining = broker.connect()

    def delete(_event: PositionsBegun, _context: object) -> None:
        broker.clock.callLater(0, broker.engine.submit, DeleteTopic("u"), lambda _reply: None)

    broker.engine.listen(PositionsBegun, delete)
    args = {"group": "g", "topics": ["t", "u"], "instance": "i", "mode": "broadcast"}
    joining.send(_call("consumer.join", **args))
    [reply] = joining.replies()
    assert isinstance(to_error(reply.status, reply.payload), UnknownTopic)
    groups = broker.engine.state.groups.by_name
    assert len(groups) == 2
    broker.start()  # its timers
    for _ in range(GroupSettings().session_us // SECOND + 1):
        broker.pass_time(1)
    assert list(groups) == ["g"]


def _call(name: str, /, **args: object) -> bytes:
    return encode_frame(Opcode.CALL, 7, encode_call(name, args))
