"""Statistics of dead letters: numbers by fingerprint, error type, topic and age.

A selection of topics, errors and states is counted in cells (`state/letter_index.py`),
which does not read the letters. Any other selection is counted by a scan, and the reply
says if the scan came to its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import letter_notes
from txmq.core.consumers.letter_selection import FoundLetter, LetterScan, LetterSelection
from txmq.core.state import failed_messages, letter_index
from txmq.core.state.letter_index import PREFIX, SLOT, Cell, CountedCell, Dimension
from txmq.model.units import DAY, HOUR
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.state.state import State
    from txmq.core.steps import Steps

CELLS_PER_STEP = 256
KEYS_PER_STEP = 512
MAX_KINDS = 1_000  # of fingerprints, error types and topics that a reply names
MAX_FINGERPRINTS = 100  # that a reply describes
MAX_KINDS_KEPT = 20_000  # while they are counted
MAX_KEYS_COUNTED = 100_000  # letters, from the lowest hash of a key on
MAX_LETTERS_SCANNED = 100_000
AGES = {"1h": HOUR, "1d": DAY, "7d": 7 * DAY, "30d": 30 * DAY}
OLDER = "older"

Keep = Callable[[FoundLetter], bool]


class Error(NamedTuple):
    """What letters are grouped by."""

    fingerprint: str
    error_type: str


class _Kind:
    """The letters of one fingerprint and error type."""

    __slots__ = ("ages", "first", "last", "letters")

    def __init__(self) -> None:
        self.letters = self.last = 0
        self.first: int | None = None
        self.ages = dict.fromkeys((*AGES, OLDER), 0)

    def add(self, cell: Cell, age: str) -> None:
        self.letters += cell.letters
        self.first = cell.first if self.first is None else min(self.first, cell.first)
        self.last = max(self.last, cell.last)
        self.ages[age] += cell.letters


class LetterCounts:
    """Sums of cells. Fingerprints beyond the first 20,000 are counted together."""

    def __init__(self, now: int) -> None:
        self._now = now
        self._errors: dict[Error, _Kind] = {}
        self._others = 0
        self._all = _Kind()
        self._topics, self._states = Counter[int](), Counter[str]()
        self._replayed = 0

    def add(self, counted: CountedCell) -> None:
        """Add the letters of a cell."""
        cell = counted.cell
        age = self._age(counted.slot * SLOT)
        self._all.add(cell, age)
        self._topics[counted.topic_id] += cell.letters
        self._states[counted.state.name.lower()] += cell.letters
        self._replayed += cell.replayed
        error = Error(cell.fingerprint, cell.error_type)
        kind = self._errors.get(error)
        if kind is None and len(self._errors) < MAX_KINDS_KEPT:
            kind = self._errors[error] = _Kind()
        if kind is None:
            self._others += cell.letters
        else:
            kind.add(cell, age)

    def result(self, state: State, group: ConsumerGroup) -> dict[str, Any]:
        """Return the fields of the reply."""
        prints, types = Counter[str](), Counter[str]()
        for error, kind in self._errors.items():
            prints[error.fingerprint] += kind.letters
            types[error.error_type] += kind.letters
        ranked = sorted(self._errors.items(), key=lambda item: (-item[1].letters, item[0]))
        topics = Counter({state.topics_by_id[at].name: n for at, n in self._topics.items()})
        return {
            "counted": self._all.letters,
            "by_state": dict(self._states),
            "by_fingerprint": dict(prints.most_common(MAX_KINDS)),
            "by_error_type": dict(types.most_common(MAX_KINDS)),
            "by_topic": dict(topics.most_common(MAX_KINDS)),
            "other_fingerprints": self._others,
            "replayed": self._replayed,
            "oldest": self._all.first,
            "newest": self._all.last or None,
            "ages": self._all.ages,
            "fingerprints": [
                {
                    **error._asdict(),
                    "letters": kind.letters,
                    "first_at": kind.first,
                    "last_at": kind.last,
                    **kind.ages,
                    "note": letter_notes.text_of(state, group, error.fingerprint),
                }
                for error, kind in ranked[:MAX_FINGERPRINTS]
            ],
        }

    def _age(self, died_at: int) -> str:
        age = self._now - died_at
        return next((name for name, limit in AGES.items() if age < limit), OLDER)


def count(
    state: State, group: ConsumerGroup, selection: LetterSelection, now: int, keep: Keep | None
) -> Steps[dict[str, Any]]:
    """Count the letters of a selection, in steps. `keep` judges what only the message
    tells; None = everything.
    """
    counts = LetterCounts(now)
    complete, scanned = True, 0
    keys: dict[str, Any] = {"keys": None, "most_of_one_key": None}
    if keep is None and _is_in_cells(selection):
        yield from _count_cells(state, group, selection, counts)
        if selection == LetterSelection(selection.states):
            keys = yield from _count_keys(state, group, selection)
    else:
        scan = LetterScan(state, group, selection, None, now)
        while not scan.ended and scan.examined < MAX_LETTERS_SCANNED:
            for letter in scan.step():
                if keep is None or keep(letter):
                    counts.add(_cell_of(letter))
            yield
        complete, scanned = scan.ended, scan.examined
    return {
        "group": group.name,
        "letters": group.letters,
        "complete": complete,
        "scanned": scanned,
        **keys,
        **counts.result(state, group),
    }


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
        after = b""
        while True:
            some = list(
                islice(letter_index.cells(state.tables, group.group_id, at, after), CELLS_PER_STEP)
            )
            for _key, counted in some:
                if (
                    (selection.topic is None or counted.topic_id == topic_id)
                    and selection.error_type in (None, counted.cell.error_type)
                    and selection.fingerprint in (None, counted.cell.fingerprint)
                ):
                    counts.add(counted)
            yield
            if len(some) < CELLS_PER_STEP:
                break
            after = some[-1][0]


def _count_keys(
    state: State, group: ConsumerGroup, selection: LetterSelection
) -> Steps[dict[str, Any]]:
    """Count keys in the index, up to a number of letters."""
    keys = Counter[bytes]()
    seen = 0
    for at in dict.fromkeys(selection.states):
        start = letter_index.prefix(group.group_id, at, Dimension.KEY)
        stop = letter_index.prefix(group.group_id, at, Dimension(Dimension.KEY + 1))
        while seen < MAX_KEYS_COUNTED:
            found: Iterator[Any] = state.tables[t.LETTER_INDEX].range(start, stop)
            some = [key for key, _row in islice(found, KEYS_PER_STEP)]
            keys.update(key[PREFIX.size - 8 : PREFIX.size] for key in some)
            seen += len(some)
            yield
            if len(some) < KEYS_PER_STEP:
                break
            start = some[-1] + b"\0"
    return {"keys": len(keys), "most_of_one_key": max(keys.values(), default=0)}


def _cell_of(found: FoundLetter) -> CountedCell:
    row = found.row
    letter = failed_messages.letter_of(found.ref, row)
    assert letter is not None, "it was selected"
    at = letter.died_at
    cell = Cell(1, int(bool(row.replays)), at, at, row.error_type, row.fingerprint)
    return CountedCell(letter.state, letter.topic_id, at // SLOT, cell)
