"""How long a failed message waits before it is delivered again, and when that ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from txmq.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

SECOND = 1_000_000
MAX_DELAY = 365 * 24 * 3600 * SECOND
MAX_ATTEMPTS = 1_000_000
MAX_STEPS = 1_000
MAX_FACTOR = 1_000
MAX_CLASSES = 100
MAX_CLASS = 256  # characters of its name

# The table that RocketMQ's users know: 10 s, 30 s, 1 to 10 min, 20 min, 30 min, 1 h, 2
# h.
DEFAULT_DELAYS = tuple(
    s * SECOND for s in (10, 30, *range(60, 601, 60), 1_200, 1_800, 3_600, 7_200)
)


class Action(StrEnum):
    """What becomes of a message that failed."""

    RETRY = "retry"
    DEAD = "dead"
    POSTPONE = "postpone"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A table of delays in microseconds: the first after the first failure, and so on;
    the last one repeats.

    `attempts` is the number of retries, by default one for each delay; then the message
    is exhausted. `jitter` spreads each delay by up to that fraction of it to either
    side, so that what failed together does not come back together. `dead` and
    `postpone` name classes of errors, their own names or those of a base, as
    "ValueError" or "billing.errors.CardRefused", or with "billing.errors.*" all of a
    module: the first kind is not tried again, the second comes again after the first
    delay without being counted. Raises ConfigError.
    """

    delays: tuple[int, ...] = DEFAULT_DELAYS
    attempts: int | None = None
    jitter: float = 0.0
    dead: tuple[str, ...] = ()
    postpone: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(
            "delays", 0 < len(self.delays) <= MAX_STEPS, f"1 to {MAX_STEPS} of them are needed"
        )
        in_range = all(type(delay) is int and 0 <= delay <= MAX_DELAY for delay in self.delays)
        _require("delays", in_range, "each is an int of microseconds, from 0 to a year")
        retries = self.retries
        _require(
            "attempts",
            type(retries) is int and 0 <= retries <= MAX_ATTEMPTS,
            f"0 to {MAX_ATTEMPTS} are possible",
        )
        fraction = type(self.jitter) in (int, float) and 0 <= self.jitter <= 1
        _require("jitter", fraction, "a fraction from 0 to 1 is needed")
        for field, names in (("dead", self.dead), ("postpone", self.postpone)):
            _require(
                field,
                _are_classes(names),
                f"at most {MAX_CLASSES} names of classes of errors are needed",
            )

    @classmethod
    def table(
        cls,
        *seconds: float,
        attempts: int | None = None,
        jitter: float = 0.0,
        dead: Iterable[str] = (),
        postpone: Iterable[str] = (),
    ) -> Self:
        """The policy with these delays, in seconds."""
        delays = tuple(_micros("delays", delay) for delay in seconds)
        return cls(delays, attempts, jitter, _names("dead", dead), _names("postpone", postpone))

    @classmethod
    def exponential(
        cls,
        *,
        initial_s: float = 5.0,
        factor: float = 2.0,
        max_s: float = 7_200.0,
        attempts: int = 16,
        jitter: float = 0.0,
        dead: Iterable[str] = (),
        postpone: Iterable[str] = (),
    ) -> Self:
        """Delays that grow by `factor` from `initial_s` to at most `max_s`."""
        _require("factor", 1 <= factor <= MAX_FACTOR, f"1 to {MAX_FACTOR} is possible")
        delay, most = _micros("initial_s", initial_s), _micros("max_s", max_s)
        delays = [min(delay, most)]
        while len(delays) < min(attempts, MAX_STEPS) and delays[-1] < most:
            delays.append(min(round(delays[-1] * factor), most))
        return cls(
            tuple(delays), attempts, jitter, _names("dead", dead), _names("postpone", postpone)
        )

    @property
    def retries(self) -> int:
        """How many times a message is delivered again before it is exhausted."""
        return len(self.delays) if self.attempts is None else self.attempts

    def delay(self, attempt: int, chance: float = 0.5) -> int | None:
        """Microseconds to wait after the failure of delivery `attempt` (1 = the first);
        None = exhausted.

        `chance` is a random number from 0 to 1; it places the delay within its jitter.
        """
        if attempt > self.retries:
            return None
        delay = self.delays[min(attempt, len(self.delays)) - 1]
        return round(delay * (1 + self.jitter * (2 * chance - 1)))

    def action(self, classes: Iterable[str]) -> Action:
        """What becomes of a message whose error is of these classes: its own, and its
        bases.
        """
        for name in classes:
            for wanted, action in ((self.dead, Action.DEAD), (self.postpone, Action.POSTPONE)):
                if any(_matches(pattern, name) for pattern in wanted):
                    return action
        return Action.RETRY

    @property
    def row(self) -> tuple[tuple[int, ...], int | None, float, tuple[str, ...], tuple[str, ...]]:
        """The fields in their order."""
        return self.delays, self.attempts, self.jitter, self.dead, self.postpone

    def to_json(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "delays": list(self.delays),
            "attempts": self.attempts,
            "jitter": self.jitter,
        }
        return fields | {"dead": list(self.dead), "postpone": list(self.postpone)}


def _names(field: str, names: Iterable[str]) -> tuple[str, ...]:
    _require(field, not isinstance(names, str), "a list of names is needed")
    return tuple(names)


def _are_classes(names: tuple[str, ...]) -> bool:
    return len(names) <= MAX_CLASSES and all(
        isinstance(name, str) and 0 < len(name) <= MAX_CLASS for name in names
    )


def _matches(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith(".*") else name == pattern


def _require(field: str, condition: bool, rule: str) -> None:
    if not condition:
        raise ConfigError(f"retry.{field}", rule)


def _micros(field: str, seconds: float) -> int:
    _require(field, 0 <= seconds <= MAX_DELAY / SECOND, "seconds from 0 to a year")
    return round(seconds * SECOND)
