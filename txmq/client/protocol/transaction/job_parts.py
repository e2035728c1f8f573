"""The bundle of one attempt of one task of a job, as the parts that are stored."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from hashlib import sha256

from txmq.client.protocol.sender.rows import (
    ROW_OVERHEAD,
    Rows,
    column_rows,
    estimated_size,
    micros_now,
)
from txmq.client.protocol.sender.topics import TopicCache
from txmq.client.protocol.transaction.buffer import Buffer, BuiltBatches
from txmq.client.protocol.transaction.parts import EPOCH, PART_BYTES, cut_batches
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ClientClosed, StaleTopic
from txmq.model import limits
from txmq.model.message import Message
from txmq.wire.bundle import NO_DIGEST, BundleDescription, BundlePart, PartBatch, pack_part


class JobParts:
    """Messages of a job's bundle that are not stored yet. A bundle may exceed this
    process's memory: its parts are stored as they are full.
    """

    def __init__(self, topics: TopicCache, description: BundleDescription) -> None:
        self._description: BundleDescription | None = description
        self._buffer = Buffer(topics)
        self._weight = self._parts = self._messages = 0
        self._digest = sha256()
        self._sealed = False
        self.token = new_token()

    @property
    def full(self) -> bool:
        """True if `steps` is due."""
        return self._weight >= PART_BYTES

    def add(self, topic: str, message: Message, partition: int | None = None) -> None:
        """Add a message. Raises LocalProtocolError, MessageTooLarge or ClientClosed."""
        self._require_open()
        self._buffer.add(topic, message, micros_now(), partition)
        self._weight += estimated_size(message)

    def add_columns(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None,
        tags: Sequence[str | None] | None,
        partition: int | None,
    ) -> None:
        """Add messages given as columns. Raises as `add` does."""
        rows = column_rows(bodies, keys, tags, micros_now())
        self.add_rows(topic, rows, sum(map(len, bodies)) + ROW_OVERHEAD * len(bodies), partition)

    def add_rows(self, topic: str, rows: Rows, size: int, partition: int | None) -> None:
        """Add rows of about so many bytes."""
        self._require_open()
        self._buffer.add_rows(topic, rows, partition)
        self._weight += size

    def steps(self, *, seal: bool) -> Generator[BundlePart, None, None]:
        """Yield each part that is to be stored now; with `seal` the last one completes
        the bundle.

        StaleTopic is thrown in once that topic was read anew: what is not stored goes
        to the partitions that it has now.
        """
        self._require_open()
        self._sealed = seal
        stored = BuiltBatches([], [])
        while True:
            before = len(stored.batches)
            # no keys are taken before the decision
            built = self._buffer.build(
                self.token, self._messages, limits.PART_ROWS, stored=stored.first(before)
            )
            parts = list(cut_batches(built.batches[before:], PART_BYTES, limits.PART_ROWS))
            try:
                for number, batches in enumerate(parts, 1):
                    yield from self._step(batches, seal=seal and number == len(parts))
                    stored = built.first(len(stored.batches) + len(batches))
            except StaleTopic:
                continue
            break
        self._messages += sum(map(len, built.message_indexes))
        self._buffer.clear()
        self._weight = 0

    def _step(
        self, batches: tuple[PartBatch, ...], *, seal: bool
    ) -> Generator[BundlePart, None, None]:
        """Yield the next part; the digest is of all parts but their headers."""
        part = BundlePart(
            self.token.bytes,
            self._parts,
            EPOCH,
            False,
            False,
            NO_DIGEST,
            self._description,
            batches,
        )
        digest = self._digest.copy()
        for piece in pack_part(part)[1:]:
            digest.update(piece)
        yield part._replace(sealed=True, digest=digest.digest()) if seal else part
        self._digest = digest
        self._parts += 1
        self._description = None  # only the first part has it

    def _require_open(self) -> None:
        if self._sealed:
            raise ClientClosed(
                f"Group {self.token} is complete", hint="begin another one with job.group()"
            )
