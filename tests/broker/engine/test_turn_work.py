"""Long reads of the console's users, which take turns."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.broker.access.support import BrokerWithUsers
from txmq.broker.engine import turn_work
from txmq.core.topics.topics import CreateTopic


def test_a_user_with_many_long_reads_delays_those_of_another_user_by_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turn_work, "STEP_S", -1.0)  # one step of one reader in a turn
    monkeypatch.setattr(turn_work, "TURN_S", -1.0)
    broker = BrokerWithUsers()
    for number in range(20):
        broker.do(CreateTopic(f"t{number}", 1))
    answered: list[str] = []

    def read(user: str) -> None:
        rights = broker.assembly.guard.rights_of(user)
        told: Any = partial(_note, answered, user)
        broker.assembly.calls.ask("topic.list", {}, told, rights)

    for user in (*["ops"] * 10, "checks"):
        read(user)
    for _turn in range(1_000):
        if len(answered) == 11:
            break
        broker.pass_time(0)
    assert sorted(answered) == ["checks", *["ops"] * 10]
    assert answered.index("checks") <= 1


def _note(answered: list[str], user: str, reply: dict[str, Any]) -> None:
    assert len(reply["topics"]) == 20
    answered.append(user)
