"""A log that travels as slices: every node has the same files."""

from __future__ import annotations

from random import Random

import pytest

from tests.store.log.harness import DIRECTORY, LOG_ID, new_disk, open_log
from tests.store.simfs import SimFS
from txmq.store.log.cut import cut_log
from txmq.store.log.integrity import KnownPositions
from txmq.store.log.log import Log
from txmq.store.log.segment import log_directory
from txmq.store.log.writer import Flush
from txmq.store.shared.records import Slice
from txmq.store.shared.slices import SliceReader, after, segment_bytes

SMALL = 200  # bytes a slice: most flushes take several
NONCE = b"n" * 16


def files(fs: SimFS) -> dict[str, bytes]:
    """Return the segments without the zeros written ahead."""
    folder = log_directory(DIRECTORY)
    found = {}
    for name in fs.listdir(folder):
        file = fs.open(f"{folder}/{name}")
        found[name] = file.pread(file.size(), 0).rstrip(b"\0")
    return found


def sliced(log: Log, flush: Flush, end: int) -> list[Slice]:
    """Return the slices that a node makes of a flush."""
    slices = []
    for data, begins in segment_bytes(flush, log.log_id, end):
        for at in range(0, len(data), SMALL):
            part = data[at : at + SMALL]
            whole = end + len(data) if at + SMALL >= len(data) else end
            slices.append(Slice(LOG_ID, 1, NONCE, end + at, whole, part, begins and not at))
        end += len(data)
    return slices


def a_flush(log: Log, random: Random) -> Flush:
    for _ in range(random.randint(1, 4)):
        head, attachment = random.randbytes(random.randint(1, 60)), random.randbytes(300)
        log.append(7, head, attachment, stored_at=random.randint(1, 99), boot_epoch=1)
    flush = log.cut()
    assert flush is not None
    return flush


def opened(fs: SimFS) -> Log:
    log, _ = open_log(fs)
    log.replicated = True
    return log


@pytest.mark.parametrize("seed", range(10))
def test_a_copy_has_the_same_files(seed: int) -> None:
    random, disks = Random(seed), (new_disk(), new_disk())
    leader, copy = (opened(fs) for fs in disks)
    reader = SliceReader(0, 1_000)
    for _ in range(30):
        end = leader.durable
        flush = a_flush(leader, random)
        parts = sliced(leader, flush, end)
        assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]
        if parts[0].whole == end and random.random() < 0.3:
            assert reader.add(parts[0]) is None
            reader.cut()  # a claim came, and the slices are written again behind it
        whole = [found for part in parts if (found := reader.add(part))]
        assert whole[-1].end == leader.end
        for one in whole:
            again = after(one, copy.end)
            assert again == one
            copy.copy(one.writes)
        taken = copy.cut()
        assert taken is not None
        for log, one in ((leader, flush), (copy, taken)):
            log.write(one, sync=False)
            assert log.complete(one) == log.end == leader.end
    assert len(files(disks[0])) > 3
    assert files(disks[0]) == files(disks[1])
    assert [record[:5] for record in copy.scan(copy.first)] == [
        record[:5] for record in leader.scan(leader.first)
    ]


def test_a_slice_without_data_completes_nothing() -> None:
    assert SliceReader(0, 1_000).add(Slice(LOG_ID, 1, NONCE, 64, 64, b"")) is None


@pytest.mark.parametrize("seed", range(10))
def test_a_copy_that_was_cut_goes_on_from_there(seed: int) -> None:
    random, fs = Random(seed), new_disk()
    log = opened(fs)
    ends = []
    for _ in range(12):
        log.write(a_flush(log, random), sync=False)
        ends.append(log.end)
    log.sync()
    records = [record[:5] for record in log.scan(log.first)]
    log.close()
    end = random.choice(ends)
    cut_log(fs, DIRECTORY, end)
    log, report = open_log(fs, positions=KnownPositions(end, 0, end))
    assert (report.end, report.torn) == (end, None)
    assert [record[:5] for record in log.scan(log.first)] == [
        record for record in records if record[1] < end
    ]
    log.write(a_flush(log, random))
