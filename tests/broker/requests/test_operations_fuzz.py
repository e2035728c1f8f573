"""Whatever clients ask for at one moment: each request has one reply that fits in a
frame, and no exception is left to the guards.
"""

from __future__ import annotations

import time

import pytest

from tests.broker.requests.operations_fuzzer import OperationsFuzzer
from txmq.broker.delivery import fetch_service
from txmq.broker.requests import consumers

TURNS = 40
SOAK_S = 600.0


@pytest.mark.parametrize("seed", range(5))
def test_each_request_has_one_reply(seed: int) -> None:
    run = OperationsFuzzer(seed)
    assert run.run(TURNS) == ""
    assert run.replies > TURNS


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (fetch_service, "REPLY_BYTES", 1 << 40),
        (consumers, "MAX_BYTES", 1 << 40),
        (fetch_service, "chunk_size", lambda *_args: 1 // 0),
    ],
    ids=["fetches are not bounded", "reads are not bounded", "a reply raises"],
)
def test_planted_bugs_are_found(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, value: object
) -> None:
    monkeypatch.setattr(module, name, value)
    assert any(OperationsFuzzer(seed).run(TURNS) for seed in range(30))


@pytest.mark.soak
def test_each_request_has_one_reply_for_ten_minutes() -> None:
    until, seed = time.monotonic() + SOAK_S, 1_000
    while time.monotonic() < until:
        failure = OperationsFuzzer(seed).run(TURNS)
        assert not failure, f"seed {seed}: {failure}"
        seed += 1
