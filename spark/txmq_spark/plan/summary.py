"""Summary of a reconciliation for a person, which is small for any number of letters.

`many_letters` and `few_letters` count it where the letters are: in executors, or in the
driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from txmq.model.units import DAY, HOUR
from txmq_spark.plan.rules import LetterClass

AGES: Final = ((HOUR, "under an hour"), (DAY, "under a day"), (7 * DAY, "under a week"))
OLDER: Final = "a week or more"
TOP_FAILURES: Final = 12  # the others are summed up
TOP_KEYS: Final = 100
LISTED_LETTERS: Final = 20  # of each class
LISTED_MISSING: Final = 100


class Failure(NamedTuple):
    """Letters that failed alike, and one of their errors."""

    error_type: str
    fingerprint: str
    error: str
    letters: int


class KeyCount(NamedTuple):
    """Letters of a key."""

    group: str
    topic: str
    key: str
    letters: int
    replayed: int
    oldest: int  # death, in microseconds


class Concentration(NamedTuple):
    """Spread of letters over keys: `top` has the keys with most letters."""

    keys: int
    letters: int  # with a key
    top: tuple[KeyCount, ...]

    def share(self, keys: int) -> float:
        """Return the share of letters that the first keys of `top` have."""
        return sum(one.letters for one in self.top[:keys]) / self.letters if self.letters else 0.0


class MissingMessage(NamedTuple):
    """A row or transaction without a message, or messages without a row.

    `what` is "transaction" or "key" for a row whose message is not in the log, and
    "row" for a key of messages that has none. `state` is "missing"; "pending" where the
    message is stored and undecided, or waits behind an earlier message of its key;
    "rolled back" where the broker decided against the committed row; "forgotten" where
    the transaction is too old for the broker to know whether its messages went to other
    topics; "removed?" where retention has removed messages that may have had the key.
    """

    what: str
    table: str | None
    name: str
    state: str
    at: int | None  # microseconds; None where the table has no time


class PlanSummary(NamedTuple):
    """Counts, and the first letters of each class. `now` is the time of ages."""

    now: int
    classes: dict[tuple[str, str], int]  # by group and class
    replayed: dict[tuple[str, str], int]
    ages: dict[tuple[str, str], int]  # by class and age
    failures: tuple[Failure, ...]
    other_failures: tuple[int, int]  # kinds, letters
    keys: Concentration
    samples: tuple[dict[str, Any], ...]
    missing: dict[tuple[str, str], int]  # by what and state
    missing_samples: tuple[MissingMessage, ...]

    @property
    def letters(self) -> int:
        """Number of letters."""
        return sum(self.classes.values())

    def of_class(self, cls: LetterClass) -> int:
        """Return the number of letters of a class."""
        return sum(count for (_group, one), count in self.classes.items() if one == cls)


MissingSummary = tuple[dict[tuple[str, str], int], tuple[MissingMessage, ...]]


class LetterCount(NamedTuple):
    """The number of letters of a kind."""

    group: str
    cls: str
    replay: bool
    age: str
    letters: int


def summary_of(
    counts: Iterable[LetterCount],
    failures: tuple[tuple[Failure, ...], tuple[int, int]],
    keys: Concentration,
    samples: tuple[dict[str, Any], ...],
    missing: MissingSummary,
    now: int,
) -> PlanSummary:
    """Return the summary that has these parts."""
    classes, replayed, ages = Counter[Any](), Counter[Any](), Counter[Any]()
    for one in counts:
        classes[one.group, one.cls] += one.letters
        replayed[one.group, one.cls] += one.letters * one.replay
        ages[one.cls, one.age] += one.letters
    return PlanSummary(
        now,
        dict(sorted(classes.items())),
        dict(sorted(replayed.items())),
        dict(sorted(ages.items())),
        *failures,
        keys,
        samples,
        *missing,
    )


def age_of(micros: int) -> str:
    """Return the words for an age."""
    return next((words for limit, words in AGES if micros < limit), OLDER)
