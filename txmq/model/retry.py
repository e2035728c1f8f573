"""Failures of messages, and retry policies: delays, and the end of retries."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Self

from txmq.errors import ConfigError
from txmq.model.units import DAY, SECOND

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_DELAY = 365 * DAY
MAX_ATTEMPTS = 1_000_000
MAX_STEPS = 1_000
MAX_FACTOR = 1_000
MAX_CLASSES = 100
MAX_CLASS = 256  # characters of its name

# RocketMQ's table: 10 s, 30 s, 1 to 10 min, 20 min, 30 min, 1 h, 2 h.
DEFAULT_DELAYS = tuple(
    s * SECOND for s in (10, 30, *range(60, 601, 60), 1_200, 1_800, 3_600, 7_200)
)


class FailureReport(NamedTuple):
    """`type` and `text` of the error of a failed message, as the consumer reports it.

    Messages that fail in the same way have the same `fingerprint`. `bases` are the
    names of the base classes, the nearest first: a retry policy may refer to them.
    """

    type: str = ""
    text: str = ""
    fingerprint: str = ""
    bases: tuple[str, ...] = ()


class FailureAction(StrEnum):
    """Treatment of a failed message."""

    RETRY = "retry"
    DEAD = "dead"
    POSTPONE = "postpone"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A table of retry delays in microseconds, one for each failure.

    The last delay repeats. `attempts` is the number of retries, by default one for each
    delay; after that the message is exhausted. `jitter` spreads each delay by up to
    that fraction to either side, so that messages that failed together do not return
    together.

    `dead` and `postpone` name classes of errors, or their bases: "ValueError",
    "billing.errors.CardRefused", or all of a module as "billing.errors.*". An error in
    `dead` is never retried. An error in `postpone` is retried after the first delay
    without counting as an attempt. Raises ConfigError.
    """

    delays: tuple[int, ...] = DEFAULT_DELAYS
    attempts: int | None = None
    jitter: float = 0.0
    dead: tuple[str, ...] = ()
    postpone: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require("delays", 0 < len(self.delays) <= MAX_STEPS, f"give 1 to {MAX_STEPS} delays")
        in_range = all(type(delay) is int and 0 <= delay <= MAX_DELAY for delay in self.delays)
        _require("delays", in_range, "each must be an int of microseconds, from 0 to a year")
        retries = self.retries
        _require(
            "attempts",
            type(retries) is int and 0 <= retries <= MAX_ATTEMPTS,
            f"must be from 0 to {MAX_ATTEMPTS}",
        )
        fraction = type(self.jitter) in (int, float) and 0 <= self.jitter <= 1
        _require("jitter", fraction, "must be a fraction from 0 to 1")
        for field, names in (("dead", self.dead), ("postpone", self.postpone)):
            _require(
                field,
                _are_classes(names),
                f"give at most {MAX_CLASSES} names of error classes",
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
        """Return the policy with these delays, in seconds."""
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
        """Return a policy with delays that grow by `factor` up to `max_s`."""
        _require("factor", 1 <= factor <= MAX_FACTOR, f"must be from 1 to {MAX_FACTOR}")
        delay, maximum = _micros("initial_s", initial_s), _micros("max_s", max_s)
        delays = [min(delay, maximum)]
        while len(delays) < min(attempts, MAX_STEPS) and delays[-1] < maximum:
            delays.append(min(round(delays[-1] * factor), maximum))
        return cls(
            tuple(delays), attempts, jitter, _names("dead", dead), _names("postpone", postpone)
        )

    @property
    def retries(self) -> int:
        """Number of redeliveries before a message is exhausted."""
        return len(self.delays) if self.attempts is None else self.attempts

    def delay(self, attempt: int, chance: float = 0.5) -> int | None:
        """Return the wait in microseconds after the failure of delivery `attempt`.

        Deliveries count from 1. None = exhausted. `chance` is a random number from 0 to
        1 that places the delay within its jitter.
        """
        if attempt > self.retries:
            return None
        delay = self.delays[min(attempt, len(self.delays)) - 1]
        return round(delay * (1 + self.jitter * (2 * chance - 1)))

    def action(self, classes: Iterable[str]) -> FailureAction:
        """Return the treatment of an error, given its class and its bases."""
        for name in classes:
            for patterns, action in (
                (self.dead, FailureAction.DEAD),
                (self.postpone, FailureAction.POSTPONE),
            ):
                if any(_matches(pattern, name) for pattern in patterns):
                    return action
        return FailureAction.RETRY

    @property
    def row(self) -> tuple[tuple[int, ...], int | None, float, tuple[str, ...], tuple[str, ...]]:
        """The fields in their order, as the log stores them."""
        return self.delays, self.attempts, self.jitter, self.dead, self.postpone

    def to_json(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "delays": list(self.delays),
            "attempts": self.attempts,
            "jitter": self.jitter,
        }
        return fields | {"dead": list(self.dead), "postpone": list(self.postpone)}


def _names(field: str, names: Iterable[str]) -> tuple[str, ...]:
    _require(field, not isinstance(names, str), "must be a list of names")
    return tuple(names)


def _are_classes(names: tuple[str, ...]) -> bool:
    return len(names) <= MAX_CLASSES and all(
        isinstance(name, str) and 0 < len(name) <= MAX_CLASS for name in names
    )


def _matches(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith(".*") else name == pattern


def _require(field: str, condition: bool, rule: str) -> None:  # noqa: FBT001
    if not condition:
        raise ConfigError(f"retry.{field}", rule)


def _micros(field: str, seconds: float) -> int:
    _require(field, 0 <= seconds <= MAX_DELAY / SECOND, "must be seconds, from 0 to a year")
    return round(seconds * SECOND)
