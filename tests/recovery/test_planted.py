"""The audit is worth something: each planted bug of a recoverer breaks the scenario
that is made for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.recovery.scenarios import BUGS, SCENARIOS
from tests.recovery.world import Broken, World


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_recoverer_without_a_bug_passes(world: World, name: str) -> None:
    SCENARIOS[name](world)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(
    world: World, bug: Callable[[], AbstractContextManager[None]]
) -> None:
    with bug(), pytest.raises(Broken):
        SCENARIOS[BUGS[bug]](world)
