"""Batches as Arrow: the same messages, wrapped or collected by rows, whole or in
part.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from tests import strategies as our
from tests.spark.chunks import PRODUCER, chunk
from txmq.batch import BatchView, Codec
from txmq.errors import RemoteProtocolError
from txmq.model.message import Message
from txmq.wire.chunks import Chunk
from txmq_spark.source import arrow_messages
from txmq_spark.source.arrow_letters import LETTERS
from txmq_spark.source.arrow_messages import MESSAGES, OffsetRange, record_batches, wrap
from txmq_spark.source.data_source import LETTER_TYPES, MESSAGE_TYPES
from txmq_spark.source.logs import LOG

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
MESSAGE = st.builds(
    Message,
    body=st.binary(max_size=20),
    key=st.none() | TEXT.filter(bool),
    tag=st.none() | TEXT.filter(bool),
    headers=st.none() | st.dictionaries(TEXT, TEXT, min_size=1, max_size=3),
    deliver_at=st.none() | our.moments,
    expire_at=st.none() | our.moments,
    delay=st.none(),
    ttl=st.none(),
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def rows(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def expected(message: Message, offset: int, sequence: int) -> dict[str, Any]:
    return {
        "topic": "orders",
        "partition": 3,
        "offset": offset,
        "message_id": f"{PRODUCER.hex()}-{sequence}",
        "key": message.key,
        "tag": message.tag,
        "headers": list(message.headers.items()) if message.headers else None,
        "body": message.body,
        "attempt": 1,
        "born_at": EPOCH + timedelta(seconds=1),
        "stored_at": EPOCH + timedelta(seconds=2),
    }


@given(st.lists(MESSAGE, min_size=1, max_size=12), st.sampled_from(Codec), st.integers(0, 1 << 40))
def test_wrapped_columns_are_the_messages(messages: list[Message], codec: Codec, base: int) -> None:
    batch = wrap(chunk(messages, base, codec=codec, sequence=7), MESSAGES.names)
    batch.validate(full=True)
    assert batch.schema == MESSAGES
    assert batch.to_pylist() == [
        expected(message, base + n, 7 + n) for n, message in enumerate(messages)
    ]


@given(st.lists(st.lists(MESSAGE, min_size=1, max_size=9), min_size=1, max_size=6), st.data())
def test_collected_and_wrapped_rows_are_those_of_the_span(
    batches: list[list[Message]], data: st.DataObject
) -> None:
    messages = [message for batch in batches for message in batch]
    few = data.draw(st.integers(1, 10))
    start = data.draw(st.integers(0, len(messages)))
    end = data.draw(st.integers(start, len(messages)))
    chunks, base = [], 0
    for batch in batches:
        chunks.append(chunk(batch, base, sequence=base))
        base += len(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_messages, "SMALL_BATCH_ROWS", few)
        patch.setattr(arrow_messages, "BUFFER_ROWS", 4)
        found = rows(record_batches(chunks, OffsetRange("orders", 3, start, end), MESSAGES.names))
    assert found == [expected(messages[n], n, n) for n in range(start, end)]


def test_a_chunk_that_covers_some_rows_gives_only_those() -> None:
    messages = [Message(b"%d" % n) for n in range(100)]
    part = chunk(messages, 1_000)._replace(first_row=10, rows=80)
    found = rows(record_batches([part], OffsetRange("orders", 3, 0, 1 << 40), ["offset", "body"]))
    assert [row["offset"] for row in found] == list(range(1_010, 1_090))
    assert [row["body"] for row in found] == [b"%d" % n for n in range(10, 90)]


def test_bodies_keys_and_tags_stay_where_they_are() -> None:
    stored = chunk([Message(b"x" * 50, key=f"k{n}", tag="t") for n in range(1_000)])
    batch = wrap(stored, ["key", "tag", "body"])
    address = pa.py_buffer(stored.batch).address
    for column in batch.columns:
        _, offsets, data = column.buffers()
        assert all(
            address < buffer.address < address + len(stored.batch) for buffer in (offsets, data)
        )


def test_columns_that_are_not_requested_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise AssertionError("decompressed")

    monkeypatch.setattr(arrow_messages, "decompress", refuse)
    monkeypatch.setattr(BatchView, "bodies", property(refuse))
    packed = chunk([Message(b"a" * 100, key="k") for _ in range(200)], codec=Codec.ZSTD)
    single = chunk([Message(b"a" * 100, key="k")], 200, codec=Codec.ZSTD)
    found = rows(
        record_batches([packed, single], OffsetRange("orders", 3, 0, 201), ["key", "offset"])
    )
    assert len(found) == 201
    with pytest.raises(AssertionError, match="decompressed"):
        wrap(packed, ["body"])


def test_damaged_bodies_are_an_error_not_rows() -> None:
    stored = chunk([Message(b"a" * 100) for _ in range(200)], codec=Codec.ZSTD)
    at = stored.batch.rindex(b"\x28\xb5\x2f\xfd")
    damaged = stored.batch[: at + 4] + b"\xff" * 8 + stored.batch[at + 12 :]
    broken: Chunk = stored._replace(batch=damaged)
    with pytest.raises(RemoteProtocolError, match="bodies"):
        rows(record_batches([broken], OffsetRange("orders", 3, 0, 200), ["body"]))


def test_spark_takes_the_columns_as_they_are() -> None:
    """Spark's reader refuses Arrow types that differ in any detail."""
    assert to_arrow_schema(MESSAGE_TYPES, timezone="UTC") == MESSAGES.append(LOG)
    assert to_arrow_schema(LETTER_TYPES, timezone="UTC") == LETTERS.append(LOG)
