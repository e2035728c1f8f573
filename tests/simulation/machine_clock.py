"""The clock of the broker's machine: set by days, forward and back, also while the
broker is down.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from txmq.model.units import DAY

if TYPE_CHECKING:
    from tests.simulation.world import SimulatedWorld

SHARE = 0.2  # of the seeds have such a machine
LONGEST_S = 0.25  # from one change to the next


class MachineClock:
    """Changes the clock while faults are injected, and sets it right afterwards. In
    half of its seeds an operator confirms it then.
    """

    def __init__(self, world: SimulatedWorld, seed: int) -> None:
        # from a generator of its own: seeds without it draw the same numbers
        self._world, self._rng = world, Random(seed + 0.25)
        self.is_set = self._rng.random() < SHARE
        self.confirms = self.is_set and self._rng.random() < 0.5

    def start(self) -> None:
        if self.is_set:
            self._world.clock.callLater(self._rng.uniform(0.0, LONGEST_S), self._change)

    def _change(self) -> None:
        world, rng = self._world, self._rng
        if not world.trouble:
            return
        days = rng.choice((-1, 1)) * rng.randrange(2 * DAY, 40 * DAY)
        world.clock.put_back = 0 if world.clock.put_back else days
        world.history.counts["clocks set by days"] += 1
        world.clock.callLater(rng.uniform(0.0, LONGEST_S), self._change)

    def end(self) -> None:
        """Set the clock right; an operator confirms it once the broker serves."""
        if self.is_set:
            self._world.clock.put_back = 0
        if self.confirms:
            self._world.clock.callLater(0.05, self._confirm)

    def _confirm(self) -> None:
        if self._world.broker is None:
            self._world.clock.callLater(0.05, self._confirm)
        else:
            self.confirms = False
            self._world.broker.confirm_clock()
            self._world.history.counts["clocks confirmed"] += 1
