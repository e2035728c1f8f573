"""When what was answered before it was on disk has to be there: by the strictest of the
policies that were used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txmq.config.storage import FlushEvery

NEVER = float("inf")


class Pace:
    """Counts what is written and not synced. `policy` is the broker's own, None =
    everything waits for the disk.
    """

    def __init__(self, policy: FlushEvery | None) -> None:
        self.policy = policy
        self._messages, self._most, self._every_ms = 0, NEVER, NEVER
        self.synced()

    def add(self, policy: FlushEvery, messages: int = 1) -> None:
        """Messages were taken whose sender does not wait for the disk."""
        self._messages += messages
        self._most = min(self._most, policy.messages)
        self._every_ms = min(self._every_ms, policy.every_ms)

    def synced(self) -> None:
        """A sync begins that will take all there is."""
        self._messages, self._most = 0, NEVER
        self._every_ms = NEVER if self.policy is None else self.policy.every_ms

    @property
    def is_due(self) -> bool:
        """Whether there are too many for some policy."""
        return self._messages >= self._most

    @property
    def after_s(self) -> float:
        """How long the oldest may wait."""
        return self._every_ms / 1_000
