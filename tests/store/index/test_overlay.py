"""The rows above LMDB: in order by key, however they arrive."""

from __future__ import annotations

from random import Random

import pytest

from txmq.store.index import lmdb_table
from txmq.store.index.lmdb_table import Overlay


@pytest.mark.parametrize("seed", range(4))
def test_ranges_are_in_order_whatever_arrives_between_them(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_table, "ORDERED_AT_ONCE", 8)
    monkeypatch.setattr(lmdb_table, "MERGED_AT_ONCE", 64)
    random, overlay = Random(seed), Overlay(ordered=True)
    wanted: dict[bytes, tuple[int, ...] | None] = {}
    for _ in range(60):
        for _ in range(random.choice((1, 3, 40))):
            key = random.randrange(500).to_bytes(2)
            wanted[key] = random.choice((None, (random.randrange(9),)))
            overlay.put(key, wanted[key])
        start, stop = sorted(random.randrange(500).to_bytes(2) for _ in range(2))
        for end in (stop, None):
            for reverse in (False, True):
                found = list(overlay.range(start, end, reverse=reverse))
                there = sorted(wanted, reverse=reverse)
                assert found == [
                    (key, wanted[key]) for key in there if start <= key and (not end or key < end)
                ]
    overlay.clear()
    assert list(overlay.range(b"", None, reverse=False)) == []
