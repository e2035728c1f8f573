"""What is to become of each dead letter, and in which order the ones worth it are
replayed.

    pending           an undecided transaction has it in hand: the next run will know
    applied           its effect is in the database: it failed after that, or its ack was lost
    no_business_row   what it speaks of was never committed, or is gone
    superseded        a newer version of its key has been applied
    poison            it would fail again
    replay_chain      safe, with others of its key before or behind it: only in their order
    replay_alone      safe

The first class that fits is the letter's. Nothing here waits, reads a clock or asks
anybody: the same letters in any order give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Final, NamedTuple


class Class(StrEnum):
    """What log and tables say of a letter; see above."""

    PENDING = "pending"
    APPLIED = "applied"
    NO_BUSINESS_ROW = "no_business_row"
    SUPERSEDED = "superseded"
    POISON = "poison"
    REPLAY_CHAIN = "replay_chain"
    REPLAY_ALONE = "replay_alone"


SAFE: Final = frozenset({Class.REPLAY_ALONE, Class.REPLAY_CHAIN})
# A letter of these that stays where it is still has an effect to come: later letters of
# its key would overtake it.
BLOCKING: Final = frozenset({Class.PENDING, Class.POISON})


class Token(StrEnum):
    """What the token table says of the transaction that sent a message."""

    NONE = "none"  # not sent by a transaction, or too old: its row may have been dropped since
    COMMITTED = "committed"
    ABSENT = "absent"
    FENCED = "fenced"


class Letter(NamedTuple):
    """A dead letter and the evidence about it. None = not asked, or no answer."""

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
    deaths: int = 0  # deliveries that ended without an answer: the consumer crashed
    replays: int = 0
    parked: int = 0  # later messages of its key that wait behind it
    busy: bool = False  # in the hands of an undecided transaction
    applied: bool | None = None
    later_applied: int | None = (
        None  # offset of a later message of its key whose effect is committed
    )
    token: Token = Token.NONE
    business_row: bool | None = None
    version: int | None = None  # of the key, as the message says
    current_version: int | None = None  # as the tables say
    readable: bool = True  # the version could be read from it, where one was to be


class Rules(NamedTuple):
    """When a letter counts as poison, and what the plan takes."""

    replays: int = 2  # after so many replays that ended here again
    deaths: int = 3  # after so many crashes of its consumer
    error_types: frozenset[str] = frozenset()  # always
    fingerprints: frozenset[str] = frozenset()
    include: frozenset[Class] = SAFE
    chunk: int = 1_000  # letters in a task, unless one key has more


class Planned(NamedTuple):
    """A letter, its class and why. `chunk` is the task that replays it, None = it is
    left as it is.
    """

    letter: Letter
    cls: Class
    reason: str
    chunk: int | None


Verdict = tuple[Class, str]


def plan(letters: Iterable[Letter], rules: Rules) -> list[Planned]:
    """Every letter with its class, chunk by chunk; what is left comes last. In a chunk
    stand whole keys, in order.
    """
    taken: list[list[Planned]] = []
    left: list[Planned] = []
    for chain in chains(letters):
        judged = list(_judge_chain(chain, rules))
        if replayed := [item for item in judged if item.chunk is not None]:
            taken.append(replayed)
        left += [item for item in judged if item.chunk is None]
    return [*_numbered(taken, rules.chunk), *left]


def chains(letters: Iterable[Letter]) -> list[list[Letter]]:
    """The letters of each key, in the order in which they were published; a letter
    without a key stands alone.

    After its topic has grown a key may be in two partitions: the one it was in first
    comes first.
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
    # Within a partition the offset alone counts: a transaction may be stored long
    # before it gets one.
    born: dict[int, int] = {}
    for letter in chain:
        born[letter.partition] = min(letter.stored_at, born.get(letter.partition, letter.stored_at))
    return sorted(
        chain, key=lambda letter: (born[letter.partition], letter.partition, letter.offset)
    )


def _judge_chain(chain: Sequence[Letter], rules: Rules) -> Iterator[Planned]:
    verdicts = [verdict(letter, rules) for letter in chain]
    several = sum(found is None for found in verdicts) > 1
    blocked = ""
    for letter, found in zip(chain, verdicts, strict=True):
        cls, reason = found or _safe(letter, several=several)
        if cls not in rules.include:
            yield Planned(letter, cls, reason, None)
            if cls in BLOCKING:
                blocked = (
                    blocked
                    or f"behind {letter.partition}/{letter.offset} of its key, which is {cls} and stays"
                )
        elif blocked:
            yield Planned(letter, cls, blocked, None)
        else:
            yield Planned(letter, cls, reason, 0)


def verdict(letter: Letter, rules: Rules) -> Verdict | None:
    """The letter's class and why, None where nothing speaks against a replay."""
    if letter.busy:
        return Class.PENDING, "an undecided transaction acks or replays it"
    if letter.applied:
        return Class.APPLIED, "its effect is committed"
    if letter.token is Token.FENCED:
        return Class.NO_BUSINESS_ROW, "its transaction was decided as rolled back"
    if letter.token is Token.ABSENT:
        return Class.NO_BUSINESS_ROW, "its transaction left no row in the database"
    if letter.business_row is False:
        return Class.NO_BUSINESS_ROW, "there is no row of its key"
    return _superseded(letter) or _poison(letter, rules)


def _superseded(letter: Letter) -> Verdict | None:
    if letter.later_applied is not None:
        return Class.SUPERSEDED, f"offset {letter.later_applied} of its key has been applied"
    if (
        letter.version is None
        or letter.current_version is None
        or letter.version >= letter.current_version
    ):
        return None
    return (
        Class.SUPERSEDED,
        f"it has version {letter.version}, the tables have {letter.current_version}",
    )


def _poison(letter: Letter, rules: Rules) -> Verdict | None:
    if not letter.readable:
        return Class.POISON, "its version cannot be read"
    if letter.deaths >= rules.deaths:
        return Class.POISON, f"its consumer died of it {letter.deaths} times"
    if letter.replays >= rules.replays:
        return Class.POISON, f"it was replayed {letter.replays} times and failed again"
    if letter.error_type in rules.error_types:
        return Class.POISON, f"errors of type {letter.error_type} do not heal"
    if letter.fingerprint in rules.fingerprints:
        return Class.POISON, f"failures like {letter.fingerprint} do not heal"
    return None


def _safe(letter: Letter, *, several: bool) -> Verdict:
    if several:
        return Class.REPLAY_CHAIN, "in order with the other letters of its key"
    if letter.parked:
        return Class.REPLAY_CHAIN, f"{letter.parked} messages of its key wait behind it"
    return Class.REPLAY_ALONE, "nothing speaks against it"


def _numbered(chains: Iterable[Sequence[Planned]], size: int) -> Iterator[Planned]:
    """Chains in chunks of `size` letters; a chain is never cut, so a long one makes a
    long chunk.
    """
    chunk, filled = 0, 0
    for chain in chains:
        if filled and filled + len(chain) > size:
            chunk, filled = chunk + 1, 0
        filled += len(chain)
        for item in chain:
            yield item._replace(chunk=chunk)
