"""Selections of dead letters against a filter of all rows, for random letters."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.core.consumers.invariants import check_letter_index, moved_rows
from tests.core.consumers.letters_world import Found, LettersWorld
from txmq.core.consumers import letter_selection, letter_stats
from txmq.core.consumers.letter_selection import LetterScan, LetterSelection
from txmq.core.state import failed_rows, letter_cells, letter_index
from txmq.core.state.letter_cells import SLOT, LetterState
from txmq.core.steps import run_to_end
from txmq.model.units import DAY
from txmq.store.tables import LETTER_CELLS, MemoryTables

if TYPE_CHECKING:
    from txmq.core.consumers.letter_selection import ScanPosition
    from txmq.core.state.failed_rows import FailedMessage

FIRST_SEED, LAST_SEED = map(int, os.environ.get("TXMQ_SEEDS", "1:13").split(":"))
ALL_STATES = tuple(LetterState)


def pages_agree(seed: int) -> None:
    """Compare selections with the naive filter, for pages of several sizes."""
    world = LettersWorld(seed)
    for _ in range(60):
        world.turn()
    check_letter_index(world.state, world.group(), moved_rows(world.state, world.group()))
    for _ in range(40):
        selection, size = world.selection(), world.random.choice((1, 2, 7, 1_000))
        wanted = world.naive(selection)
        found: list[Found] = []
        at: ScanPosition | None = None
        while True:
            page, at = world.page(selection, at, size)
            found += page
            if at is None:
                break
            assert len(page) == size
        assert found == wanted, f"seed {seed}: {selection}"


def walks_hold(seed: int) -> None:
    """Page through selections while letters die, go and come back."""
    world = LettersWorld(seed)
    for _ in range(40):
        world.turn()
    for _ in range(6):
        selection, size = world.selection(), world.random.choice((1, 2, 5))
        staying, found = world.past(selection), list[Found]()
        at: ScanPosition | None = None
        while True:
            page, at = world.page(selection, at, size)
            assert set(page) <= set(world.naive(selection)), "only what is in the selection"
            found += page
            if at is None:
                break
            world.turn()
            staying &= set(world.naive(selection))
        messages = [ref for ref, _number in found]
        assert len(messages) == len(set(messages)), f"seed {seed}: listed twice: {selection}"
        assert staying <= set(found), f"seed {seed}: left out: {selection}"


@pytest.mark.parametrize("seed", range(FIRST_SEED, LAST_SEED))
def test_every_selection_in_pages_of_any_size_is_what_a_filter_of_all_rows_finds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # each letter that a plan has put back makes the scan leap, if it can
        monkeypatch.setattr(letter_selection, "PASSED", 0)
    pages_agree(seed)


def planted_leap_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot in which the next open letter is gets skipped, too."""
    next_slot = letter_cells.next_slot

    def too_far(*args: Any) -> int | None:
        found = next_slot(*args)
        return None if found is None else found + 1

    monkeypatch.setattr(letter_selection, "PASSED", 0)
    monkeypatch.setattr(letter_cells, "next_slot", too_far)


@pytest.mark.parametrize("seed", range(FIRST_SEED, LAST_SEED))
def test_a_walk_over_pages_beside_changes_lists_nothing_twice_and_all_that_stays(seed: int) -> None:
    walks_hold(seed)


def counts_agree(seed: int) -> None:
    """Compare statistics with sums over all rows."""
    world = LettersWorld(seed)
    for _ in range(60):
        world.turn()
    rows = world.rows()
    for number in range(30):
        selection = world.selection()
        if number % 2:  # those that are counted without reading letters
            selection = LetterSelection(
                selection.states, selection.topic, fingerprint=selection.fingerprint
            )
        found = [rows[ref] for ref, _number in world.naive(selection)]
        stats: Any = run_to_end(
            letter_stats.count(world.state, world.group(), selection, world.now, None)
        )
        wanted = (
            len(found),
            Counter(row.fingerprint for row in found),
            Counter(row.error_type for row in found),
            sum(bool(row.replays) for row in found),
        )
        named = ("counted", "by_fingerprint", "by_error_type", "replayed")
        assert tuple(stats[name] for name in named) == wanted, f"seed {seed}: {selection}"
        assert stats["complete"]
        since = [(world.now - age) // SLOT for age in letter_stats.AGES.values()]
        ages = Counter(
            sum((row.dead_at or row.first_failed_at) // SLOT <= slot for slot in since)
            for row in found
        )
        assert list(stats["ages"].values()) == [ages[number] for number in range(5)]
        assert sum(stats["ages"].values()) == sum(stats["by_state"].values()) == len(found)
        for group in stats["fingerprints"]:
            alike = [
                row.dead_at or row.first_failed_at
                for row in found
                if (row.fingerprint, row.error_type) == (group["fingerprint"], group["error_type"])
            ]
            assert group["letters"] == len(alike)
            assert group["first_at"] <= min(alike) < group["first_at"] + SLOT
            assert max(alike) <= group["last_at"] < max(alike) + SLOT


@pytest.mark.parametrize("seed", range(FIRST_SEED, LAST_SEED))
def test_statistics_are_the_sums_over_all_rows(seed: int) -> None:
    counts_agree(seed)


def planted_lost_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A letter that leaves without being subtracted when it was replayed before."""
    discard = letter_index.discard

    def forgetful(
        tables: Any, group_id: int, letter: letter_cells.Letter, counted: Any = None
    ) -> None:
        left = counted or letter
        key, _slot = letter_cells._key_of(group_id, left.state, letter_cells._cell_of(left))
        row = tables[LETTER_CELLS].get(key)
        discard(tables, group_id, letter, counted)
        if letter.replays and row is not None:
            tables[LETTER_CELLS].put(key, row)

    monkeypatch.setattr(letter_index, "discard", forgetful)


def planted_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan that also finds the letters that die while it goes on."""
    begin = LetterScan.__init__

    def unbounded(self: LetterScan, *args: object) -> None:
        begin(self, *args)  # type: ignore[arg-type]
        self.position = self.position._replace(below=1 << 62)

    monkeypatch.setattr(LetterScan, "__init__", unbounded)


def planted_stale_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that keeps a letter's old error when it dies with another one."""
    keys = letter_index.keys_of

    def without_errors(group_id: int, letter: letter_cells.Letter) -> object:
        made = list(keys(group_id, letter))
        return made[:-1] if letter.replays else made

    monkeypatch.setattr(letter_index, "keys_of", without_errors)


def planted_page_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that ends behind a letter that it has not shown."""
    step = LetterScan.step

    def skipping(self: LetterScan) -> object:
        for letter in step(self):
            yield letter
            self.position = self.position._replace(place=self.position.place + b"\xff" * 4)
            died_at = int.from_bytes(self.position.place[:8])
            self.position = self.position._replace(place=(died_at + 1).to_bytes(8))

    monkeypatch.setattr(LetterScan, "step", skipping)


def planted_near_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan that takes what the index does not know for right."""

    def matches(selection: LetterSelection, name: str, row: FailedMessage) -> bool:
        return bool(row) and selection.topic in (None, name)

    monkeypatch.setattr(letter_selection, "matches", matches)


PLANTED = {
    "a letter that was replayed stays counted": planted_lost_count,
    "a scan finds letters that died after it began": planted_without_bound,
    "a letter that dies again is not indexed by its new error": planted_stale_index,
    "a page ends behind a letter that it has not shown": planted_page_of_numbers,
    "a property without an index is not judged": planted_near_miss,
    "a leap over what plans have put back goes too far": planted_leap_too_far,
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_of_the_selection_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[bug](monkeypatch)
    found = 0
    for seed in range(1, 20):
        for checker in (pages_agree, walks_hold, counts_agree):
            try:
                checker(seed)
            except AssertionError:
                found += 1
        if found:
            return
    pytest.fail("the checkers pass it")


def test_a_step_reads_a_bounded_number_of_letters_and_of_their_text() -> None:
    world = LettersWorld(1)
    for _ in range(400):
        world.kill()
    scan = LetterScan(world.state, world.group(), LetterSelection(text="nowhere"), None, world.now)
    steps = before = 0
    while not scan.ended:
        assert list(scan.step()) == []
        steps += 1
        assert 0 <= scan.examined - before <= letter_selection.LEAPS_PER_STEP
        before = scan.examined
    assert scan.examined == world.group().letters
    assert steps > scan.examined // letter_selection.LEAPS_PER_STEP
    assert world.naive(LetterSelection())


def test_ranges_that_never_meet_are_left_in_bounded_steps_that_get_on() -> None:
    """Each letter has one of the two properties, in turn; none has both."""
    world = LettersWorld(1)
    for number in range(600):
        row = number, world.now + number
        letter = letter_cells.Letter(
            LetterState.OPEN, 1, 0, row[0], row[1], number + 1, None,
            ("E", "F")[number % 2], ("e", "f")[number % 2], 0,
        )  # fmt: skip
        letter_index.add(world.state.tables, 1, letter)
    selection = LetterSelection(error_type="E", fingerprint="f")
    scan = LetterScan(world.state, world.group(), selection, None, world.now)
    places = []
    while not scan.ended:
        assert list(scan.step()) == []
        places.append(scan.position.place)
    assert scan.examined == 0
    assert 3 < len(places) < 40
    assert places[:-1] == sorted(set(places[:-1])), "each step gets on"


def test_a_scan_of_an_unknown_topic_finds_nothing() -> None:
    world = LettersWorld(1)
    world.kill()
    assert world.page(LetterSelection(ALL_STATES, topic="nowhere"), None, 5) == ([], None)


def test_the_oldest_and_the_newest_letter_are_known_to_a_quarter_of_an_hour() -> None:
    """The cell of a day keeps the deaths of letters that have left."""
    tables: Any = MemoryTables()
    day, state = 20_000 * DAY, LetterState.OPEN
    deaths = [day + 1, day + 9 * SLOT + 7, day + 50 * SLOT + 7, day + DAY - 1]
    letters = [
        letter_cells.Letter(state, 1, 0, at, at, number, None, "E", "f", 0)
        for number, at in enumerate(deaths, 1)
    ]
    for letter in letters:
        letter_index.add(tables, 1, letter)
    for letter in (letters[0], letters[-1]):
        letter_index.discard(tables, 1, letter)
    counts = letter_stats.LetterCounts(now=day + DAY)
    ([found], _after) = letter_cells.cells(tables, 1, state, b"", 10)
    counts.add(state, found)
    assert counts._all.letters == 2
    assert counts._all.first == day + 9 * SLOT
    assert counts._all.last == day + 51 * SLOT - 1


def test_letters_beside_others_are_of_their_group_alone() -> None:
    world = LettersWorld(3)
    for _ in range(30):
        world.turn()
    world.join("n", *("a", "b"), group="other", retry=None)
    rows = [row for row in world.rows().values() if failed_rows.letter_state(row)]
    assert rows
    scan = LetterScan(
        world.state, world.group("other"), LetterSelection(ALL_STATES), None, world.now
    )
    assert list(scan.step()) == []
    assert scan.ended
