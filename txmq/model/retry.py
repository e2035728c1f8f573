"""Failures of messages, and retry policies: delays, and the end of retries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from typing import NamedTuple, Self

from txmq.errors import ConfigError, LocalProtocolError
from txmq.model.durations import MICROSECOND, Duration, micros_of
from txmq.model.units import DAY

MAX_DELAY = 365 * DAY
MAX_RETRIES = 1_000_000
MAX_STEPS = 1_000
MAX_FACTOR = 1_000
MAX_CLASSES = 100
MAX_CLASS = 256  # characters of its name

# RocketMQ's table: 10 s, 30 s, 1 to 10 min, 20 min, 30 min, 1 h, 2 h.
DEFAULT_DELAYS = (10, 30, *range(60, 601, 60), 1_200, 1_800, 3_600, 7_200)  # seconds


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


@dataclass(frozen=True, slots=True, init=False)
class RetryPolicy:
    """A table of retry delays, one for each failure, in seconds or as timedeltas.

    The last delay repeats. `retries` is the number of redeliveries, by default one for
    each delay; after that the message is exhausted. So a message has `retries` + 1
    attempts, and with `retries=0` one. `jitter` spreads each delay by up to that
    fraction to either side, so that messages that failed together do not return
    together.

    `dead` and `postpone` name classes of errors, or their bases: "ValueError",
    "billing.errors.CardRefused", or all of a module as "billing.errors.*". An error in
    `dead` is never retried. An error in `postpone` is retried after the first delay
    without counting as an attempt. Raises ConfigError.
    """

    delays: tuple[timedelta, ...]
    retries: int
    jitter: float
    dead: tuple[str, ...]
    postpone: tuple[str, ...]

    def __init__(
        self,
        delays: Iterable[Duration] = DEFAULT_DELAYS,
        *,
        retries: int | None = None,
        jitter: float = 0.0,
        dead: Iterable[str] = (),
        postpone: Iterable[str] = (),
    ) -> None:
        listed = isinstance(delays, Iterable) and not isinstance(delays, str)
        _require("delays", listed, "give a list of delays, in seconds or as timedeltas")
        table = tuple(timedelta(microseconds=_micros("delays", delay)) for delay in delays)
        valid = 0 < len(table) <= MAX_STEPS
        _require("delays", valid, f"give 1 to {MAX_STEPS} delays; for no retry add retries=0")
        number = len(table) if retries is None else retries
        _require(
            "retries",
            type(number) is int and 0 <= number <= MAX_RETRIES,
            f"must be from 0 to {MAX_RETRIES}",
        )
        fraction = type(jitter) in (int, float) and 0 <= jitter <= 1
        _require("jitter", fraction, "must be a fraction from 0 to 1")
        values = (table, number, jitter, _classes("dead", dead), _classes("postpone", postpone))
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @classmethod
    def exponential(
        cls,
        *,
        initial: Duration = 5.0,
        factor: float = 2.0,
        longest: Duration = 7_200.0,
        retries: int = 16,
        jitter: float = 0.0,
        dead: Iterable[str] = (),
        postpone: Iterable[str] = (),
    ) -> Self:
        """Return a policy with delays that grow by `factor` up to `longest`."""
        _require("factor", 1 <= factor <= MAX_FACTOR, f"must be from 1 to {MAX_FACTOR}")
        delay, maximum = _micros("initial", initial), _micros("longest", longest)
        delays = [min(delay, maximum)]
        while len(delays) < min(retries, MAX_STEPS) and delays[-1] < maximum:
            delays.append(min(round(delays[-1] * factor), maximum))
        return cls.of_row(delays, retries, jitter, dead, postpone)

    @classmethod
    def of_row(
        cls,
        delays_us: Iterable[int],
        retries: int | None = None,
        jitter: float = 0.0,
        dead: Iterable[str] = (),
        postpone: Iterable[str] = (),
    ) -> Self:
        """Return the policy with these fields, delays in microseconds (`row`)."""
        delays = [timedelta(microseconds=delay) for delay in delays_us]
        return cls(delays, retries=retries, jitter=jitter, dead=dead, postpone=postpone)

    def delay(self, attempt: int, chance: float = 0.5) -> int | None:
        """Return the wait in microseconds after the failure of delivery `attempt`.

        Deliveries count from 1. None = exhausted. `chance` is a random number from 0 to
        1 that places the delay within its jitter.
        """
        if attempt > self.retries:
            return None
        delay = self.delays[min(attempt, len(self.delays)) - 1] // MICROSECOND
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
    def delays_us(self) -> tuple[int, ...]:
        """The delays in microseconds."""
        return tuple(delay // MICROSECOND for delay in self.delays)

    @property
    def row(self) -> tuple[tuple[int, ...], int, float, tuple[str, ...], tuple[str, ...]]:
        """The fields in their order, as the log stores them."""
        return self.delays_us, self.retries, self.jitter, self.dead, self.postpone

    def to_json(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "delays_us": list(self.delays_us),
            "retries": self.retries,
            "jitter": self.jitter,
        }
        return fields | {"dead": list(self.dead), "postpone": list(self.postpone)}


def _classes(field: str, names: Iterable[str]) -> tuple[str, ...]:
    _require(field, not isinstance(names, str), "must be a list of names")
    classes = tuple(names)
    valid = len(classes) <= MAX_CLASSES and all(
        isinstance(name, str) and 0 < len(name) <= MAX_CLASS for name in classes
    )
    _require(field, valid, f"give at most {MAX_CLASSES} names of error classes")
    return classes


def _matches(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith(".*") else name == pattern


def _require(field: str, condition: bool, rule: str) -> None:  # noqa: FBT001
    if not condition:
        raise ConfigError(f"retry.{field}", rule)


def _micros(field: str, delay: Duration) -> int:
    try:
        micros = micros_of(delay, field)
    except LocalProtocolError as error:
        raise ConfigError(f"retry.{field}", error.message, hint=error.hint) from None
    _require(field, micros <= MAX_DELAY, "must be at most a year")
    return micros
