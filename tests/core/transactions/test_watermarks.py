"""Watermarks: what a source sends again is stored once, and nothing is skipped."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.driver import Driver
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions import decisions, watermarks
from txmq.core.transactions.model import OUTCOME_RETENTION
from txmq.errors import BadRequest, SequenceGap
from txmq.model.bundle import BundleState
from txmq.model.decider import ByBroker, ByChecker, Decider
from txmq.model.message import Decision

LOCAL, CHECKER = ByBroker(), ByChecker("relay")


@pytest.fixture
def core() -> Driver:
    driver = Driver()
    driver.do(CreateTopic("t", 1))
    return driver


def store(core: Driver, number: int, before: int, to: int, decider: Decider = LOCAL) -> Any:
    """Store a bundle of one message that moves the watermark; return the reply."""
    return core.store(
        token(core, number),
        [("t", 0, None, str(to))],
        decider,
        actions=(("mark", "shop", before, to, 77),),
    )


def token(core: Driver, number: int) -> bytes:
    return (core.now // 1_000).to_bytes(6, "big") + number.to_bytes(10, "big")


def test_a_watermark_follows_what_was_stored(core: Driver) -> None:
    assert watermarks.get(core.state, "shop") == watermarks.UNSET
    assert store(core, 1, 0, 40).state is BundleState.PUBLISHED
    assert store(core, 2, 40, 50).state is BundleState.PUBLISHED
    assert watermarks.get(core.state, "shop") == (50, 77, token(core, 2))
    assert watermarks.get(core.replayed(), "shop") == (50, 77, token(core, 2))


def test_what_comes_again_under_another_token_is_stored_once(core: Driver) -> None:
    store(core, 1, 0, 40)
    assert store(core, 2, 0, 40).state is BundleState.PUBLISHED
    assert core.bodies("t") == ["40"]


def test_what_comes_again_after_its_token_was_forgotten_is_stored_once(core: Driver) -> None:
    store(core, 1, 0, 40)
    name = token(core, 1)
    core.now += 2 * OUTCOME_RETENTION
    again = core.store(name, [("t", 0, None, "40")], LOCAL, actions=(("mark", "shop", 0, 40, 77),))
    assert again.state is BundleState.PUBLISHED
    assert core.bodies("t") == ["40"]


def test_what_follows_a_refused_transaction_is_refused(core: Driver) -> None:
    store(core, 1, 0, 40)
    refused = store(core, 3, 50, 60)
    assert type(refused) is SequenceGap
    assert refused.detail == {"place": 40}
    assert core.bodies("t") == ["40"]


@pytest.mark.parametrize(
    "action", [("mark", "", 0, 1, 0), ("mark", "shop", 5, 5, 0), ("mark", "shop", -1, 5, 0)]
)
def test_a_watermark_that_does_not_move_forward_is_refused(
    core: Driver, action: tuple[object, ...]
) -> None:
    core.store(token(core, 1), [("t", 0, None, "x")], LOCAL, actions=(("mark", "shop", 0, 3, 0),))
    refused = core.store(token(core, 2), [("t", 0, None, "y")], LOCAL, actions=(action,))
    assert type(refused) is BadRequest


def test_a_bundle_decided_later_moves_the_watermark_with_its_decision(core: Driver) -> None:
    store(core, 1, 0, 40, CHECKER)
    assert watermarks.get(core.state, "shop").place == 0
    core.do(decisions.DecideTransaction(token(core, 1), Decision.COMMIT, "relay"))
    assert watermarks.get(core.state, "shop").place == 40


def test_a_bundle_rolled_back_leaves_the_watermark(core: Driver) -> None:
    store(core, 1, 0, 40, CHECKER)
    core.do(decisions.DecideTransaction(token(core, 1), Decision.ROLLBACK, "operator"))
    assert watermarks.get(core.state, "shop").place == 0


def test_a_late_decision_does_not_move_the_watermark_back(core: Driver) -> None:
    store(core, 1, 0, 40, CHECKER)
    store(core, 2, 0, 50)
    core.do(decisions.DecideTransaction(token(core, 1), Decision.COMMIT, "operator"))
    assert watermarks.get(core.state, "shop").place == 50
