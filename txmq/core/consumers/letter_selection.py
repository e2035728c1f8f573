"""Selections of dead letters, and the scan that finds their letters in bounded steps.

A scan goes through the letters in the order of their deaths. It leaps from one index
range to the next, so that it examines only letters that have all indexed properties.
The other properties are read from the rows. What only the message tells (its key, its
headers) is left to the caller.

A scan goes on over any number of calls. It sees the letters that were there when it
began: one that dies later has a higher number, so that no letter is found twice. A
letter that stays in the selection all the while is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.state import failed_messages, failed_rows, letter_cells, letter_index
from txmq.core.state.letter_cells import LetterState
from txmq.core.state.letter_index import FIRST, LAST, PLACE, Dimension
from txmq.core.state.plans import LetterOutcome
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State
    from txmq.store.tables import Table

NEAR = 4  # rows that a range is read on before it is looked up anew
LEAPS_PER_STEP = 128  # between ranges, and at most so many letters are read
PASSED = 32  # letters in a row that are open no more; then the next slot with open ones is sought
TEXT_PER_STEP = 128 << 10  # characters of errors that a step reads, roughly


class LetterSelection(NamedTuple):
    """The properties of the letters to select; None = any.

    Times are microseconds: `died_from` <= time of death < `died_before`. `text` is part
    of the error's type or text, in any case of its letters.
    """

    states: tuple[LetterState, ...] = (LetterState.OPEN,)
    topic: str | None = None
    key_hash: int | None = None
    died_from: int = 0
    died_before: int | None = None
    error_type: str | None = None
    fingerprint: str | None = None
    min_attempts: int = 0
    max_attempts: int | None = None
    text: str | None = None
    max_replays: int | None = None


class ScanPosition(NamedTuple):
    """Position of a scan, which goes on at the first letter whose place is not below
    `place`.

    It leaves out letters with a number from `below` on, and those without a number that
    failed after `until`: they were not there when the scan began.
    """

    place: bytes
    below: int
    until: int


class FoundLetter(NamedTuple):
    """A letter of the selection."""

    ref: MessageRef
    row: FailedMessage


def matches(selection: LetterSelection, name: str, row: FailedMessage) -> bool:
    """Return True if a failed message of the topic `name` has the properties that its
    row tells of.
    """
    wanted, text = selection, selection.text
    return (
        failed_rows.letter_state(row) in wanted.states
        and wanted.topic in (None, name)
        and wanted.key_hash in (None, row.key_hash)
        and ((not wanted.died_from and wanted.died_before is None) or _died_within(row, wanted))
        and wanted.error_type in (None, row.error_type)
        and wanted.fingerprint in (None, row.fingerprint)
        and wanted.min_attempts <= row.attempt
        and (wanted.max_attempts is None or row.attempt <= wanted.max_attempts)
        and (wanted.max_replays is None or row.replays <= wanted.max_replays)
        and (text is None or _has_text(row, text.lower()))
    )


def _died_within(row: FailedMessage, wanted: LetterSelection) -> bool:
    died_at = row.died_at
    return wanted.died_from <= died_at and (
        wanted.died_before is None or died_at < wanted.died_before
    )


def _has_text(row: FailedMessage, text: str) -> bool:
    return text in row.error_text.lower() or text in row.error_type.lower()


class LetterScan:
    """A scan over the letters of a group.

    The caller takes steps until it has enough or the scan has `ended`, and goes on at
    `position` in another scan. `examined` counts the letters whose rows were read.
    """

    def __init__(
        self,
        state: State,
        group: ConsumerGroup,
        selection: LetterSelection,
        start: ScanPosition | None,
        now: int,
    ) -> None:
        self._state, self._group, self._selection = state, group, selection
        start = start or ScanPosition(FIRST, group.next_letter, now)
        earliest = PLACE.pack(selection.died_from, 0, 0, 0, 0)
        self.position = start._replace(place=max(start.place, earliest))
        before = selection.died_before
        self._stop = LAST if before is None else PLACE.pack(before, 0, 0, 0, 0)
        states = dict.fromkeys(selection.states)
        passed = _passed_states(state, group)
        if passed & states.keys():
            states[LetterState.OPEN] = None  # where the letters that a plan has passed stay
        self._prefixes = [list(_prefixes(state, group, selection, at)) for at in states]
        # where the index has letters that plans have passed, cells tell what is open
        self._skips = [*states] == [LetterState.OPEN] and bool(passed)
        self._passed, self._sought = 0, -1  # letters in a row; a slot
        self.examined = 0
        self.text_read = 0  # characters of the errors of these letters
        self.ended = False

    def step(self) -> Iterator[FoundLetter]:
        """Yield letters of the selection that a bounded search finds.

        `position` is behind the letter that was yielded last. The state must not change
        before the iteration ends.
        """
        walks = [
            _Walk(self._state.tables[t.LETTER_INDEX], prefixes, self._stop)
            for prefixes in self._prefixes
        ]
        leaps, texts = LEAPS_PER_STEP, self.text_read + TEXT_PER_STEP
        for walk in walks:
            leaps -= walk.advance(self.position.place, LEAPS_PER_STEP)
        while walks := [walk for walk in walks if walk.place is not None]:
            walk = min(walks, key=_place_of)
            self.position = self.position._replace(place=_place_of(walk))
            if not walk.found or leaps <= 0 or self.text_read >= texts:
                return
            letter = self._examine(_place_of(walk))
            self.position = self.position._replace(place=_after(_place_of(walk)))
            if letter is not None:
                yield letter
            elif self._skips and self._passed >= PASSED and self._skip_slots():
                return
            leaps -= walk.advance(self.position.place, LEAPS_PER_STEP)
        self.ended = True

    def _skip_slots(self) -> bool:
        """Go on at the next time slot with open letters. Return False if that is the
        slot of the last letter.
        """
        slot = letter_cells.slot_at(PLACE.unpack(self.position.place)[0])
        if slot == self._sought:
            return False
        self._sought, self._passed = slot, 0
        following = letter_cells.next_slot(
            self._state.tables, self._group.group_id, LetterState.OPEN, slot, self._counts
        )
        if following == slot:
            return False
        self.ended = following is None
        if following is not None:
            place = PLACE.pack(following * letter_cells.SLOT, 0, 0, 0, 0)
            self.position = self.position._replace(place=place)
        return True

    def _counts(self, topic_id: int, cell: letter_cells.Cell) -> bool:
        """Return True if a cell may count letters of the selection."""
        wanted, topic = self._selection, self._state.topics_by_id.get(topic_id)
        return (
            wanted.topic in (None, "" if topic is None else topic.name)
            and wanted.error_type in (None, cell.error_type)
            and wanted.fingerprint in (None, cell.fingerprint)
        )

    def step_back(self) -> None:
        """Let the next scan begin with the letter that was yielded last."""
        before = int.from_bytes(self.position.place) - 1
        self.position = self.position._replace(place=before.to_bytes(PLACE.size))

    def _examine(self, place: bytes) -> FoundLetter | None:
        died_at, number, *at = PLACE.unpack(place)
        late = number >= self.position.below if number else died_at > self.position.until
        if late:
            return None
        ref = (at[0], at[1], at[2])
        topic = self._state.topics_by_id[ref[0]]
        # those of a deleted topic end (TopicTidied), and may have places of a new one
        row = None if topic.deleted else failed_messages.get(self._state, self._group, ref)
        self.examined += 1
        if self._skips:
            is_open = row is not None and failed_rows.letter_state(row) is LetterState.OPEN
            self._passed = 0 if is_open else self._passed + 1
        if row is None:
            return None  # or it is processed, and not swept yet
        self.text_read += len(row.error_text)
        return FoundLetter(ref, row) if matches(self._selection, topic.name, row) else None


def _passed_states(state: State, group: ConsumerGroup) -> set[LetterState]:
    """Return the states of letters that the index may have among the open ones: plans
    have passed them, and their rows have not changed since.
    """
    found: set[LetterState] = set()
    for plan in state.plans.by_id.values():
        if plan.group_id == group.group_id and plan.count(LetterOutcome.DELIVERED):
            found.add(LetterState.REPLAYING)
        if plan.group_id == group.group_id and plan.swept < plan.abandoned:
            found.add(LetterState.ABANDONED)
    return found


def _after(place: bytes) -> bytes:
    """Return the first place behind this one."""
    return (int.from_bytes(place) + 1).to_bytes(PLACE.size)


def _prefixes(
    state: State, group: ConsumerGroup, selection: LetterSelection, at: LetterState
) -> Iterator[bytes]:
    """Yield the beginnings of the index ranges that the letters of a state are in."""
    values: dict[Dimension, int] = {}
    if at in letter_index.SETTLED:
        if selection.topic is not None:
            topic = state.topics.get(selection.topic)
            values[Dimension.TOPIC] = 0 if topic is None else topic.topic_id
        if selection.key_hash is not None:
            values[Dimension.KEY] = selection.key_hash + t.SIGN
        if selection.error_type is not None:
            values[Dimension.ERROR_TYPE] = letter_index.value_of(selection.error_type)
        if selection.fingerprint is not None:
            values[Dimension.FINGERPRINT] = letter_index.value_of(selection.fingerprint)
    for dimension, value in (values or {Dimension.ALL: 0}).items():
        yield letter_index.prefix(group.group_id, at, dimension, value)


class _Walk:
    """The letters that are in several ranges of the index, in order.

    `place` is the next one if `found`, otherwise the first that it can be; None = there
    are no more.
    """

    def __init__(self, table: Table, prefixes: Sequence[bytes], stop: bytes) -> None:
        self._ranges = [_Range(table, prefix, stop) for prefix in prefixes]
        self.place: bytes | None = FIRST
        self.found = False

    def advance(self, place: bytes, most: int) -> int:
        """Go on to the first letter from `place` on, in `most` leaps or a few more.
        Return the number of leaps.
        """
        leaps = 0
        self.found = False
        while not self.found and leaps < most:
            first: bytes | None = None
            for among in self._ranges:
                leaps += 1
                following = among.seek(place)
                if following is None:
                    self.place = None
                    return leaps
                place = following
                first = first or place
            self.found = place == first
            self.place = place
        return leaps


def _place_of(walk: _Walk) -> bytes:
    assert walk.place is not None, "it has not ended"
    return walk.place


class _Range:
    """A range of the index: the places of the letters with one property, in order."""

    def __init__(self, table: Table, prefix: bytes, stop: bytes) -> None:
        self._table, self._prefix, self._stop = table, prefix, prefix + stop
        self._rows: Iterator[tuple[bytes, Any]] = iter(())
        self._place: bytes | None = None

    def seek(self, place: bytes) -> bytes | None:
        """Return the first place that is not below `place`; the places sought grow."""
        for _ in range(NEAR):
            if self._place is not None and self._place >= place:
                return self._place
            if (row := next(self._rows, None)) is None:
                break
            self._place = row[0][len(self._prefix) :]
        else:
            if self._place is not None and self._place >= place:
                return self._place
        self._rows = self._table.range(self._prefix + place, self._stop)
        row = next(self._rows, None)
        self._place = None if row is None else row[0][len(self._prefix) :]
        return self._place
