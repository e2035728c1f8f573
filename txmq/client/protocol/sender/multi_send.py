"""Send requests: one or several batches in one frame, and the receipts in its reply.

Batches for many partitions are small. A frame, a record and a reply for each would cost
more than the batches themselves. Each batch keeps its own sequence and its own answer,
so that after a refusal or a lost connection it may share its frame with others.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from txmq.client.protocol.conversation import Conversation, Payload, reply_payload
from txmq.client.protocol.sender.accumulator import Accumulator
from txmq.client.protocol.sender.batcher import Batcher, SequencedBatch
from txmq.client.protocol.sender.batches import make_receipts, parse_receipt
from txmq.client.protocol.sender.promise import Promise
from txmq.errors import RemoteProtocolError
from txmq.model.measures import counted
from txmq.model.message import Receipt
from txmq.wire.batched import BatchedReply, pack_requests, unpack_replies
from txmq.wire.data_requests import Opcode
from txmq.wire.hello import BrokerLimits
from txmq.wire.status import OK

MAX_BATCHES = 128  # in one frame: half of those that may be in flight
TARGET_BYTES = 64 << 10  # of one frame: more is sent as several frames, in flight at once


@dataclass(slots=True)
class SenderStats:
    """Counters of a sender."""

    messages: int = 0  # stored
    frames: int = 0  # sent, repetitions not counted
    coalesced: int = 0  # messages that shared their frame with others
    resent: int = 0  # batches sent again
    refused: int = 0  # batches refused, those behind another refused one included
    connections: int = 0
    failed: int = 0  # messages without a receipt
    spooled: int = 0  # messages that went to the spool
    bundles: int = 0  # frames of several bundles, or of several decisions
    requests: int = 0  # bundles and decisions in those frames


@dataclass(slots=True)
class SendRequest:
    """Batches in one frame, in the order of their sequences.

    `futures` are those of all messages, in order; `size` is that of all batches.
    """

    batches: list[SequencedBatch]
    futures: list[Promise[Receipt]] = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        if len(self.batches) == 1:
            pending = self.batches[0].pending
            self.futures, self.size = pending.futures, pending.size
        else:
            self.futures = [future for batch in self.batches for future in batch.pending.futures]
            self.size = sum([batch.pending.size for batch in self.batches])

    @property
    def opcode(self) -> int:
        return Opcode.SENDS if len(self.batches) > 1 else Opcode.SEND

    @property
    def payload(self) -> Payload:
        if len(self.batches) == 1:
            return self.batches[0].payload
        return b"".join(pack_requests([b"".join(batch.payload) for batch in self.batches]))

    @property
    def appended_at(self) -> float:
        """The time at which the last of its messages was appended."""
        return max([batch.appended_at for batch in self.batches])

    @property
    def released(self) -> bool:
        """True once its messages occupy the window no more.

        The batches keep this, all or none of them: later frames may combine them
        otherwise.
        """
        return self.batches[-1].pending.released

    @released.setter
    def released(self, released: bool) -> None:
        for batch in self.batches:
            batch.pending.released = released

    def answers(self, payload: bytes) -> list[Receipt] | None:
        """Return the results of the futures, or None where any batch is refused.

        Raises RemoteProtocolError for an invalid reply.
        """
        if len(self.batches) == 1:
            return _parse_receipts(self.batches[0], payload)
        receipts: list[Receipt] = []
        for batch, (status, own) in self.batch_answers(payload):
            if status != OK:
                return None
            receipts += _parse_receipts(batch, own)
        return receipts

    def batch_answers(self, payload: bytes) -> Iterator[tuple[SequencedBatch, BatchedReply]]:
        """Return each batch with its own answer. Raises as `answers`."""
        try:
            answers = unpack_replies(payload, len(self.batches))
        except RemoteProtocolError as error:
            error.outcome = "unknown"  # the batches may be stored
            raise
        return zip(self.batches, answers, strict=True)


class SendQueue:
    """Batches to send next: first those in `retries`, unchanged, then new ones."""

    def __init__(self, batcher: Batcher, accumulator: Accumulator, stats: SenderStats) -> None:
        self._batcher, self._accumulator, self._stats = batcher, accumulator, stats
        self.retries: deque[SequencedBatch] = deque()

    @property
    def empty(self) -> bool:
        """True where no drained batch waits."""
        return not (self.retries or self._batcher.queue)

    def next(self, conversation: Conversation, room: int) -> SendRequest | None:
        """Return the next request, of up to `room` batches.

        It has several batches while they are small.
        """
        max_batches = min(MAX_BATCHES, room)
        batches: list[SequencedBatch] = []
        size = new_messages = 0
        try:
            while (
                size < TARGET_BYTES and len(batches) < max_batches and not (batches and self.empty)
            ):
                repeated = len(self.retries)
                batch = self._next(conversation.limits)
                if batch is None:
                    break
                batches.append(batch)
                size += batch.pending.size
                new_messages += 0 if repeated else len(batch.pending.messages)
        except BaseException:  # an interrupt must not lose them
            self.requeue(batches)
            raise
        self._stats.frames += new_messages > 0
        self._stats.coalesced += new_messages if len(batches) > 1 or new_messages > 1 else 0
        return SendRequest(batches) if batches else None

    def _next(self, limits: BrokerLimits) -> SequencedBatch | None:
        if self.retries:
            self._stats.resent += 1
            return self.retries.popleft()
        if not self._batcher.queue:  # not earlier: batches grow until they are drained
            self._batcher.queue.extend(self._accumulator.drain(ready_only=True))
        return self._batcher.next(limits)

    def requeue(self, batches: Sequence[SequencedBatch]) -> None:
        """Send batches again, before all others."""
        self.retries.extendleft(reversed(batches))


def batch_receipts(batch: SequencedBatch, answer: BatchedReply) -> list[Receipt]:
    """Return the receipts of a batch's messages. Raises the error of a refusal."""
    return _parse_receipts(batch, reply_payload(answer))


def _parse_receipts(batch: SequencedBatch, payload: bytes) -> list[Receipt]:
    receipt, pending = parse_receipt(payload), batch.pending
    topic, partition, _epoch, _explicit = pending.destination
    return make_receipts(
        batch.prefix, batch.sequence, topic, partition, len(pending.futures), receipt
    )


def warn_of_unsent(messages: Mapping[str, int]) -> None:
    """Warn of messages by topic that have no receipt when their process ends.

    By a Python warning, because most programs show it without any configuration.
    """
    if not messages:
        return
    topics = ", ".join(f"{number} of {topic!r}" for topic, number in sorted(messages.items()))
    warnings.warn(
        "the process ends without a receipt for "
        f"{counted(sum(messages.values()), 'message')} ({topics}), which may be lost:"
        " close the client, which waits for them",
        RuntimeWarning,
        stacklevel=1,
    )
