"""Expiry of transaction outcomes and producer instances that are no longer needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.retention.outcome_expiry import ExpireOutcomes
from txmq.core.transactions.instances import instance_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock, Timer

STEP_S = 0.05


class OutcomeExpiryService:
    """Makes one round at a time, in steps. All methods belong to the reactor's thread.

    `connected_instances` gives the producer instances (service, name) whose fences are
    in use.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        connected_instances: Callable[[], Iterable[tuple[str, str]]],
    ) -> None:
        self._engine, self._clock = engine, clock
        self._connected_instances = connected_instances
        self._timer: Timer | None = None  # of the next step of a round

    def tick(self) -> None:
        """Timer: begin a round, unless one is under way."""
        if self._timer is None:
            connected = frozenset(instance_key(*one) for one in self._connected_instances())
            self._step(ExpireOutcomes(connected=connected))

    def stop(self) -> None:
        """Make no further step."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self, command: ExpireOutcomes) -> None:
        self._timer = None
        self._engine.submit(command, self._stepped)

    def _stepped(self, following: object) -> None:
        if isinstance(following, ExpireOutcomes) and self._timer is None:
            self._timer = self._clock.callLater(STEP_S, self._step, following)
