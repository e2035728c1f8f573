"""Another client of a broker, in the words of the wire: it leaves halves and dead
letters for the commands to find.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from txmq.batch import encode_one
from txmq.client.blocking.connections.connection import Connection, dial
from txmq.client.protocol.address import parse_url
from txmq.client.protocol.conversation import Conversation, LogPin
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model.message import Message
from txmq.wire.chunks import Chunk, unpack_chunks
from txmq.wire.decider import Decider
from txmq.wire.group import NO_DIGEST, Description, Part, PartBatch, group_digest, pack_part
from txmq.wire.headers import Fetch, Opcode, pack_fetch

PATIENCE_S = 30.0


class Peer:
    """One connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def log_id(self) -> UUID:
        """The identity of the broker's log."""
        return self._connection.welcome.log_id

    def call(self, name: str, **args: object) -> dict[str, Any]:
        return self._connection.call(name, args, timeout=PATIENCE_S)

    def half(self, topic: str, body: bytes, decider: Decider, token: UUID | None = None) -> str:
        """Stores a half message in partition 0; returns its token."""
        name = (token or new_token()).bytes
        batch = encode_one(
            Message(body, "k"),
            producer_id=name,
            epoch=0,
            sequence=0,
            born_at=time.time_ns() // 1_000,
        )
        description, batches = Description(decider, "shop"), (PartBatch(topic, 0, 0, batch),)
        part = Part(
            name,
            0,
            0,
            sealed=True,
            commit=False,
            digest=NO_DIGEST,
            description=description,
            batches=batches,
        )
        payload = pack_part(part._replace(digest=group_digest([part])))
        self._connection.request(Opcode.GROUP, payload, timeout=PATIENCE_S)
        return name.hex()

    def dead_letters(self, group: str, topic: str, count: int) -> list[tuple[str, int, int]]:
        """Takes so many messages of the topic and gives up on each; returns where they
        were.
        """
        joined = self.call(
            "consumer.join", group=group, member="m-1", instance="i-1", topics=[topic]
        )
        claim = {"group": joined["group"], "member": "m-1", "generation": joined["generation"]}
        places: list[tuple[str, int, int]] = []
        while len(places) < count:
            for chunk in self._fetch(**claim):
                for offset in range(chunk.base_offset, chunk.base_offset + chunk.rows):
                    error = {"type": "ValueError", "text": "no such order", "fingerprint": "f-1"}
                    place = {"topic": topic, "partition": chunk.partition, "offset": offset}
                    self.call("consumer.nack", **claim, **place, dead=True, error=error)
                    places.append((topic, chunk.partition, offset))
        self.call("consumer.leave", group=joined["group"], member="m-1", instance="i-1")
        return sorted(places)

    def _fetch(self, group: str, member: str, generation: int) -> tuple[Chunk, ...]:
        request = pack_fetch(Fetch(generation, 5_000, 1 << 20, 100, group, member))
        return unpack_chunks(
            self._connection.request(Opcode.FETCH, request, timeout=PATIENCE_S)
        ).chunks


@contextmanager
def peer(url: str) -> Iterator[Peer]:
    """A peer for the block."""
    pin = LogPin()
    connection = dial(
        parse_url(url), lambda: Conversation("shop", pin), time.monotonic() + PATIENCE_S
    )
    try:
        yield Peer(connection)
    finally:
        connection.close()
