"""Batches of sends that wait for their receipts, and the receipts of stored batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

from txmq.client.protocol.sender.rows import Rows
from txmq.client.protocol.sender.topics import TopicCache
from txmq.errors import ProducerFenced, RemoteProtocolError, SequenceGap, StaleTopic
from txmq.model.message import Receipt
from txmq.wire.data_requests import SendReceipt, unpack_send_receipt

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5  # after Throttled, doubled each time
# Refusals of batches that are certainly not stored. The broker makes all others before
# it compares a batch with the stored ones.
DEFINITELY_NOT_STORED = StaleTopic | SequenceGap | ProducerFenced
# A placeholder until the message's own receipt is there.
NO_RECEIPT = Receipt("", "", 0, None, duplicate=False)


class StoredBatch(NamedTuple):
    """`count` messages that are stored next to one another.

    Their offsets begin at `offset`. It is None while they wait behind an undecided half
    message of one of their keys. Their ids are `<producer id>-<sequence>`, with
    consecutive sequences from that of `first_id`.
    """

    topic: str
    partition: int
    offset: int | None
    count: int  # type: ignore[assignment] # hides a method of tuples that nobody calls on a batch
    first_id: str
    duplicate: bool


class OutgoingBatch(NamedTuple):
    """Rows of one topic for one partition, in one frame.

    `places` are those of the rows among all rows of the call. `requested_partition` is
    the one that the caller named.
    """

    topic: str
    rows: Rows
    places: Sequence[int]
    requested_partition: int | None
    partition: int
    epoch: int


class SentBatch(NamedTuple):
    """A batch as it was sent. `doubtful`: an earlier attempt may have been stored."""

    outgoing: OutgoingBatch
    sequence: int
    encoded: bytes
    correlation: int = 0
    doubtful: bool = False


class ConfirmedBatch(NamedTuple):
    """A batch that the broker has stored. `prefix` begins its message ids."""

    outgoing: OutgoingBatch
    prefix: str
    sequence: int
    receipt: SendReceipt

    def receipts(self) -> list[Receipt]:
        """Return the receipts of its messages."""
        batch = self.outgoing
        return make_receipts(
            self.prefix,
            self.sequence,
            batch.topic,
            batch.partition,
            len(batch.rows),
            self.receipt,
        )

    def stored(self) -> StoredBatch:
        """Return what the caller of `send_many` gets."""
        batch, (offset, _stored_at, duplicate) = self.outgoing, self.receipt
        return StoredBatch(
            batch.topic,
            batch.partition,
            offset if offset >= 0 else None,
            len(batch.rows),
            f"{self.prefix}{self.sequence}",
            duplicate,
        )


def split_into_batches(
    topics: TopicCache,
    topic: str,
    rows: Rows,
    requested_partition: int | None,
    places: Sequence[int],
) -> Iterator[OutgoingBatch]:
    """Yield the batches of rows, those of each partition in the order of the rows."""
    metadata = topics.get(topic)
    for partition, chosen in topics.split_rows(metadata, rows, requested_partition).items():
        start = 0
        selected = rows if len(chosen) == len(rows) else rows.select(chosen)
        for batch in selected.split():
            end = start + len(batch)
            own = [places[place] for place in chosen[start:end]]
            yield OutgoingBatch(topic, batch, own, requested_partition, partition, metadata.epoch)
            start = end


def parse_receipt(payload: bytes) -> SendReceipt:
    """Return the receipt in a reply.

    Raises RemoteProtocolError where it is invalid: the batch may be stored.
    """
    try:
        return unpack_send_receipt(payload)
    except RemoteProtocolError as error:
        error.outcome = "unknown"
        raise


def make_receipts(
    prefix: str, sequence: int, topic: str, partition: int, count: int, receipt: SendReceipt
) -> list[Receipt]:
    """Return the receipts of the `count` messages of a batch."""
    offset, _stored_at, duplicate = receipt
    if count == 1:  # the usual case where messages go to many partitions
        return [
            Receipt(
                f"{prefix}{sequence}", topic, partition, offset if offset >= 0 else None, duplicate
            )
        ]
    ids = [f"{prefix}{row}" for row in range(sequence, sequence + count)]
    offsets = range(offset, offset + count) if offset >= 0 else repeat(None, count)
    return list(
        map(Receipt._make, zip(ids, repeat(topic), repeat(partition), offsets, repeat(duplicate)))
    )
