"""Brokers that share a log lose nothing, and have the same rows at the same place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from twisted.internet.defer import Deferred, succeed

from tests.reporting import Report
from tests.simulation.replicas import FAULTS, Replicas
from tests.simulation.seeds import find_bug
from txmq.broker.cluster import replica
from txmq.broker.data_directory import storage
from txmq.broker.data_directory.retention_service import RetentionService
from txmq.store.log.writer import Flush
from txmq.store.shared.rules import Place
from txmq.store.shared.slices import SliceReader


# They go back to a snapshot, forget twice, and copy, two of them with interruptions.
@pytest.mark.parametrize("seed", [11, 25, 40, 90, 115, 135])
def test_replicas_lose_nothing_and_agree(seed: int, tmp_path: Path) -> None:
    counts = Replicas(seed, tmp_path).run()
    assert counts["leaders"] > 1
    assert counts["partition forgot"] > 1
    assert counts["copied from nothing"] > 0
    assert sum(counts[fault] for fault in set(FAULTS)) > 5


@contextmanager
def answers_before_it_is_certain() -> Iterator[None]:
    real = replica.Replica.replicate

    def at_once(self: replica.Replica, flush: Flush) -> Deferred[None]:
        real(self, flush).addErrback(lambda _failure: None)
        return succeed(None)

    with patch.object(replica.Replica, "replicate", at_once):
        yield


@contextmanager
def keeps_slices_that_a_claim_cut() -> Iterator[None]:
    with patch.object(SliceReader, "cut", lambda _self: None):
        yield


@contextmanager
def keeps_what_lies_behind_its_tables() -> Iterator[None]:
    with patch.object(storage, "cut_log", lambda *_args: None):
        yield


@contextmanager
def stores_a_place_within_a_record() -> Iterator[None]:
    def place(self: replica.Replica) -> Place:
        assert self.node is not None
        return self.node.place

    with patch.object(replica.Replica, "place", property(place)):
        yield


@contextmanager
def takes_over_what_it_has() -> Iterator[None]:
    with patch.object(replica, "after", lambda flush, _position: flush):
        yield


@contextmanager
def removes_what_is_needed() -> Iterator[None]:
    with patch.object(RetentionService, "_need", lambda *_given: None):
        yield


@contextmanager
def forgets_what_snapshots_need() -> Iterator[None]:
    def at_once(self: storage.StorageService) -> None:
        if self.forget_before and self.place:
            self.forget_before(self.place())

    with patch.object(storage.StorageService, "_forget", at_once):
        yield


@pytest.mark.parametrize(
    "bug",
    [
        answers_before_it_is_certain,
        keeps_slices_that_a_claim_cut,
        keeps_what_lies_behind_its_tables,
        stores_a_place_within_a_record,
        takes_over_what_it_has,
        removes_what_is_needed,
        forgets_what_snapshots_need,
    ],
)
def test_a_planted_bug_of_replicas_is_found(
    bug: Callable[[], AbstractContextManager[None]], tmp_path: Path, report: Report
) -> None:
    def run(seed: int) -> None:
        (directory := tmp_path / str(seed)).mkdir()
        with bug():
            Replicas(seed, directory).run()

    find_bug(bug.__name__, 0, run, report)
