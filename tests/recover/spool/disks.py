"""Spools on simulated disks: batches, openings, and what is in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from txmq.batch import BatchView, encode
from txmq.model.message import Message
from txmq.recover.spool import Opened, Spool, SpooledBatch
from txmq.recover.spool.directory import SpoolDirectory
from txmq.testing.simfs import SimFS

ROOT = "/srv/spool"
SESSION = bytes(range(16))
_nows = count(1_000)


def new_disk(capacity: int | None = None) -> SimFS:
    fs = SimFS(capacity=capacity)
    fs.makedirs("/srv")
    return fs.copy()


def directory_on(fs: SimFS) -> SpoolDirectory:
    """Segments are small, so that there are several."""
    return SpoolDirectory(ROOT, fs, segment_size=4096, preallocate=1024)


def batch(
    sequence: int, *bodies: bytes, topic: str = "orders", key: str = "a", session: bytes = SESSION
) -> SpooledBatch:
    """A batch of these bodies for partition 0."""
    messages = [Message(body, key=key) for body in bodies]
    encoded = encode(
        messages, producer_id=session, epoch=0, sequence=sequence, born_at=[1] * len(bodies)
    )
    return SpooledBatch.of(topic, 0, 1, encoded)


def store(spool: Spool, *batches: SpooledBatch) -> None:
    spool.stage(batches, next(_nows))
    spool.flush()


def waiting(spool: Spool) -> list[SpooledBatch]:
    return [batch for record in spool.read(spool.drained) for batch in record.batches]


def bodies(batches: Iterable[SpooledBatch]) -> list[bytes]:
    return [body for batch in batches for body in BatchView(batch.encoded).bodies]


def taken(fs: SimFS) -> list[Opened]:
    """The spools that another process finds on this disk."""
    return directory_on(fs).open_orphans(next(_nows))


def open_spools(opened: Sequence[Opened]) -> list[Spool]:
    assert all(found.error is None for found in opened), opened
    return [found.spool for found in opened if found.spool is not None]
