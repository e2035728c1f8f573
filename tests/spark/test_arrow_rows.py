"""Rows as columns of Arrow, beside the same rows as objects of Python."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pyarrow as pa
import pytest

from txmq.batch import BatchView, Codec, Compression, encode, verify
from txmq.batch.cells import header_cell
from txmq.client.protocol.sender.rows import MessageRows
from txmq.errors import MessageTooLarge
from txmq.model.message import Message
from txmq_spark.plan.held_letters import LetterColumns
from txmq_spark.source.arrow_messages import SMALL_BATCH_ROWS
from txmq_spark.source.arrow_rows import SCHEMA, ArrowRows, batch_columns

PRODUCER, BORN = b"p" * 16, 7


def varied(chance: Random, count: int) -> list[Message]:
    """Return messages some of which have a key, a tag, headers, or no body."""
    return [
        Message(
            chance.randbytes(chance.choice([0, 1, 9, 300])),
            key=chance.choice([None, "k1", "k2", "é", "日本", f"own-{number}"]),
            tag=chance.choice([None, "red", "ö"]),
            headers=chance.choice([None, {"a": "b"}, {"tenant": f"t{number}"}]),
        )
        for number in range(count)
    ]


def arrow_rows(messages: list[Message]) -> ArrowRows:
    cells = [
        (body, (key or "").encode(), (tag or "").encode(), header_cell(headers))
        for body, key, tag, headers, *_ in messages
    ]
    arrays = [pa.array(column, pa.binary()) for column in zip(*cells, strict=True)]
    return ArrowRows(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA), BORN)


def object_rows(messages: list[Message]) -> MessageRows:
    return MessageRows(messages, [BORN] * len(messages))


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
@pytest.mark.parametrize("seed", range(4))
def test_the_batch_of_columns_is_that_of_messages(seed: int, codec: Codec) -> None:
    messages = varied(Random(seed), 200)
    plain = [message._replace(key=None, tag=None, headers=None) for message in messages]
    for some in (messages, messages[:1], plain):
        ours = arrow_rows(some).encode(PRODUCER, 3, Compression(codec))
        assert ours == object_rows(some).encode(PRODUCER, 3, Compression(codec))
        verify(ours)


@pytest.mark.parametrize("seed", range(4))
def test_columns_are_selected_and_split_like_messages(seed: int) -> None:
    messages = varied(Random(seed), 300)
    ours, theirs = arrow_rows(messages), object_rows(messages)
    places = ours.places(5, 4)
    assert places == theirs.places(5, 4)
    assert ours.row_keys() == theirs.row_keys()
    assert ours.largest_body() == theirs.largest_body()
    for chosen in places.values():
        few = ours.select(chosen)
        assert few.encode(PRODUCER, 0) == theirs.select(chosen).encode(PRODUCER, 0)
        batches = [rows.encode(PRODUCER, 0) for rows in few.split(7)]
        assert batches == [rows.encode(PRODUCER, 0) for rows in theirs.select(chosen).split(7)]


def test_the_size_of_rows_is_no_less_than_that_of_their_batch() -> None:
    rows = arrow_rows(varied(Random(1), 300))
    assert len(rows.encode(PRODUCER, 0)) <= rows.size + 128


def test_a_body_beyond_the_limit_is_refused() -> None:
    with pytest.raises(MessageTooLarge, match="a message of 9 bytes exceeds the limit of 8"):
        arrow_rows([Message(b"x" * 9)]).encode(PRODUCER, 0, max_body=8)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_parts_of_batches_come_as_they_were(codec: Codec) -> None:
    """Long and short ones, in their order."""
    chance = Random(5)
    messages = varied(chance, 8 * SMALL_BATCH_ROWS)
    data = encode(messages, producer_id=PRODUCER, epoch=0, sequence=0, born_at=1, codec=codec)
    view = BatchView(data)
    columns, found = LetterColumns(), []
    cuts = sorted(chance.sample(range(len(messages)), 30))
    for start, end in [*pairwise(cuts), (0, len(messages))]:
        columns.add(view, start, end)
        found += messages[start:end]
    rows = columns.rows()
    assert columns.count == len(rows) == len(found)
    assert rows.columns.equals(arrow_rows(found).columns)


def test_a_batch_without_keys_tags_and_headers_has_empty_ones() -> None:
    data = encode(
        [Message(b"b"), Message(b"")], producer_id=PRODUCER, epoch=0, sequence=0, born_at=1
    )
    assert batch_columns(BatchView(data)).equals(arrow_rows([Message(b"b"), Message(b"")]).columns)
