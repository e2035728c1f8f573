"""Rules R and B: random histories, single cases, and wrong rules that are found."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.shared.histories import GENESIS, LOG_ID, START, Fold, check, log_of, read
from txmq.store.shared.records import Claim, Genesis, PartitionRecord, Slice
from txmq.store.shared.rules import Expectation, Place, fold

SEEDS = 400
A, B = b"a" * 16, b"b" * 16


def claim(epoch: int, nonce: bytes = A) -> Claim:
    return Claim(LOG_ID, epoch, nonce, "n")


def piece(
    start: int, data: bytes, *, whole: int | None = None, epoch: int = 4, nonce: bytes = A
) -> Slice:
    end = START + start + len(data)
    return Slice(LOG_ID, epoch, nonce, START + start, end if whole is None else START + whole, data)


def log(records: Iterable[PartitionRecord | None]) -> tuple[bytes, Place]:
    place, counted = read(fold, [GENESIS, *records])
    return log_of(counted), place


@given(rng=st.randoms(use_true_random=False))
def test_every_history_is_a_log_without_hole_or_double(rng: Random) -> None:
    check(rng, fold)


def epoch_only(
    place: Place, offset: int, checksum: int, record: PartitionRecord | None
) -> tuple[Place, bool]:
    """Count what the owner wrote, wherever it begins."""
    if isinstance(record, Slice) and place.is_owned_by(record.epoch, record.nonce):
        after = place._replace(offset=offset, checksum=checksum)
        return after._replace(end=place.end + len(record.data), whole=record.whole), True
    return fold(place, offset, checksum, record)


def any_nonce(
    place: Place, offset: int, checksum: int, record: PartitionRecord | None
) -> tuple[Place, bool]:
    """Count what has the owner's epoch, whoever wrote it."""
    if isinstance(record, Slice) and record.epoch == place.epoch:
        return fold(place, offset, checksum, record._replace(nonce=place.nonce))
    return fold(place, offset, checksum, record)


def any_log(
    place: Place, offset: int, checksum: int, record: PartitionRecord | None
) -> tuple[Place, bool]:
    """Count records of another log."""
    if isinstance(record, Slice) and place.log_id is not None:
        return fold(place, offset, checksum, record._replace(log_id=place.log_id))
    return fold(place, offset, checksum, record)


def same_epoch(
    place: Place, offset: int, checksum: int, record: PartitionRecord | None
) -> tuple[Place, bool]:
    """Count the later one of two claims of one epoch."""
    if isinstance(record, Claim) and record.epoch == place.epoch:
        return fold(place._replace(epoch=place.epoch - 1), offset, checksum, record)
    return fold(place, offset, checksum, record)


def any_later_epoch(
    place: Place, offset: int, checksum: int, record: PartitionRecord | None
) -> tuple[Place, bool]:
    """Count a claim of the last epoch that there is."""
    if isinstance(record, Claim) and record.epoch > place.epoch:
        return fold(place._replace(epoch=record.epoch - 1), offset, checksum, record)
    return fold(place, offset, checksum, record)


def no_cut(
    place: Place, offset: int, checksum: int, record: PartitionRecord | None
) -> tuple[Place, bool]:
    """Leave the beginning of a record in the log."""
    after, counts = fold(place, offset, checksum, record)
    return (
        after._replace(end=place.end) if isinstance(record, Claim) and counts else after
    ), counts


def cut_at_the_start_of_the_slice(
    place: Place, offset: int, checksum: int, record: PartitionRecord | None
) -> tuple[Place, bool]:
    """Take the records of the last slice away with the beginning of the next."""
    after, counts = fold(place, offset, checksum, record)
    if isinstance(record, Slice) and counts:
        after = after._replace(whole=min(record.start, record.whole))
    return after, counts


def whole_anywhere(
    place: Place, offset: int, checksum: int, record: PartitionRecord | None
) -> tuple[Place, bool]:
    """Believe a slice that says what lies behind its end is whole."""
    if isinstance(record, Slice):
        after, counts = fold(place, offset, checksum, record._replace(whole=record.end))
        return (after._replace(whole=record.whole) if counts else after), counts
    return fold(place, offset, checksum, record)


def second_genesis(
    place: Place, offset: int, checksum: int, record: PartitionRecord | None
) -> tuple[Place, bool]:
    """Begin anew at each genesis."""
    return fold(Place() if isinstance(record, Genesis) else place, offset, checksum, record)


@pytest.mark.parametrize(
    "mutant",
    [
        epoch_only,
        any_nonce,
        any_log,
        same_epoch,
        any_later_epoch,
        no_cut,
        cut_at_the_start_of_the_slice,
        whole_anywhere,
        second_genesis,
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_a_planted_bug_of_rule_r_is_found(mutant: Fold) -> None:
    assert any(_fails(mutant, seed) for seed in range(SEEDS))


def _fails(mutant: Fold, seed: int) -> bool:
    try:
        check(Random(seed), mutant)
    except AssertionError:
        return True
    return False


def test_a_claim_cuts_the_unfinished_record() -> None:
    records: list[PartitionRecord] = [claim(4), piece(0, b"one")]
    records += [piece(3, b"two", whole=3), piece(6, b"3", whole=3)]
    assert log(records)[0] == b"onetwo3"
    data, place = log([*records, claim(5, B)])
    assert (data, place.end, place.whole) == (b"one", START + 3, START + 3)
    # what follows of the old owner is void, also the end of its record
    late = [piece(7, b"end"), piece(3, b"two")]
    assert log([*records, claim(5, B), *late])[0] == b"one"


def test_a_claim_cuts_a_segment_that_was_begun() -> None:
    begun = piece(3, b"header", whole=3)._replace(begins_segment=True)
    data, place = log([claim(4), piece(0, b"one"), begun, claim(5, B)])
    assert (data, place.end) == (b"one", START + 3)


def test_a_slice_without_data_may_end_a_record_but_not_move_the_end() -> None:
    data, place = log([claim(4), piece(0, b"one", whole=0), piece(3, b"")])
    assert (data, place.whole, place.end) == (b"one", START + 3, START + 3)
    assert log([claim(4), piece(0, b"one"), piece(3, b"", whole=4)])[1].whole == START + 3


def test_nothing_counts_before_the_genesis() -> None:
    place, counted = read(fold, [claim(1), piece(0, b"x"), None])
    assert counted == []
    assert place == Place(offset=6, checksum=2)


def test_an_offset_after_the_last_one_read_is_certain() -> None:
    expected = Expectation(7)
    assert expected.is_certain(8)
    assert expected.is_certain(9)
    assert not expected.is_certain(11)
    assert not expected.is_certain(None)
    assert not expected.is_certain(9)
    assert expected.is_certain(10)  # what was reported in vain is no base


def test_what_was_read_is_a_base_and_never_goes_back() -> None:
    expected = Expectation(7)
    expected.read(10)
    expected.read(3)
    assert not expected.is_certain(8)
    assert expected.is_certain(11)


def test_places_know_their_owner_by_epoch_and_nonce() -> None:
    _, place = log([claim(4)])
    assert place.is_owned_by(4, A)
    assert not place.is_owned_by(4, B)
    assert not place.is_owned_by(3, A)
