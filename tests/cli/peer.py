"""A client of a broker that speaks the wire protocol, and leaves half messages and dead
letters.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from txmq.batch import encode_one
from txmq.client.blocking.connections.connection import Connection, open_connection
from txmq.client.protocol.address import parse_url
from txmq.client.protocol.conversation import Conversation, LogIdentity
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model.decider import Decider
from txmq.model.message import Message
from txmq.testing.wait import PATIENCE_S
from txmq.wire.bundle import (
    NO_DIGEST,
    BundleDescription,
    BundlePart,
    PartBatch,
    bundle_digest,
    pack_part,
)
from txmq.wire.chunks import Chunk, unpack_chunks
from txmq.wire.data_requests import Ack, AckedRange, Fetch, Opcode, pack_ack, pack_fetch

LONGEST_WAIT_MS = 60_000  # that a broker lets a fetch wait
NO_ORDER = {"type": "ValueError", "text": "no such order", "fingerprint": "f-1"}


class Peer:
    """One connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def log_id(self) -> UUID:
        """Return the identity of the log."""
        return self._connection.welcome.log_id

    def call(self, name: str, /, **args: object) -> dict[str, Any]:
        return self._connection.call(name, args, timeout=PATIENCE_S)

    def half(
        self,
        topic: str,
        body: bytes,
        decider: Decider,
        token: UUID | None = None,
        *,
        check_after_us: int = 0,
    ) -> str:
        """Store a half message in partition 0; return its token."""
        name = (token or new_token()).bytes
        batch = encode_one(
            Message(body, "k"),
            producer_id=name,
            epoch=0,
            sequence=0,
            born_at=time.time_ns() // 1_000,
        )
        description = BundleDescription(decider, "shop", check_after=check_after_us)
        batches = (PartBatch(topic, 0, 0, batch),)
        part = BundlePart(
            name,
            0,
            0,
            sealed=True,
            commit=False,
            digest=NO_DIGEST,
            description=description,
            batches=batches,
        )
        payload = pack_part(part._replace(digest=bundle_digest([part])))
        self._connection.request(Opcode.GROUP, payload, timeout=PATIENCE_S)
        return name.hex()

    def dead_letters(
        self,
        group: str,
        topic: str,
        count: int,
        errors: Sequence[dict[str, str]] = (NO_ORDER,),
        **how: object,
    ) -> list[tuple[str, int, int]]:
        """Make dead letters of this many messages of the topic, with errors that take
        turns; return their places. `how` they fail instead of for good.
        """
        joined = self.call(
            "consumer.join", group=group, member="m-1", instance="i-1", topics=[topic]
        )
        claim = {"group": joined["group"], "member": "m-1", "generation": joined["generation"]}
        places: list[tuple[str, int, int]] = []
        while len(places) < count:
            for chunk in self.fetch(**claim):
                for offset in range(chunk.base_offset, chunk.base_offset + chunk.rows):
                    error = errors[len(places) % len(errors)]
                    place = {"topic": topic, "partition": chunk.partition, "offset": offset}
                    self.call(
                        "consumer.nack", **claim, **place, error=error, **how or {"dead": True}
                    )
                    places.append((topic, chunk.partition, offset))
        self.call("consumer.leave", group=joined["group"], member="m-1", instance="i-1")
        return sorted(places)

    def fetch(
        self,
        group: str,
        member: str,
        generation: int,
        *,
        wait_ms: int = LONGEST_WAIT_MS,
        most: int = 100,
    ) -> tuple[Chunk, ...]:
        """Return what a member gets, at most so many messages."""
        request = pack_fetch(Fetch(generation, wait_ms, 1 << 20, most, group, member))
        return unpack_chunks(
            self._connection.request(Opcode.FETCH, request, timeout=PATIENCE_S)
        ).chunks

    def ack(self, group: str, member: str, generation: int, *ranges: AckedRange) -> None:
        """Acknowledge messages; wait until that is durable."""
        request = pack_ack(Ack(generation, group, member, ranges))
        self._connection.request(Opcode.ACK, request, timeout=PATIENCE_S)


@contextmanager
def peer(url: str) -> Iterator[Peer]:
    """A peer for the block."""
    pin = LogIdentity()
    connection = open_connection(
        parse_url(url), pin, lambda: Conversation("shop", pin), time.monotonic() + PATIENCE_S
    )
    try:
        yield Peer(connection)
    finally:
        connection.close()
