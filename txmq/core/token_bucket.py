"""A budget that refills at a steady rate. It has no clock: callers bring the time."""

from __future__ import annotations

LONGEST_WAIT_S = 5.0  # that is asked of anybody at a time


class TokenBucket:
    """Tokens that come at `rate` in a second, and collect to those of `burst_s`.

    Whoever comes while there are any gets all that are asked for, and those who come
    afterwards wait for the debt. So a large request is never refused for ever, and the
    mean is the rate.
    """

    __slots__ = ("_at", "_burst", "_tokens", "rate")

    def __init__(self, rate: float, now: float, burst_s: float = 1.0) -> None:
        self.rate = rate
        self._burst = self._tokens = rate * burst_s
        self._at = now

    def wait_s(self, now: float) -> float:
        """Return the seconds until there are tokens, 0.0 if there are some now."""
        if now > self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self.rate)
            self._at = now
        return 0.0 if self._tokens > 0 else -self._tokens / self.rate + 1 / self.rate

    def take(self, count: float) -> None:
        """Take tokens, also more than there are."""
        self._tokens -= count

    def change(self, rate: float, now: float, burst_s: float = 1.0) -> None:
        """Have another rate from now on. A debt stays; what has collected is cut."""
        self.wait_s(now)
        self.rate, self._burst = rate, rate * burst_s
        self._tokens = min(self._tokens, self._burst)

    @property
    def tokens(self) -> float:
        """The tokens at the time of the last question, less than 0 = a debt."""
        return self._tokens


class LimitBuckets:
    """The buckets of limits that can change, by name. A limit that is removed keeps its
    bucket: whoever sets it again finds its debt.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}

    def change(self, limit: str, rate: float, now: float) -> TokenBucket | None:
        """Return the bucket of a limit, which has this rate from now on; None = 0, no
        limit.
        """
        if not rate:
            return None
        bucket = self._buckets.get(limit)
        if bucket is None:
            bucket = self._buckets[limit] = TokenBucket(rate, now)
        else:
            bucket.change(rate, now)
        return bucket

    def has_debt(self, now: float) -> bool:
        """Return whether a limit, perhaps a removed one, still has a debt."""
        return any(bucket.wait_s(now) for bucket in self._buckets.values())
