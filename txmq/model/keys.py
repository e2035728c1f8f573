"""Hashes of keys and tags, the same in producers, brokers and Spark.

XXH64 with seed 42 over the UTF-8 bytes is Spark SQL's `xxhash64(key)`: a Spark job
computes a key's partition without a request.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from xxhash import xxh64_intdigest

if TYPE_CHECKING:
    from collections.abc import Iterable

SEED = 42


def key_hash(key: str | bytes) -> int:
    """Return the signed 64-bit hash of a key, given as text or UTF-8 bytes."""
    unsigned = xxh64_intdigest(key.encode() if isinstance(key, str) else key, SEED)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def partition_of(key: str | bytes, partitions: int) -> int:
    """Return the partition of a key: Spark's `pmod(xxhash64(key), partitions)`."""
    return key_hash(key) % partitions


@lru_cache(maxsize=4096)
def tag_bit(tag: str) -> int:
    """Return a tag's bit in the tag filter of a batch, as a mask of 64 bits."""
    return 1 << xxh64_intdigest(tag.encode(), SEED) % 64


def tag_filter(tags: Iterable[str]) -> int:
    """Return the filter bits of these tags.

    A batch whose own filter shares no bit with them has none of the tags.
    """
    mask = 0
    for tag in set(tags):
        mask |= tag_bit(tag)
    return mask
