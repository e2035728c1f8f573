"""Whatever clients ask for at one moment: each request has one reply that fits in a
frame, and no exception is left to the guards.
"""

from __future__ import annotations

import time

import pytest

from tests.broker.requests.operations_fuzzer import OperationsFuzzer
from txmq.broker.calls import topics
from txmq.broker.delivery import fetch_service
from txmq.broker.engine import turn_work
from txmq.broker.requests import consumers
from txmq.core.consumers import letter_stats, progress

TURNS = 40
SOAK_S = 600.0


@pytest.mark.parametrize("seed", range(5))
def test_each_request_has_one_reply(seed: int) -> None:
    run = OperationsFuzzer(seed)
    assert run.run(TURNS) == ""
    assert run.replies > TURNS


@pytest.mark.parametrize("seed", range(3))
def test_each_request_has_one_reply_where_each_step_is_a_turn(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Topics and groups are deleted, made and grown between the steps of long reads."""
    for name in ("TURN_S", "STEP_S"):
        monkeypatch.setattr(turn_work, name, 0.0)
    monkeypatch.setattr(topics, "ENDS_PER_STEP", 1)
    monkeypatch.setattr(progress, "PARTITIONS_PER_STEP", 1)
    monkeypatch.setattr(letter_stats, "CELLS_PER_STEP", 1)
    run = OperationsFuzzer(seed)
    assert run.run(TURNS) == ""
    assert run.replies > TURNS


@pytest.mark.parametrize(
    ("module", "name", "value", "first"),
    [  # `first`: a seed that has the scene, which few have
        (fetch_service, "REPLY_BYTES", 1 << 40, 7),
        (consumers, "MAX_BYTES", 1 << 40, 17),
        (fetch_service, "chunk_size", lambda *_args: 1 // 0, 0),
    ],
    ids=["fetches are not bounded", "reads are not bounded", "a reply raises"],
)
def test_planted_bugs_are_found(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, value: object, first: int
) -> None:
    monkeypatch.setattr(module, name, value)
    assert any(OperationsFuzzer(seed).run(TURNS) for seed in range(first, first + 30))


@pytest.mark.soak
def test_each_request_has_one_reply_for_ten_minutes() -> None:
    until, seed = time.monotonic() + SOAK_S, 1_000
    while time.monotonic() < until:
        failure = OperationsFuzzer(seed).run(TURNS)
        assert not failure, f"seed {seed}: {failure}"
        seed += 1
