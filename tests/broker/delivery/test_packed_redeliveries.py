"""Redeliveries of neighbours come as one chunk, with the rows that are delivered."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import BrokerInMemory
from txmq.batch import RunView, encode, verify
from txmq.client.protocol.consumer.fetched import decode_chunk
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic
from txmq.model.message import Message
from txmq.wire.chunks import ACCEPTED, REDELIVERY, Chunk, unpack_chunks
from txmq.wire.data_requests import Fetch, Opcode, pack_fetch
from txmq.wire.frames import encode_frame

ROWS = 12
BODY = 1_000  # bytes: a batch of them is no small one


@pytest.mark.parametrize("singles", [False, True])
def test_neighbours_that_failed_come_as_one_chunk(singles: bool) -> None:  # noqa: FBT001
    broker = BrokerInMemory()
    broker.start()
    broker.do(CreateTopic("t", 1))
    bodies = [f"{row:04}".encode() * (BODY // 4) for row in range(ROWS)]
    for part in [[body] for body in bodies] if singles else [bodies]:
        messages = [Message(body, f"k{body[:4].decode()}") for body in part]
        number = int(part[0][:4])
        data = encode(messages, producer_id=b"p" * 16, epoch=0, sequence=number, born_at=1)
        broker.do(StoreBatch("t", 0, 0, data, verify(data)))
    client = broker.connect()
    joined: Any = client.call(
        "consumer.join", group="g", topics=["t"], instance="i", member="m", flood_keys=0
    )
    generation = joined["generation"]

    def fetch() -> list[Chunk]:
        wanted = Fetch(generation, 0, 1 << 20, 1_000, "g", "m", run=1_000)
        client.send(encode_frame(Opcode.FETCH, 9, pack_fetch(wanted)))
        broker.clock.advance(1)
        return [
            chunk for reply in client.replies() for chunk in unpack_chunks(reply.payload).chunks
        ]

    assert sum(chunk.rows for chunk in fetch()) == ROWS
    processed = {4, 7}  # the others fail: 0 to 3, 5 and 6, 8 to 11
    for offset in range(ROWS):
        place = {"group": "g", "member": "m", "generation": generation, "topic": "t"}
        place |= {"partition": 0, "offset": offset}
        if offset not in processed:
            client.call("consumer.nack", **place, delay_ms=0)
    chunks = fetch()
    flags = REDELIVERY | ACCEPTED
    assert all(chunk.flags == flags and chunk.attempt == 2 for chunk in chunks)
    got = {}
    for chunk in chunks:
        view = decode_chunk(chunk)
        assert isinstance(view, RunView) is singles
        for row in range(chunk.first_row, chunk.first_row + chunk.rows):
            got[chunk.base_offset + row] = (view.bodies[row], view.message_ids[row])
    assert [chunk.rows for chunk in chunks] == [4, 2, 4]
    assert {offset: body for offset, (body, _id) in got.items()} == {
        offset: body for offset, body in enumerate(bodies) if offset not in processed
    }
    assert len({message_id for _body, message_id in got.values()}) == ROWS - len(processed)
    whole = sum(map(len, bodies))
    assert sum(len(chunk.batch) for chunk in chunks) < 1.5 * whole, "not the batch for each piece"
