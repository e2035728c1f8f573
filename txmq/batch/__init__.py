"""Batches: messages laid out by column (docs/FORMATS.md 3).

The producer encodes a batch once; brokers store it and serve it as the same bytes.
`encode` and its variants make batches, `verify` checks received ones, `BatchView` and
`RunView` read them.
"""

from txmq.batch.codecs import NO_COMPRESSION, Compression, codec_library
from txmq.batch.cut import cut_rows
from txmq.batch.decode import (
    BatchView,
    edited_row,
    key_hash_at,
    key_hashes,
    largest_body,
    rows_with_tag,
    single_row,
)
from txmq.batch.encode import Cells, encode, encode_cells, encode_columns, encode_one
from txmq.batch.header import BatchHeader, Codec, has_expiry, read_header, with_producer
from txmq.batch.layout import Column, Layout, locate
from txmq.batch.run import RunView
from txmq.batch.split import RowBatch, delivery_times, split
from txmq.batch.verify import verify

__all__ = [
    "NO_COMPRESSION",
    "BatchHeader",
    "BatchView",
    "Cells",
    "Codec",
    "Column",
    "Compression",
    "Layout",
    "RowBatch",
    "RunView",
    "codec_library",
    "cut_rows",
    "delivery_times",
    "edited_row",
    "encode",
    "encode_cells",
    "encode_columns",
    "encode_one",
    "has_expiry",
    "key_hash_at",
    "key_hashes",
    "largest_body",
    "locate",
    "read_header",
    "rows_with_tag",
    "single_row",
    "split",
    "verify",
    "with_producer",
]
