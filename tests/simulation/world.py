"""Everything that the actors of one simulation share."""

from __future__ import annotations

from random import Random

from twisted.python.failure import Failure

from tests.simulation.clock import SimulatedClock
from tests.simulation.database import SimulatedDatabase
from tests.simulation.history import SimulationHistory
from tests.simulation.simulated_broker import EPOCH_US, SimulatedBroker
from tests.store.simfs import SimFS
from txmq.model.units import SECOND

PREPARED, COMMITTED, ROLLED_BACK = "prepared", "committed", "rolled back"


class SimulatedWorld:
    """The clock, the database, the broker with its disk, and the history of one seed.

    `trouble` is 1.0 while faults are injected, and 0.0 afterwards. `over` ends the
    actors that run for as long as the simulation does. `consumer_groups` are the groups
    that have members, with their topics. `remade` are the messages of the topic that
    was made again last.
    """

    def __init__(self, seed: int) -> None:
        self.rng, self.clock = Random(seed), SimulatedClock()
        self.history = SimulationHistory()
        self.database = SimulatedDatabase(self.clock, self.rng)
        # (consumer group, body) → how often its handler still fails
        self.failures: dict[tuple[str, str], int] = {}
        # token → state of the branch in another database, of XA transactions
        self.branches: dict[bytes, str] = {}
        self.disk = SimFS()
        self.broker: SimulatedBroker | None = None
        self.consumer_groups = {"c": "t", "o": "t"}
        self.remade: set[str] = set()
        self.failure: Failure | None = None
        self.over = False
        self.trouble = 1.0

    def failed(self, failure: Failure) -> None:
        """Note the failure that ends the simulation."""
        self.failure = self.failure or failure

    def now(self) -> int:
        return EPOCH_US + int(self.clock.seconds() * SECOND)
