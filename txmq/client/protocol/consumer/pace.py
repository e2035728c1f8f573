"""The rate at which a consumer hands out messages (`messages_per_s`)."""

from __future__ import annotations


class Pace:
    """At most `per_s` messages a second are handed out, evenly: one every 1/`per_s`
    seconds. A list or batch of n messages is followed by a pause of n times that.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s, self._free_at = per_s, 0.0

    def pause(self, now: float) -> float:
        """Return the seconds until the next message may be handed out."""
        return max(0.0, self._free_at - now)

    def room(self, most: int, now: float) -> int:
        """Return how many of `most` messages may be handed out now: at most those of a
        second.
        """
        return 0 if self._free_at > now else min(most, max(1, int(self._per_s)))

    def took(self, count: int, now: float) -> None:
        """Count messages that are handed out."""
        self._free_at = now + count / self._per_s
