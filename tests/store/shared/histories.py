"""Random histories of a partition, and what rule R has to make of each of them.

Writers claim, and write once their claim counts, as nodes do. Else they do worse: they
claim on what they read long ago, go on after they were deposed, send again what was
sent, and lose what they sent. Beside them a stranger writes whatever it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple
from uuid import UUID

from txmq.store.shared.records import Claim, Genesis, PartitionRecord, Slice
from txmq.store.shared.rules import Place

LOG_ID, OTHER_LOG = UUID(int=1), UUID(int=2)
START = 100
GENESIS = Genesis(LOG_ID, 3, START, 0)
STEPS = 60
Fold = Callable[[Place, int, int, PartitionRecord | None], tuple[Place, bool]]


class Read(NamedTuple):
    """What a reader made of a partition: its place, and what counted."""

    place: Place
    counted: list[PartitionRecord]


def read(fold: Fold, partition: list[PartitionRecord | None]) -> Read:
    """Fold a partition, with offsets that have gaps."""
    place, counted = Place(), []
    for offset, record in enumerate(partition):
        place, counts = fold(place, offset * 3, offset, record)
        if counts:
            assert record is not None
            counted.append(record)
    return Read(place, counted)


def log_of(counted: list[PartitionRecord]) -> bytes:
    """Return the log that these records make, by no more than their contents."""
    log = bytearray()
    whole = START
    for record in counted:
        if isinstance(record, Claim):
            del log[whole - START :]
        elif isinstance(record, Slice):
            log += record.data
            whole = record.whole
    return bytes(log)


@dataclass
class Writer:
    """A node that obeys nothing but the order of its own records."""

    number: int
    leads: bool = False
    epoch: int = 0
    nonce: bytes = bytes(16)
    end: int = START
    whole: int = START
    queue: list[PartitionRecord] = field(default_factory=list)
    sent: list[PartitionRecord] = field(default_factory=list)


class History:
    """The partition of one random history; `written` has slices by epoch and nonce."""

    def __init__(self, rng: Random, fold: Fold, writers: int = 3) -> None:
        self._rng, self._fold = rng, fold
        self.partition: list[PartitionRecord | None] = []
        self.written: dict[tuple[int, bytes], list[Slice]] = {}
        self._writers = [Writer(number) for number in range(writers)]
        self._made = 0
        steps = [self._claim, self._write, self._write, self._arrive, self._arrive, self._arrive]
        steps += [self._arrive_again, self._lose, self._be_hostile]
        self.partition += [None, GENESIS] if rng.random() < 0.5 else [GENESIS]
        for _ in range(rng.randrange(STEPS)):
            rng.choice(steps)(rng.choice(self._writers))

    def _claim(self, writer: Writer) -> None:
        upto = len(self.partition)
        if self._rng.random() < 0.2:  # it has not read everything
            upto = self._rng.randint(0, upto)
        place = read(self._fold, self.partition[:upto]).place
        self._made += 1
        writer.epoch, writer.nonce = place.epoch + 1, self._made.to_bytes(16, "big")
        writer.leads = False
        writer.queue.append(Claim(LOG_ID, writer.epoch, writer.nonce, str(writer.number)))

    def _write(self, writer: Writer) -> None:
        """Write a slice of whole records, or the beginning, middle or end of one."""
        if not writer.leads:
            return
        size = self._rng.choice([0, 1, 1, 2, 5])
        end = writer.end + size
        whole = self._rng.choice([end, end, writer.whole])
        data = self._rng.randbytes(size)
        begins = whole == end and self._rng.random() < 0.2
        record = Slice(LOG_ID, writer.epoch, writer.nonce, writer.end, whole, data, begins)
        writer.end, writer.whole = end, whole
        writer.queue.append(record)
        self.written.setdefault((writer.epoch, writer.nonce), []).append(record)

    def _arrive(self, writer: Writer) -> None:
        if writer.queue:
            record = writer.queue.pop(0)
            writer.sent.append(record)
            self.partition.append(record)
            place = read(self._fold, self.partition).place
            if isinstance(record, Claim) and place.is_owned_by(writer.epoch, writer.nonce):
                writer.leads, writer.end, writer.whole = True, place.end, place.whole

    def _arrive_again(self, writer: Writer) -> None:
        if writer.sent:
            self.partition.append(self._rng.choice(writer.sent))

    def _lose(self, writer: Writer) -> None:
        if writer.queue and self._rng.random() < 0.3:
            del writer.queue[0]

    def _be_hostile(self, writer: Writer) -> None:
        """Write what no node writes; without a nonce of its owner it never counts."""
        rng, epoch = self._rng, max(0, writer.epoch + self._rng.randint(-1, 2))
        end = writer.end
        self.partition.append(
            rng.choice(
                [
                    None,
                    GENESIS,
                    Genesis(OTHER_LOG, epoch, 0, 0),
                    Claim(OTHER_LOG, epoch, b"h" * 16, "h"),
                    Claim(LOG_ID, 2**32 - 1, b"h" * 16, "h"),
                    Slice(OTHER_LOG, writer.epoch, writer.nonce, end, end + 1, b"h"),
                    Slice(LOG_ID, epoch, b"h" * 16, end, end + 1, b"h"),
                    Slice(LOG_ID, writer.epoch, writer.nonce, end, end + 9, b"h"),
                    Slice(LOG_ID, writer.epoch, writer.nonce, end, START - 1, b"h"),
                ]
            )
        )


def check(rng: Random, fold: Fold) -> None:
    """Raise AssertionError unless a random history is a log without hole or double."""
    history = History(rng, fold)
    partition = history.partition
    place, counted = read(fold, partition)
    assert counted[0] == GENESIS
    assert place.end == START + len(log_of(counted))
    assert START <= place.whole <= place.end
    _check_owners(history, counted)
    cut = rng.randint(0, len(partition))
    before = read(fold, partition[:cut])
    assert counted[: len(before.counted)] == before.counted
    whole = max(0, before.place.whole - START)
    assert log_of(counted)[:whole] == log_of(before.counted)[:whole], "a whole record went away"


def _check_owners(history: History, counted: list[PartitionRecord]) -> None:
    """Check that of each owner a prefix of its data counts, each once, in order."""
    epoch, end, whole = GENESIS.epoch, START, START
    written: list[Slice] = []
    for record in counted[1:]:
        if isinstance(record, Claim):
            assert record.epoch == epoch + 1
            epoch, end = record.epoch, whole
            written = list(history.written.get((record.epoch, record.nonce), ()))
            continue
        assert isinstance(record, Slice)
        assert record in written, "what its owner has not written, or twice"
        if record.data:  # beats may come twice, and in another order
            data = [one for one in written if one.data]
            assert data[0] == record, "a hole, or a double"
            written.remove(record)
        assert record.start == end, "a hole, or a double"
        end, whole = record.end, record.whole
