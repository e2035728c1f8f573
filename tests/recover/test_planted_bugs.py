"""Planted bugs of a recoverer break the scenarios that are made for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.recover.scenarios import BUGS, SCENARIOS
from tests.recover.world import RecoveryWorld, SilentDisagreement


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_recoverer_without_a_bug_passes(world: RecoveryWorld, name: str) -> None:
    SCENARIOS[name](world)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(
    world: RecoveryWorld, bug: Callable[[], AbstractContextManager[None]]
) -> None:
    with bug(), pytest.raises(SilentDisagreement):
        SCENARIOS[BUGS[bug]](world)
