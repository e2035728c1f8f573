"""The local store: what goes in comes out, in the order of keys, after any restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recover.local.harness import Files
from tests.recover.local.stores import (
    FAILURE,
    OWNER,
    acked,
    message,
    offsets,
    open_store,
    place,
    stored,
)
from txmq.errors import DirectoryInUse, StoreClosed, StoreFull
from txmq.recover.local import Change, State, StoreLimits, scan


def test_a_stored_message_comes_back_whole_after_a_restart(tmp_path: Path) -> None:
    store, report = open_store(tmp_path)
    assert report.created
    store.put([(message(1, "k", body=b"\0\xff" * 500), 50, FAILURE)])
    before = store.untold(10)
    store.close()
    store, report = open_store(tmp_path)
    assert (report.created, report.findings(), report.id) == (False, [], store.id)
    assert store.untold(10) == before
    assert store.due(49, 10) == []
    assert store.due(50, 10) == [message(1, "k", body=b"\0\xff" * 500)]
    assert store.untold(10)[0].failure == FAILURE
    store.close()


def test_what_may_wait_is_on_disk_once_it_is_settled(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    files = Files(store._database, tmp_path / "images", checkpoint_pages=0)
    store.put([stored(1), stored(2)])
    store.record(acked(1))
    store.forget([place(1)])
    assert len(list(scan(str(files.power_cut())))) == 2, "not synced"
    store.settle()
    assert [one.entry.place for one in scan(str(files.power_cut()))] == [place(2)]
    store.close()
    with pytest.raises(StoreClosed):
        store.settle()


def test_messages_of_a_key_are_handed_out_one_after_another(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(1, "k", due=90), stored(2, "k", due=10), stored(3, "other", due=20)])
    assert offsets(store.due(50, 10)) == [3]  # the time of 2 has come, but 1 is before it
    assert store.next_due() == 90
    assert offsets(store.due(90, 10)) == [1]
    assert store.due(1_000, 10) == []
    store.record(acked(1))
    assert offsets(store.due(1_000, 10)) == [2]
    store.close()


def test_without_order_keys_do_not_wait(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path, OWNER._replace(ordered=False))
    store.put([stored(1, "k", due=90), stored(2, "k", due=10)])
    assert offsets(store.due(50, 10)) == [2]
    store.close()


def test_another_rule_of_order_is_taken_over(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path, OWNER._replace(ordered=False))
    store.put([stored(1, "k", due=90), stored(2, "k", due=10)])
    store.close()
    store, _ = open_store(tmp_path)
    assert store.due(50, 10) == []
    store.close()


def test_a_key_is_held_until_its_last_message_is_settled(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(1, "k"), stored(2, "k")])
    store.record(acked(1))
    store.record([Change(place(2), State.RETURNED, 1, 0)])
    store.put([stored(3, "k")])
    assert store.due(1_000, 10) == []
    store.forget([place(2)])
    assert offsets(store.due(1_000, 10)) == [3]
    store.record([Change(place(3), State.DEAD, 2, 0)])
    store.put([stored(4, "k")])
    assert store.due(1_000, 10) == []
    store.forget([place(3)])
    store.record(acked(4))
    store.close()


def test_a_key_that_changed_its_partition_keeps_its_order(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(9, "k", partition=3), stored(4, "k", partition=1)])
    store.put([stored(6, "k", partition=1), stored(5, "k", partition=1)])
    handed = []
    while due := store.due(1_000, 10):
        handed += due
        store.record([Change(one.place, State.ACKED, 1, 0) for one in due])
    assert offsets(handed) == [9, 4, 5, 6]
    store.close()


def test_an_outcome_is_final_and_a_second_put_changes_nothing(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(1)])
    store.record(acked(1))
    store.record([Change(place(1), State.STORED, 9, 0)])
    store.put([stored(1)])
    assert [entry.state for entry in store.untold(10)] == [State.ACKED]
    assert store.due(1_000, 10) == []
    store.close()


def test_what_changed_since_it_was_told_is_told_again(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(1), stored(2)])
    told = store.untold(10)
    store.record([Change(place(1), State.STORED, 2, 70)])
    store.told(told)
    assert [(entry.place.offset, entry.attempt) for entry in store.untold(10)] == [(1, 2)]
    store.close()
    store, _ = open_store(tmp_path)
    assert [entry.place.offset for entry in store.untold(10)] == [1]
    store.close()


def test_counts_follow_what_is_stored(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(1), stored(2)])
    both = store.stats()
    assert (both.messages, both.attempts, both.settled, both.oldest > 0) == (2, 2, 0, True)
    store.record(acked(1))
    one = store.stats()
    assert (one.messages, one.settled, one.bytes * 2) == (1, 1, both.bytes)
    store.forget([place(1), place(2)])
    assert store.stats()[:4] == (0, 0, 0, 0)
    store.close()


def test_a_released_message_is_handed_out_again(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(1)])
    assert offsets(store.due(1_000, 10)) == [1]
    assert store.due(1_000, 10) == []
    store.release(place(1))
    assert offsets(store.due(1_000, 10)) == [1]
    store.close()


def test_limits_refuse_a_put_as_a_whole(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path, limits=StoreLimits(messages=2))
    store.put([stored(1)])
    with pytest.raises(StoreFull, match="the limits are 2"):
        store.put([stored(2), stored(3)])
    assert store.stats().messages == 1
    store.put([stored(2)])
    assert store.stats().full
    store.put([stored(2)])  # it is there already
    store.close()


def test_two_owners_are_one_too_many(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    with pytest.raises(DirectoryInUse, match="in use by the process"):
        open_store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreClosed):
        store.put([stored(1)])
    open_store(tmp_path)[0].close()
