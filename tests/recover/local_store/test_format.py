"""The bytes of a store as they are today: read for ever (docs/FORMATS.md 9)."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from tests.recover.local_store.harness import PATH, SimIndex, new_disk, open_sim
from tests.recover.local_store.model import FOREVER
from tests.recover.local_store.stores import acked, message, offsets, place, stored
from txmq.recover.local_store import Change, State
from txmq.testing.simfs import SimFS

GOLDEN = Path(__file__).parents[2] / "golden"
SEGMENT = "log/00000000000000000000.seg"


def write(monkeypatch: pytest.MonkeyPatch) -> SimFS:
    """Write a store with a record of each kind but RELEASED."""
    monkeypatch.setattr("txmq.recover.local_store.directory.uuid4", lambda: UUID(int=9))
    disk = new_disk()
    store, _ = open_sim(disk, SimIndex())
    store.put([stored(1, "k", due=50), stored(2, "k"), stored(3)])
    store.record([*acked(1), Change(place(3), State.STORED, 2, 70)])
    store.told(store.untold(9))
    store.forget([place(1)])
    store.put([stored(4, partition=1)])
    store.close()
    return disk.restart()


def content(disk: SimFS, name: str) -> bytes:
    file = disk.open(f"{PATH}/{name}")
    return file.pread(file.size(), 0).rstrip(b"\0")


@pytest.mark.parametrize(
    ("name", "golden"),
    [("identity.json", "local-store-v1.json"), (SEGMENT, "local-store-v1.seg")],
)
def test_the_bytes_have_not_changed(
    name: str, golden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert content(write(monkeypatch), name) == (GOLDEN / golden).read_bytes()


def test_a_store_of_version_1_is_read() -> None:
    disk = new_disk()
    disk.makedirs(f"{PATH}/log")
    for name, golden in (("identity.json", "local-store-v1.json"), (SEGMENT, "local-store-v1.seg")):
        data = (GOLDEN / golden).read_bytes()
        zeros = bytes(-len(data) & 7 if name == SEGMENT else 0)
        disk.create(f"{PATH}/{name}").pwrite([data + zeros], 0)
    store, report = open_sim(disk, SimIndex())
    assert (report.id, report.findings()) == (UUID(int=9), [])
    assert offsets(store.due(FOREVER, 9)) == [2, 4, 3]
    entry = store.entry(place(3))
    assert entry is not None
    assert (entry.attempt, entry.due, entry.told) == (2, 70, True)
    store.release(place(2))
    assert store.due(FOREVER, 9) == [message(2, "k")]
    store.close()
