"""Hashes of keys and tags, the same in producers, brokers and Spark.

XXH64 with seed 42 over the UTF-8 bytes is Spark SQL's `xxhash64(key)`: a job finds a
key's partition without asking.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from xxhash import xxh64_intdigest

if TYPE_CHECKING:
    from collections.abc import Iterable

SEED = 42


def key_hash(key: str | bytes) -> int:
    """The hash of a key, text or its UTF-8 bytes: a signed 64-bit integer."""
    unsigned = xxh64_intdigest(key.encode() if isinstance(key, str) else key, SEED)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def partition_of(key: str | bytes, partitions: int) -> int:
    """The partition of a key in a topic of that many: Spark's `pmod(xxhash64(key),
    partitions)`.
    """
    return key_hash(key) % partitions


@lru_cache(maxsize=4096)
def tag_bit(tag: str) -> int:
    """The bit of a tag in the tag filter of a batch, as a mask of 64 bits."""
    return 1 << xxh64_intdigest(tag.encode(), SEED) % 64


def tag_filter(tags: Iterable[str]) -> int:
    """The bits of all those tags. A batch whose filter shares no bit with it has none
    of the tags.
    """
    mask = 0
    for tag in set(tags):
        mask |= tag_bit(tag)
    return mask
