"""Columns: many batches in flight, in producer sessions of their own."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any
from uuid import uuid4

from txmq.client.aio.core import AioCore
from txmq.client.aio.loop import gather
from txmq.client.protocol.sender.accumulator import SideRequest
from txmq.client.protocol.sender.batches import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    ConfirmedBatch,
    OutgoingBatch,
    StoredBatch,
    parse_receipt,
    split_into_batches,
)
from txmq.client.protocol.sender.rows import Rows
from txmq.errors import StaleTopic, Throttled, TxmqError
from txmq.wire.data_requests import Opcode, send_header

MAX_IN_FLIGHT = 32  # batches of one call; the broker remembers the receipts of 256


async def send_columns(
    core: AioCore, topic: str, rows: Rows, partition: int | None
) -> list[StoredBatch]:
    """Send rows and return the stored batches, as `send_many` does."""
    await core.topic(topic)
    unsent = list(split_into_batches(core.topics, topic, rows, partition, range(len(rows))))
    stored: list[StoredBatch] = []
    pause, deadline = FIRST_PAUSE_S, core.seconds() + core.settings.delivery_timeout
    while unsent:
        confirmed, error = await _send_batches(core, unsent[:MAX_IN_FLIGHT])
        stored += [batch.stored() for batch in confirmed]
        del unsent[: len(confirmed)]
        asked = max(pause, error.retry_after_s) if isinstance(error, Throttled) else 0.0
        if asked and core.seconds() + asked < deadline:
            await core.sleep(asked)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        elif isinstance(error, StaleTopic):
            await core.refresh(topic)
            unsent = [
                new
                for old in unsent
                for new in split_into_batches(
                    core.topics, topic, old.rows, old.requested_partition, old.places
                )
            ]
        elif error is not None:
            if stored:  # a repetition of the whole call would store these twice
                error.outcome = "unknown"
            raise error
    return stored


async def _send_batches(
    core: AioCore, batches: Sequence[OutgoingBatch]
) -> tuple[list[ConfirmedBatch], TxmqError | None]:
    """Send batches in a new producer session.

    Return those that are stored, and the error of the first other one.
    """
    producer_id, sequence = uuid4().bytes, 0
    requests: list[Coroutine[Any, Any, bytes]] = []
    sequences: list[int] = []
    for batch in batches:
        header = send_header(batch.topic, batch.partition, batch.epoch)
        encoded = batch.rows.encode(producer_id, sequence, core.topics.compression)
        requests.append(core.send_request(SideRequest(Opcode.SEND, (header, encoded))))
        sequences.append(sequence)
        sequence += len(batch.rows)
    confirmed: list[ConfirmedBatch] = []
    answers = await gather(requests)
    prefix = f"{producer_id.hex()}-"
    for batch, first, answer in zip(batches, sequences, answers, strict=True):
        if isinstance(answer, TxmqError):  # nor is any later one stored: a session has no gaps
            return confirmed, answer
        if isinstance(answer, Exception):
            raise answer
        confirmed.append(ConfirmedBatch(batch, prefix, first, parse_receipt(answer)))
    return confirmed, None
