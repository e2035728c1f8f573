"""Frames that are nearly right: each has one answer or ends its connection."""

from __future__ import annotations

import pytest

from tests.broker.requests.frame_fuzzer import FRAMES, LIFE, FrameFuzzer
from txmq.broker.reactor.protocol import ClientSession
from txmq.errors import TxmqError
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame

PARTS = 10


@pytest.mark.parametrize("seed", range(2))
def test_each_frame_is_answered_or_ends_its_connection(seed: int) -> None:
    run = FrameFuzzer(seed)
    assert run.run(3_000) == ""
    assert run.seen["connections"] > 10, "nothing was broken"
    assert run.seen["answers"] - run.seen["refusals"] > 300, "all was broken"


def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = ClientSession.refuse

    def forgets(session: ClientSession, frame: Frame, error: TxmqError) -> None:
        if frame.opcode != Opcode.ACK:
            refuse(session, frame, error)

    monkeypatch.setattr(ClientSession, "refuse", forgets)
    assert "answers, and no end" in FrameFuzzer(1).run(3_000)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_ten_million_frames(part: int) -> None:
    brokers = FRAMES // LIFE // PARTS
    for seed in range(part * brokers, (part + 1) * brokers):
        assert FrameFuzzer(seed).run(LIFE) == "", f"seed {seed}"
