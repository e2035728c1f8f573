"""Classes of dead letters, and the order in which letters are replayed.

    pending           an undecided transaction acks or replays the letter
    applied           the effect is in the database: the handler failed after it,
                      or its ack was lost
    no_business_row   the row that the message is about was never committed, or is gone
    superseded        a newer version of the key has been applied
    poison            the message would fail again
    replay_chain      safe, only in the order of the key's messages before and behind
    replay_alone      safe

A letter belongs to the first class that matches. These rules are pure: the same letters
in any order give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Final, NamedTuple


class LetterClass(StrEnum):
    """Classes of a letter by log and tables, explained above."""

    PENDING = "pending"
    APPLIED = "applied"
    NO_BUSINESS_ROW = "no_business_row"
    SUPERSEDED = "superseded"
    POISON = "poison"
    REPLAY_CHAIN = "replay_chain"
    REPLAY_ALONE = "replay_alone"


SAFE: Final = frozenset({LetterClass.REPLAY_ALONE, LetterClass.REPLAY_CHAIN})
# Letters of these classes that are not replayed may still take effect later. Later
# letters of their keys must not overtake them.
BLOCKING: Final = frozenset({LetterClass.PENDING, LetterClass.POISON})


class TokenEvidence(StrEnum):
    """The state of the transaction that sent a message, by the token table."""

    NONE = "none"  # no transaction sent it, or the row may have been dropped
    COMMITTED = "committed"
    ABSENT = "absent"
    FENCED = "fenced"


class Letter(NamedTuple):
    """A dead letter and its evidence.

    A field of the evidence is None where its table was not read or has no answer.
    """

    topic: str
    partition: int
    offset: int
    message_id: str
    key: str | None
    stored_at: int
    dead_at: int
    attempts: int
    error_type: str = ""
    error_text: str = ""
    fingerprint: str = ""
    deaths: int = 0  # deliveries during which the consumer was lost
    replays: int = 0
    parked: int = 0  # later messages of its key that wait behind it
    reserved: bool = False  # an undecided transaction acks or replays it
    applied: bool | None = None
    # offset of a later message of its key whose effect is committed
    later_applied: int | None = None
    token: TokenEvidence = TokenEvidence.NONE
    business_row: bool | None = None
    version: int | None = None  # of the key, in the message
    current_version: int | None = None  # in the tables
    readable: bool = True  # False where the version should be in it and is not


class PlanRules(NamedTuple):
    """The rules for poison letters, and the classes that a plan includes."""

    replays: int = 2  # poison after so many failed replays
    deaths: int = 3  # poison after so many losses of the consumer
    error_types: frozenset[str] = frozenset()  # errors that are always poison
    fingerprints: frozenset[str] = frozenset()
    include: frozenset[LetterClass] = SAFE
    chunk: int = 1_000  # letters of a task, unless one key has more


class PlannedLetter(NamedTuple):
    """A letter, its class, and the reason.

    `chunk` is the task that replays it, None where the plan leaves the letter.
    """

    letter: Letter
    cls: LetterClass
    reason: str
    chunk: int | None


Classification = tuple[LetterClass, str]


def make_plan(letters: Iterable[Letter], rules: PlanRules) -> list[PlannedLetter]:
    """Return all letters with their classes: chunk by chunk, then those that stay.

    A chunk contains whole keys, in order.
    """
    replayed_chains: list[list[PlannedLetter]] = []
    staying: list[PlannedLetter] = []
    for chain in key_chains(letters):
        judged = list(_classify_chain(chain, rules))
        if replayed := [item for item in judged if item.chunk is not None]:
            replayed_chains.append(replayed)
        staying += [item for item in judged if item.chunk is None]
    return [*_chunked(replayed_chains, rules.chunk), *staying]


def key_chains(letters: Iterable[Letter]) -> list[list[Letter]]:
    """Return the letters of each key in the order of publication.

    A letter without a key is a chain of its own. When a topic has grown, a key may be
    in two partitions; the partition that had it first comes first.
    """
    distinct = sorted(
        {(letter.topic, letter.partition, letter.offset): letter for letter in letters}.values(),
        key=_place,
    )
    keyed = sorted(
        (letter for letter in distinct if letter.key), key=lambda letter: (letter.topic, letter.key)
    )
    found = [
        _in_order(list(same))
        for _key, same in groupby(keyed, key=lambda letter: (letter.topic, letter.key))
    ]
    return sorted(
        [*found, *([letter] for letter in distinct if not letter.key)],
        key=lambda chain: _place(chain[0]),
    )


def _place(letter: Letter) -> tuple[str, int, int]:
    return letter.topic, letter.partition, letter.offset


def _in_order(chain: list[Letter]) -> list[Letter]:
    # Within a partition only offsets count: a transaction may be stored long before its
    # messages get offsets.
    born: dict[int, int] = {}
    for letter in chain:
        born[letter.partition] = min(letter.stored_at, born.get(letter.partition, letter.stored_at))
    return sorted(
        chain, key=lambda letter: (born[letter.partition], letter.partition, letter.offset)
    )


def _classify_chain(chain: Sequence[Letter], rules: PlanRules) -> Iterator[PlannedLetter]:
    verdicts = [classify(letter, rules) for letter in chain]
    several = sum(found is None for found in verdicts) > 1
    blocked = ""
    for letter, found in zip(chain, verdicts, strict=True):
        cls, reason = found or _safe(letter, several=several)
        if cls not in rules.include:
            yield PlannedLetter(letter, cls, reason, None)
            if cls in BLOCKING:
                blocked = (
                    blocked
                    or f"behind {letter.partition}/{letter.offset} of its key,"
                    f" which is {cls} and stays"
                )
        elif blocked:
            yield PlannedLetter(letter, cls, blocked, None)
        else:
            yield PlannedLetter(letter, cls, reason, 0)


def classify(letter: Letter, rules: PlanRules) -> Classification | None:
    """Return the class of the letter and the reason; None where it may be replayed."""
    if letter.reserved:
        return LetterClass.PENDING, "an undecided transaction acks or replays it"
    if letter.applied:
        return LetterClass.APPLIED, "its effect is committed"
    if letter.token is TokenEvidence.FENCED:
        return LetterClass.NO_BUSINESS_ROW, "its transaction was decided as rolled back"
    if letter.token is TokenEvidence.ABSENT:
        return LetterClass.NO_BUSINESS_ROW, "its transaction left no row in the database"
    if letter.business_row is False:
        return LetterClass.NO_BUSINESS_ROW, "there is no row of its key"
    return _superseded(letter) or _poison(letter, rules)


def _superseded(letter: Letter) -> Classification | None:
    if letter.later_applied is not None:
        return LetterClass.SUPERSEDED, f"offset {letter.later_applied} of its key has been applied"
    if (
        letter.version is None
        or letter.current_version is None
        or letter.version >= letter.current_version
    ):
        return None
    return (
        LetterClass.SUPERSEDED,
        f"it has version {letter.version}, the tables have {letter.current_version}",
    )


def _poison(letter: Letter, rules: PlanRules) -> Classification | None:
    if not letter.readable:
        return LetterClass.POISON, "its version cannot be read"
    if letter.deaths >= rules.deaths:
        return LetterClass.POISON, f"its consumer died of it {letter.deaths} times"
    if letter.replays >= rules.replays:
        return LetterClass.POISON, f"it was replayed {letter.replays} times and failed again"
    if letter.error_type in rules.error_types:
        return LetterClass.POISON, f"errors of type {letter.error_type} do not heal"
    if letter.fingerprint in rules.fingerprints:
        return LetterClass.POISON, f"failures like {letter.fingerprint} do not heal"
    return None


def _safe(letter: Letter, *, several: bool) -> Classification:
    if several:
        return LetterClass.REPLAY_CHAIN, "in order with the other letters of its key"
    if letter.parked:
        return LetterClass.REPLAY_CHAIN, f"{letter.parked} messages of its key wait behind it"
    return LetterClass.REPLAY_ALONE, "nothing speaks against it"


def _chunked(chains: Iterable[Sequence[PlannedLetter]], size: int) -> Iterator[PlannedLetter]:
    """Assign chains to chunks of `size` letters.

    A chain is never cut, so a long chain makes a long chunk.
    """
    chunk, filled = 0, 0
    for chain in chains:
        if filled and filled + len(chain) > size:
            chunk, filled = chunk + 1, 0
        filled += len(chain)
        for item in chain:
            yield item._replace(chunk=chunk)
