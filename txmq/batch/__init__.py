"""Batches: messages laid out by column, encoded once by their producer, stored and
served as the same bytes.

docs/FORMATS.md 3 is the format. `encode` and its kin make batches, `verify` judges
received ones, `BatchView` reads.
"""

from txmq.batch.codecs import PLAIN, Compression, library
from txmq.batch.decode import (
    BatchView,
    key_hash_at,
    key_hashes,
    largest_body,
    rows_tagged,
    single_row,
)
from txmq.batch.encode import encode, encode_columns, encode_one
from txmq.batch.header import BatchHeader, Codec, expires, read_header, with_producer
from txmq.batch.layout import Column, Layout, locate
from txmq.batch.run import RunView
from txmq.batch.split import Single, deliveries, split
from txmq.batch.verify import verify

__all__ = [
    "PLAIN",
    "BatchHeader",
    "BatchView",
    "Codec",
    "Column",
    "Compression",
    "Layout",
    "RunView",
    "Single",
    "deliveries",
    "encode",
    "encode_columns",
    "encode_one",
    "expires",
    "key_hash_at",
    "key_hashes",
    "largest_body",
    "library",
    "locate",
    "read_header",
    "rows_tagged",
    "single_row",
    "split",
    "verify",
    "with_producer",
]
