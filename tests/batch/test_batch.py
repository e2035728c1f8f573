"""Round trips of batches by every encoder, and Arrow over the same buffers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies as our
from txmq.batch import (
    BatchView,
    Codec,
    Column,
    RunView,
    encode,
    encode_columns,
    encode_one,
    key_hash_at,
    key_hashes,
    locate,
    read_header,
    rows_with_tag,
    single_row,
    verify,
)
from txmq.errors import LocalProtocolError, MessageTooLarge, TxmqError
from txmq.model import limits
from txmq.model.keys import key_hash
from txmq.model.message import Message, time_or_duration
from txmq.model.origin import ADDED

NOW = 1_700_000_000_000_000
PRODUCER = bytes(range(16))
ORIGIN: dict[str, Any] = {"producer_id": PRODUCER, "epoch": 3, "sequence": 1_000, "born_at": NOW}


def text_or_none(text: str | None) -> str | None:
    return text or None


def one_row(message: Message, sequence: int) -> bytes:
    return encode_one(message, producer_id=bytes(16), epoch=1, sequence=sequence, born_at=sequence)


@given(our.message_lists, our.codecs)
def test_a_view_gives_back_every_column(messages: list[Message], codec: Codec) -> None:
    view = BatchView(encode(messages, **ORIGIN, codec=codec))
    assert view.bodies == [m.body for m in messages]
    assert view.keys == [text_or_none(m.key) for m in messages]
    assert view.tags == [text_or_none(m.tag) for m in messages]
    assert view.headers == [m.headers or {} for m in messages]
    assert view.deliver_at == [time_or_duration(m.deliver_at, m.delay) for m in messages]
    assert view.expire_at == [time_or_duration(m.expire_at, m.ttl) for m in messages]
    assert view.born_at == [NOW] * len(messages)
    assert len(view) == len(messages)


@given(st.lists(our.batches | st.builds(one_row, our.messages, our.U32), min_size=1, max_size=5))
def test_a_run_has_the_columns_of_its_batches(batches: list[bytes]) -> None:
    views = [BatchView(batch) for batch in batches]
    rows = [len(view) for view in views]
    run = RunView(b"".join(batches), rows, list(map(len, batches)), range(len(batches)))
    for column in ("bodies", "keys", "tags", "headers", "born_at", "message_ids"):
        assert getattr(run, column) == list(
            chain.from_iterable(getattr(view, column) for view in views)
        )
    assert run.key_hashes() == list(chain.from_iterable(view.key_hashes() for view in views))
    assert run.stored_at == [number for number, count in enumerate(rows) for _ in range(count)]
    assert (len(run), run.tag_filter) == (
        sum(rows),
        reduce(or_, (view.tag_filter for view in views)),
    )


@given(our.message_lists, our.codecs)
def test_what_is_encoded_is_verified(messages: list[Message], codec: Codec) -> None:
    batch = encode(messages, **ORIGIN, codec=codec)
    header = verify(batch)
    assert header == read_header(batch)
    assert (header.count, header.length, header.producer_id) == (
        len(messages),
        len(batch),
        PRODUCER,
    )
    assert (header.epoch, header.sequence, header.born_at) == (3, 1_000, NOW)
    assert header.size == sum(len(m.body) for m in messages)


@given(our.messages)
def test_one_message_has_the_same_bytes_by_either_way(message: Message) -> None:
    assert encode_one(message, **ORIGIN) == encode([message], **ORIGIN)


@given(
    st.lists(
        st.tuples(st.binary(max_size=50), st.none() | our.keys, st.none() | our.tags), min_size=1
    )
)
def test_columns_have_the_same_bytes_as_messages(
    rows: list[tuple[bytes, str | None, str | None]],
) -> None:
    bodies, keys, tags = zip(*rows, strict=True)
    assert encode_columns(bodies, keys, tags, **ORIGIN) == encode(
        [Message(*row) for row in rows], **ORIGIN
    )


@given(our.message_lists, our.codecs)
def test_a_single_row_is_the_message_with_its_own_sequence(
    messages: list[Message], codec: Codec
) -> None:
    batch = encode(messages, **ORIGIN, codec=codec)
    view = BatchView(batch)
    for row, message in enumerate(messages):
        single = encode_one(
            message, producer_id=PRODUCER, epoch=3, sequence=1_000 + row, born_at=NOW
        )
        assert single_row(batch, row) == single_row(batch, row, view) == single


@given(our.batches)
def test_single_rows_of_any_batch_are_batches_with_the_same_ids(batch: bytes) -> None:
    ids = [BatchView(single_row(batch, row)).message_ids for row in range(read_header(batch).count)]
    assert [only for (only,) in ids] == BatchView(batch).message_ids
    for row in range(len(ids)):
        verify(single_row(batch, row))


def test_message_ids_count_from_the_sequence() -> None:
    view = BatchView(encode_columns([b"", b""], **ORIGIN))
    prefix = "000102030405060708090a0b0c0d0e0f"
    assert view.message_ids == [f"{prefix}-1000", f"{prefix}-1001"]


def test_times_of_birth_differ_by_row_and_the_header_has_the_youngest() -> None:
    origin = ORIGIN | {"born_at": [NOW, NOW + 7, NOW + 3]}
    batch = encode_columns([b"a", b"b", b"c"], **origin)
    assert BatchView(batch).born_at == [NOW, NOW + 7, NOW + 3]
    assert verify(batch).born_at == NOW + 7


def test_key_hashes_are_those_of_the_keys_and_none_without_one() -> None:
    keys = ["o-1", None, "Zürich", "o-1", ""]
    expected = [key_hash("o-1"), None, key_hash("Zürich"), key_hash("o-1"), None]
    assert key_hashes(encode_columns([b""] * 5, keys, **ORIGIN)) == expected
    assert key_hashes(encode_columns([b""] * 2, **ORIGIN)) == [None, None]


@pytest.mark.parametrize("keys", [["a", None, "ö" * 9, "a", "z"], ["k"], None, ["k" * 9] * 99])
def test_the_hash_of_one_key_is_read_from_a_few_bytes(keys: list[str | None] | None) -> None:
    count = 5 if keys is None else len(keys)
    batch, seen = encode_columns([b"x" * 1_000] * count, keys, **ORIGIN), []

    def read(at: int, size: int) -> bytes:
        seen.append(size)
        return batch[at : at + size]

    assert [key_hash_at(read, row) for row in range(count)] == key_hashes(batch)
    assert max(seen) <= 72, "the header, and where the key is"


def test_no_byte_behind_a_batch_is_read_for_a_key() -> None:
    batch, ends = encode_columns([b""], ["k"], **ORIGIN), []

    def read(at: int, size: int) -> bytes:
        ends.append(at + size)
        return batch[at : at + size]

    assert key_hash_at(read, 0) == key_hash("k")
    assert max(ends) <= len(batch)


def test_rows_are_chosen_by_their_exact_tags() -> None:
    tags = ["paid", None, "created", "paid", "shipped"]
    view = BatchView(encode_columns([b""] * 5, None, tags, **ORIGIN))
    assert rows_with_tag(view, {"paid"}) == [0, 3]
    assert rows_with_tag(view, {"created", "shipped"}) == [2, 4]
    assert rows_with_tag(view, {"absent"}) == []
    assert rows_with_tag(BatchView(encode_columns([b""], **ORIGIN)), {"paid"}) == []


def test_tags_that_share_a_bit_of_the_filter_are_distinguished() -> None:
    view = BatchView(encode_columns([b""] * 300, None, [f"tag-{n}" for n in range(300)], **ORIGIN))
    assert view.header.tag_filter.bit_count() < 65
    assert rows_with_tag(view, {"tag-7"}) == [7]


def test_absent_columns_take_no_space() -> None:
    plain = encode_columns([b"12345678"], [None], [""], **ORIGIN)
    assert read_header(plain).columns == 0
    assert len(plain) == 72 + 8 + 8 + 8  # header, offsets, body, born_at


def test_a_datetime_is_a_number_of_microseconds() -> None:
    when = datetime(2026, 11, 21, 9, 30, 0, 123_456, tzinfo=UTC)
    view = BatchView(
        encode([Message(b"", deliver_at=when, expire_at=when + timedelta(seconds=1))], **ORIGIN)
    )
    assert datetime.fromtimestamp(view.deliver_at[0] / 1e6, UTC) == when
    assert view.expire_at[0] - view.deliver_at[0] == 1_000_000


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.LZ4])
def test_compression_shrinks_what_repeats_and_leaves_the_rest_alone(codec: Codec) -> None:
    repeating = [b"the same again and again " * 4] * 100
    small, plain = (encode_columns(repeating, **ORIGIN, codec=c) for c in (codec, Codec.NONE))
    assert len(small) < len(plain) / 5
    assert read_header(small).codec == codec
    random = [key_hash(str(n)).to_bytes(8, "little", signed=True) for n in range(10)]
    assert encode_columns(random, **ORIGIN, codec=codec) == encode_columns(random, **ORIGIN)


def arrow(batch: bytes, column: Column, kind: pa.DataType) -> pa.Array:
    """Return the column as Arrow reads it, without a copy."""
    buffer, count = pa.py_buffer(batch), read_header(batch).count
    offsets = buffer.slice(column.offsets, 4 * (count + 1))
    return pa.Array.from_buffers(
        kind, count, [None, offsets, buffer.slice(column.start, column.end - column.start)]
    )


@given(our.message_lists)
def test_arrow_reads_the_columns_where_they_stand(messages: list[Message]) -> None:
    batch = encode(messages, **ORIGIN)
    layout, count = locate(batch, read_header(batch)), len(messages)
    bodies = arrow(batch, layout.body, pa.binary())
    bodies.validate(full=True)
    assert bodies.to_pylist() == [m.body for m in messages]
    for column, texts in (
        (layout.key, [m.key for m in messages]),
        (layout.tag, [m.tag for m in messages]),
    ):
        if column is not None:
            array = arrow(batch, column, pa.string())
            array.validate(full=True)
            assert array.to_pylist() == [text or "" for text in texts]
    births = pa.Array.from_buffers(
        pa.int64(), count, [None, pa.py_buffer(batch).slice(layout.born_at, 8 * count)]
    )
    assert births.to_pylist() == [NOW] * count


@given(our.batches)
def test_every_column_begins_at_a_multiple_of_eight(batch: bytes) -> None:
    layout = locate(batch, read_header(batch))
    columns = [column for column in layout[:4] if column is not None]
    starts = [at for column in columns for at in (column.offsets, column.start)] + list(layout[4:])
    assert [start % 8 for start in starts] == [0] * len(starts)
    assert len(batch) % 8 == 0


BAD: dict[str, tuple[Message, type[TxmqError], str]] = {
    "a body that is text": (Message("text"), LocalProtocolError, ".encode()"),  # type: ignore[arg-type]
    "a body that is a number": (Message(5), LocalProtocolError, ".encode()"),  # type: ignore[arg-type]
    "a body over the limit": (Message(bytes(limits.MESSAGE + 1)), MessageTooLarge, "4194304"),
    "a key that is a number": (Message(b"", key=7), LocalProtocolError, "text"),  # type: ignore[arg-type]
    "a key over the limit": (Message(b"", key="k" * 1_025), LocalProtocolError, "1024"),
    "a long key of few characters": (Message(b"", key="ü" * 513), LocalProtocolError, "1026"),
    "a key with half a character": (Message(b"", key="\ud800"), LocalProtocolError, "UTF-8"),
    "a tag over the limit": (Message(b"", tag="t" * 128), LocalProtocolError, "127"),
    "a tag with half a character": (Message(b"", tag="\udfff"), LocalProtocolError, "UTF-8"),
    "headers that are a list": (Message(b"", headers=["h"]), LocalProtocolError, "dict"),  # type: ignore[arg-type]
    "a header that is a number": (
        Message(b"", headers={"h": 1}),  # type: ignore[dict-item]
        LocalProtocolError,
        "dict of str",
    ),
    "a header with half a character": (
        Message(b"", headers={"h": "\ud800"}),
        LocalProtocolError,
        "UTF-8",
    ),
    "too many headers": (
        Message(b"", headers={str(n): "" for n in range(65)}),
        LocalProtocolError,
        "64",
    ),
    "headers over the limit": (
        Message(b"", headers={"h": "x" * 32_768}),
        LocalProtocolError,
        "32768",
    ),
    "a time before 1970": (Message(b"", deliver_at=-1), LocalProtocolError, "microseconds"),
    "a time in nanoseconds": (
        Message(b"", deliver_at=NOW * 1_000),
        LocalProtocolError,
        "microseconds",
    ),
    "a time as a fraction": (Message(b"", expire_at=1.5), LocalProtocolError, "microseconds"),  # type: ignore[arg-type]
    "a time without a zone": (
        Message(b"", deliver_at=datetime(2026, 1, 1)),  # noqa: DTZ001
        LocalProtocolError,
        "zone",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_values_are_refused_with_a_hint(case: str) -> None:
    message, error, hint = BAD[case]
    with pytest.raises(error, match=hint):
        encode([message, Message(b"good", key="k", tag="t")], **ORIGIN)
    with pytest.raises(error, match=hint):
        encode_one(message, **ORIGIN)


def test_everything_at_its_limit_is_encoded() -> None:
    many = {str(n): "" for n in range(limits.HEADER_PAIRS)}
    large = Message(
        bytes(limits.MESSAGE), "k" * limits.KEY, "t" * limits.TAG, many, limits.TIME, limits.TIME
    )
    for batch in (encode_one(large, **ORIGIN), encode([large, Message(b"")], **ORIGIN)):
        verify(batch)
        assert BatchView(batch).keys[0] == large.key


def test_headers_that_txmq_adds_do_not_count_for_the_limits_of_the_user() -> None:
    added = dict.fromkeys(ADDED, "x" * 127)
    for own in (
        {str(n): "" for n in range(limits.HEADER_PAIRS)},
        {"h": "x" * (limits.HEADERS - 6)},
    ):
        batch = encode_one(Message(b"", headers=own | added), **ORIGIN)
        verify(batch)
        assert BatchView(batch).headers == [own | added]
        with pytest.raises(LocalProtocolError, match="headers"):
            encode_one(Message(b"", headers=own | added | {"one": "more"}), **ORIGIN)
    with pytest.raises(LocalProtocolError, match="headers"):
        encode_one(Message(b"", headers={"tracestate": "x" * limits.ALL_HEADERS}), **ORIGIN)


def test_a_batch_over_the_limit_is_refused() -> None:
    with pytest.raises(MessageTooLarge, match="batch"):
        encode_columns([bytes(limits.MESSAGE)] * 4, **ORIGIN)
    with pytest.raises(LocalProtocolError, match="1000000 rows"):
        encode_columns([b""] * (limits.BATCH_ROWS + 1), **ORIGIN)


def test_a_batch_of_nothing_or_of_uneven_columns_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="rows"):
        encode([], **ORIGIN)
    with pytest.raises(LocalProtocolError, match="key"):
        encode_columns([b"a", b"b"], ["k"], **ORIGIN)
    with pytest.raises(LocalProtocolError, match="2 times"):
        encode_columns([b"a"], producer_id=PRODUCER, epoch=0, sequence=0, born_at=[1, 2])


def test_invalid_messages_and_producer_ids_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="Message"):
        encode([b"only a body"], **ORIGIN)  # type: ignore[list-item]
    with pytest.raises(LocalProtocolError, match="15 bytes"):
        encode([Message(b"a")], **ORIGIN | {"producer_id": bytes(15)})
    with pytest.raises(LocalProtocolError, match="15 bytes"):
        encode_one(Message(b"a"), **ORIGIN | {"producer_id": bytes(15)})
    with pytest.raises(LocalProtocolError, match="ints"):
        encode_columns([b"a"] * 3, **ORIGIN | {"born_at": [1, 1.5, 2]})


def test_bytes_like_bodies_become_bytes() -> None:
    expected = encode([Message(b"abc")], **ORIGIN)
    for body in (bytearray(b"abc"), memoryview(b"abc")):
        assert encode([Message(body)], **ORIGIN) == expected  # type: ignore[arg-type]
        assert encode_one(Message(body), **ORIGIN) == expected  # type: ignore[arg-type]
    wide = memoryview(b"12345678").cast("i")
    with pytest.raises(LocalProtocolError, match="larger items"):
        encode([Message(wide)], **ORIGIN)  # type: ignore[arg-type]
