"""A join that is made in many turns of the reactor."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import BrokerInMemory
from txmq.core.consumers.membership import STEP_POSITIONS
from txmq.core.events.consumers import PositionsBegun
from txmq.core.topics.topics import CreateTopic
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.json import parse

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


def _call(name: str, /, **args: object) -> bytes:
    return encode_frame(Opcode.CALL, 7, encode_call(name, args))
