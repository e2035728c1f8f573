"""Statistics of dead letters: numbers by fingerprint, error type, topic and age.

A selection of topics, errors and states is counted in cells (`state/letter_cells.py`),
which does not read the letters. Any other selection is counted by a scan, and the reply
says if the scan came to its end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import letter_notes
from txmq.core.consumers.letter_selection import FoundLetter, LetterScan, LetterSelection
from txmq.core.state import failed_rows, letter_cells, letter_index
from txmq.core.state.letter_cells import DAY_SLOTS, SLOT, Cell, CellsOfError, LetterState
from txmq.core.state.letter_index import PLACE, PREFIX, Dimension
from txmq.model.units import DAY, HOUR
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.state import State
    from txmq.core.steps import Steps

CELLS_PER_STEP = 64
CELLS_READ = 16  # for an alarm, each second: of one group
KEYS_PER_STEP = 512
MAX_KINDS = 1_000  # of fingerprints, error types and topics that a reply names
MAX_FINGERPRINTS = 100  # that a reply describes
MAX_KINDS_KEPT = 20_000  # while they are counted
MAX_KEYS = 10  # that a reply names, those of most letters
MAX_KEYS_COUNTED = 100_000  # letters, from the lowest hash of a key on
MAX_LETTERS_SCANNED = 100_000
AGES = {"1h": HOUR, "1d": DAY, "7d": 7 * DAY, "30d": 30 * DAY}
AGE_NAMES = (*AGES, "older")

Keep = Callable[[FoundLetter], bool]


class Error(NamedTuple):
    """Error by which letters are grouped."""

    fingerprint: str
    error_type: str


class _Sum:
    """Letters that have something in common. `ages` has their number by age."""

    __slots__ = ("ages", "first", "last", "letters", "replayed")

    def __init__(self) -> None:
        self.letters = self.replayed = self.last = 0
        self.first: int | None = None
        self.ages = [0] * len(AGE_NAMES)

    def add(self, other: _Sum) -> None:
        self.letters += other.letters
        self.replayed += other.replayed
        if other.first is not None:
            self.first = other.first if self.first is None else min(self.first, other.first)
        self.last = max(self.last, other.last)
        for age, letters in enumerate(other.ages):
            self.ages[age] += letters

    def by_age(self) -> dict[str, int]:
        return dict(zip(AGE_NAMES, self.ages, strict=True))


class LetterCounts:
    """Sums of cells. Fingerprints beyond the first 20,000 are counted together."""

    def __init__(self, now: int) -> None:
        # slots of the oldest letters of each age, the oldest age first
        self._since = [letter_cells.slot_at(now - age) for age in reversed(AGES.values())]
        self._errors: dict[Error, _Sum] = {}
        self._others = 0
        self._all = _Sum()
        self._topics, self._states = Counter[int](), Counter[str]()

    def add(self, state: LetterState, found: CellsOfError) -> None:
        """Add the letters of some cells."""
        some = _Sum()
        for day, row in zip(found.days, found.cells, strict=True):
            self._add_day(some, day, row)
        self._all.add(some)
        self._topics[found.topic_id] += some.letters
        self._states[state.name.lower()] += some.letters
        names = Cell(*found.cells[0])
        error = Error(names.fingerprint, names.error_type)
        kind = self._errors.get(error)
        if kind is None and len(self._errors) < MAX_KINDS_KEPT:
            kind = self._errors[error] = _Sum()
        if kind is None:
            self._others += some.letters
        else:
            kind.add(some)

    def _add_day(self, some: _Sum, day: int, row: tuple[Any, ...]) -> None:
        letters, replayed, first, last, _type, _print, slots = row
        start = day * DAY_SLOTS
        earliest, latest = start + slots[0], start + slots[-2]
        youngest = self._age_of(latest)
        if self._age_of(earliest) == youngest:
            some.ages[youngest] += letters
        else:
            for slot, number in zip(slots[::2], slots[1::2], strict=True):
                some.ages[self._age_of(start + slot)] += number
        some.letters += letters
        some.replayed += replayed
        # the first one and the last one that were counted may have left
        first = max(first, earliest * SLOT)
        some.first = first if some.first is None else min(some.first, first)
        some.last = max(some.last, min(last, (latest + 1) * SLOT - 1))

    def _age_of(self, slot: int) -> int:
        return len(AGES) - bisect_left(self._since, slot)

    def by_error_type(self) -> dict[str, int]:
        types = Counter[str]()
        for error, kind in self._errors.items():
            types[error.error_type] += kind.letters
        return dict(types.most_common(MAX_KINDS))

    def result(self, state: State, group: ConsumerGroup) -> dict[str, Any]:
        """Return the fields of the reply."""
        prints = Counter[str]()
        for error, kind in self._errors.items():
            prints[error.fingerprint] += kind.letters
        ranked = sorted(self._errors.items(), key=lambda item: (-item[1].letters, item[0]))
        topics = Counter({state.topics_by_id[at].name: n for at, n in self._topics.items()})
        return {
            "counted": self._all.letters,
            "by_state": dict(self._states),
            "by_fingerprint": dict(prints.most_common(MAX_KINDS)),
            "by_error_type": self.by_error_type(),
            "by_topic": dict(topics.most_common(MAX_KINDS)),
            "other_fingerprints": self._others,
            "replayed": self._all.replayed,
            "oldest": self._all.first,
            "newest": self._all.last or None,
            "ages": self._all.by_age(),
            "fingerprints": [
                {
                    **error._asdict(),
                    "letters": kind.letters,
                    "first_at": kind.first,
                    "last_at": kind.last,
                    **kind.by_age(),
                    "note": letter_notes.text_of(state, group, error.fingerprint),
                }
                for error, kind in ranked[:MAX_FINGERPRINTS]
            ],
        }


def count(
    state: State,
    group: ConsumerGroup,
    selection: LetterSelection,
    now: int,
    keep: Keep | None,
    *,
    count_keys: bool = True,
) -> Steps[dict[str, Any]]:
    """Count the letters of a selection, in steps. `keep` judges what only the message
    tells; None = everything.
    """
    counts = LetterCounts(now)
    complete, scanned = True, 0
    keys: KeyCounts | None = None
    if keep is None and _is_in_cells(selection):
        yield from _count_cells(state, group, selection, counts)
        if count_keys and selection == LetterSelection(selection.states):
            keys = yield from _count_keys(state, group, selection)
    else:
        keys = KeyCounts() if count_keys else None
        scan = LetterScan(state, group, selection, None, now)
        while not scan.ended and scan.examined < MAX_LETTERS_SCANNED:
            for letter in scan.step():
                if keep is None or keep(letter):
                    counts.add(*_cell_of(letter))
                    if keys is not None and letter.row.key_hash is not None:
                        keys.add(letter.row.key_hash, letter.ref)
            yield
        complete, scanned = scan.ended, scan.examined
    return {
        "group": group.name,
        "letters": group.letters,
        "complete": complete,
        "scanned": scanned,
        "keys": None if keys is None else len(keys.letters),
        "top_keys": [] if keys is None else keys.most_frequent(state),
        **counts.result(state, group),
        "notes": [
            {"fingerprint": fingerprint, "note": note.text, "by": note.by, "noted_at": note.at}
            for fingerprint, note in letter_notes.notes_of(state, group)
        ],
    }


def frequent_errors(state: State, group: ConsumerGroup, most: int) -> list[tuple[Error, int]]:
    """Return the errors of most open letters, with their numbers, as far as the first
    `CELLS_READ` cells tell.
    """
    counts = Counter[Error]()
    some, _after = letter_cells.cells(
        state.tables, group.group_id, LetterState.OPEN, b"", CELLS_READ
    )
    for found in some:
        for cell in (Cell(*row) for row in found.cells):
            counts[Error(cell.fingerprint, cell.error_type)] += cell.letters
    return counts.most_common(most)


def open_by_error(state: State, group: ConsumerGroup) -> Steps[dict[str, int]]:
    """Return the number of open letters of each type of error, in steps."""
    counts = LetterCounts(now=0)
    yield from _count_cells(state, group, LetterSelection((LetterState.OPEN,)), counts)
    return counts.by_error_type()


def _is_in_cells(selection: LetterSelection) -> bool:
    return selection == LetterSelection(
        selection.states,
        selection.topic,
        error_type=selection.error_type,
        fingerprint=selection.fingerprint,
    )


def _count_cells(
    state: State, group: ConsumerGroup, selection: LetterSelection, counts: LetterCounts
) -> Steps[None]:
    topic = state.topics.get(selection.topic or "")
    topic_id = None if topic is None else topic.topic_id
    for at in dict.fromkeys(selection.states):
        after: bytes | None = b""
        while after is not None:
            some, after = letter_cells.cells(
                state.tables, group.group_id, at, after, CELLS_PER_STEP
            )
            for found in some:
                names = Cell(*found.cells[0])
                if (
                    (selection.topic is None or found.topic_id == topic_id)
                    and selection.error_type in (None, names.error_type)
                    and selection.fingerprint in (None, names.fingerprint)
                ):
                    counts.add(at, found)
            yield


class KeyCounts:
    """Numbers of letters by the hashes of their keys, with a letter of each."""

    def __init__(self) -> None:
        self.letters = Counter[int]()
        self._one_of: dict[int, MessageRef] = {}

    def add(self, key_hash: int, ref: MessageRef) -> None:
        """Count a letter."""
        self.letters[key_hash] += 1
        self._one_of.setdefault(key_hash, ref)

    def most_frequent(self, state: State) -> list[dict[str, Any]]:
        """Return the keys of most letters, each with the place of a letter of it."""
        found = [
            (key_hash, number, self._one_of[key_hash])
            for key_hash, number in self.letters.most_common(MAX_KEYS)
        ]
        return [
            {
                "key_hash": key_hash,
                "letters": number,
                "topic": state.topics_by_id[ref[0]].name,
                "partition": ref[1],
                "offset": ref[2],
            }
            for key_hash, number, ref in found
        ]


def _count_keys(state: State, group: ConsumerGroup, selection: LetterSelection) -> Steps[KeyCounts]:
    """Count keys in the index, up to a number of letters."""
    keys, seen = KeyCounts(), 0
    for at in dict.fromkeys(selection.states):
        start = letter_index.prefix(group.group_id, at, Dimension.KEY)
        stop = letter_index.prefix(group.group_id, at, Dimension(Dimension.KEY + 1))
        while seen < MAX_KEYS_COUNTED:
            found: Iterator[Any] = state.tables[t.LETTER_INDEX].range(start, stop)
            some = [key for key, _row in islice(found, KEYS_PER_STEP)]
            for key in some:
                *_ends, value = PREFIX.unpack(key[: PREFIX.size])
                _died_at, _number, *ref = PLACE.unpack(key[PREFIX.size :])
                keys.add(value - t.SIGN, (ref[0], ref[1], ref[2]))
            seen += len(some)
            yield
            if len(some) < KEYS_PER_STEP:
                break
            start = some[-1] + b"\0"
    return keys


def _cell_of(found: FoundLetter) -> tuple[LetterState, CellsOfError]:
    row = found.row
    letter = failed_rows.letter_of(found.ref, row)
    assert letter is not None, "it was selected"
    at = letter.died_at
    day, slot = divmod(letter_cells.slot_at(at), DAY_SLOTS)
    cell = Cell(1, int(bool(row.replays)), at, at, row.error_type, row.fingerprint, (slot, 1))
    return letter.state, CellsOfError(letter.topic_id, [day], [tuple(cell)])
