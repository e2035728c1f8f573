"""Rows are split, routed and get receipts in order; importing txmq loads little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import txmq
from tests import strategies as our
from txmq.batch import BatchView, encode
from txmq.client.protocol.sender.rows import (
    BATCH_BYTES,
    BATCH_ROWS,
    ColumnRows,
    MessageRows,
    batch_bounds,
    estimated_size,
)
from txmq.client.protocol.sender.topics import TopicCache
from txmq.client.protocol.transaction.buffer import Buffer
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import RemoteProtocolError
from txmq.testing.wait import PATIENCE_S

ROOT = Path(__file__).parents[3]
TEXT = st.text(max_size=20).filter(lambda text: text.isprintable())
MESSAGES = st.builds(
    txmq.Message,
    st.binary(max_size=50),
    key=st.none() | TEXT,
    tag=st.none() | TEXT,
    headers=st.none() | st.dictionaries(TEXT, TEXT, max_size=3),
    deliver_at=st.none() | our.moments,
    expire_at=st.none(),
    delay=st.none(),
    ttl=st.none(),
)


def topics(partitions: int = 5) -> TopicCache:
    return TopicCache(
        lambda name, _within: {
            "topics": [{"name": name, "partitions": partitions, "epoch": 1, "topic_id": 1}]
        },
        None,
    )


@given(st.lists(st.integers(0, BATCH_BYTES * 2), max_size=40))
def test_batches_cover_all_rows_in_order_and_only_a_single_row_exceeds_the_size(
    weights: list[int],
) -> None:
    pieces = list(batch_bounds(weights))
    assert [weight for start, end in pieces for weight in weights[start:end]] == weights
    assert all(end - start == 1 or sum(weights[start:end]) <= BATCH_BYTES for start, end in pieces)


def test_a_batch_has_no_more_rows_than_its_limit() -> None:
    assert [end - start for start, end in batch_bounds([0] * (2 * BATCH_ROWS + 1))] == [
        BATCH_ROWS,
        BATCH_ROWS,
        1,
    ]


@given(st.lists(MESSAGES, min_size=1, max_size=10))
def test_no_message_is_larger_in_a_batch_than_its_estimated_size(
    messages: list[txmq.Message],
) -> None:
    batch = encode(messages, producer_id=bytes(16), epoch=0, sequence=0, born_at=1)
    assert len(batch) <= 200 + sum(map(estimated_size, messages))


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            MESSAGES | st.lists(st.binary(max_size=5), min_size=1, max_size=4),
        )
    )
)
def test_receipts_of_a_bundle_are_in_the_order_of_the_sends(
    sends: list[tuple[str, txmq.Message | list[bytes]]],
) -> None:
    buffer, token, sent = Buffer(topics()), new_token(), list[tuple[str, bytes]]()
    for topic, content in sends:
        if isinstance(content, txmq.Message):
            buffer.add(topic, content, 1, None)
            sent.append((topic, content.body))
        else:
            buffer.add_columns(topic, ColumnRows(content, None, None, 1), None)
            sent += [(topic, body) for body in content]
    built = buffer.build(token)
    views = [(batch.topic, BatchView(batch.batch)) for batch in built.batches]
    bodies = {
        name: (topic, body)
        for topic, view in views
        for name, body in zip(view.message_ids, view.bodies, strict=True)
    }
    receipts = built.receipts(token, [None] * len(built.batches))
    assert [bodies[got.message_id] for got in receipts] == sent


@given(st.lists(MESSAGES, min_size=1, max_size=30), st.integers(1, 9))
def test_a_key_always_goes_to_one_partition(messages: list[txmq.Message], partitions: int) -> None:
    known = topics(partitions)
    shape = known.get("orders")
    spread = known.split_rows(shape, MessageRows(messages, [1] * len(messages)))
    assert sorted(place for places in spread.values() for place in places) == list(
        range(len(messages))
    )
    for partition, places in spread.items():
        for key in {messages[place].key for place in places if messages[place].key}:
            assert known.choose_partition(shape, key) == partition


@pytest.mark.parametrize(
    "found", [{}, {"topics": []}, {"topics": [{"name": "orders"}]}, {"topics": 5}]
)
def test_an_invalid_description_is_a_fault_of_the_broker(found: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError, match="orders"):
        TopicCache(lambda _name, _within: found, None).get("orders")


def test_importing_txmq_loads_no_client_and_a_client_no_database_and_no_reactor() -> None:
    script = """
import sys, txmq
assert not [name for name in sys.modules if name.startswith(("txmq.client", "pydantic", "twisted"))]
client = txmq.connect("txmq://127.0.0.1:1")
others = {"psycopg2", "twisted.internet.reactor", "lmdb", "pyarrow", "zstandard"}
assert not others & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=PATIENCE_S)


def test_an_unknown_name_of_txmq_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        txmq.no_such_name  # type: ignore[attr-defined]  # noqa: B018  # the test
