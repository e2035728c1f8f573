"""Hashes of keys and tags, against constants computed by Spark.

Jobs and brokers must agree on them for ever.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies as our
from txmq.model.keys import key_hash, partition_of, tag_bit, tag_filter

SPARK = {  # key: xxhash64(key), pmod(xxhash64(key), 7), by PySpark 4.3
    "": (-7444071767201028348, 3),
    "a": (-8582455328737087284, 3),
    "o-1": (3793849554139455576, 3),
    "order-42": (8194710281358476350, 6),
    "Zürich": (-2199928141300491114, 5),
    "日本語": (-619341062884681239, 3),
    "😀": (-5869505314936196641, 6),
    "x" * 1024: (6506931083560440457, 1),
    "0123456789abcdef0123456789abcdef": (7380026953736478117, 6),
    "tab\tnul\0end": (-641576609151245729, 4),
}


@pytest.mark.parametrize("key", SPARK, ids=ascii)
def test_hash_and_partition_are_those_of_spark(key: str) -> None:
    assert (key_hash(key), partition_of(key, 7)) == SPARK[key]


@given(our.texts)
def test_text_and_its_bytes_have_one_hash(key: str) -> None:
    assert key_hash(key) == key_hash(key.encode())
    assert -(1 << 63) <= key_hash(key) < 1 << 63


@given(our.texts, st.integers(1, 4096))
def test_a_partition_is_never_negative_nor_beyond_the_last(key: str, partitions: int) -> None:
    assert 0 <= partition_of(key, partitions) < partitions


def test_tags_have_the_bits_they_always_had() -> None:
    assert {tag: tag_bit(tag) for tag in ("created", "paid", "Zürich")} == {
        "created": 1 << 39,
        "paid": 1 << 30,
        "Zürich": 1 << 22,
    }


@given(st.lists(our.texts))
def test_a_filter_has_a_bit_in_common_with_each_of_its_tags(tags: list[str]) -> None:
    mask = tag_filter(tags)
    assert mask < 1 << 64
    assert all(mask & tag_bit(tag) for tag in tags)
    assert bool(mask) == bool(tags)
