"""Dead letters as Arrow record batches.

They come as JSON, one by one, bodies in base64: letters are few, or there is a worse
problem than their speed.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from txmq_spark.columns import MESSAGES, TIME, arrow_column

LETTERS: Final = pa.schema(
    [
        *MESSAGES,
        pa.field("origin_topic", pa.string()),
        pa.field("origin_partition", pa.int32()),
        pa.field("origin_offset", pa.int64()),
        pa.field("group", pa.string()),
        pa.field("error_type", pa.string()),
        pa.field("error_text", pa.string()),
        pa.field("fingerprint", pa.string()),
        pa.field("attempts", pa.int32()),
        pa.field("first_failed_at", TIME),
        pa.field("dead_at", TIME),
        pa.field("consumer", pa.string()),
        pa.field("replays", pa.int32()),
        pa.field("deaths", pa.int32()),  # deliveries that ended without an answer
        pa.field("parked", pa.int64()),  # later messages of the key that wait behind it
        pa.field("reserved_by", pa.string()),  # the undecided transaction that replays it
    ]
)
AT_ONCE: Final = 1_000  # letters in a record batch
AT_ONCE_BYTES: Final = 16 << 20  # or bytes of bodies
PIECE: Final = 10_000  # letters for one task

Letter = Mapping[str, Any]  # as the broker tells it
Cell = Callable[[Letter], Any]


def _field(name: str) -> Cell:
    return lambda letter: letter[name]


# A letter keeps its place in the topic, so it stands where it came from.
CELLS: Final[dict[str, Cell]] = {
    **{name: _field(name) for name in LETTERS.names},
    "body": lambda letter: b64decode(letter["body"]),
    "attempt": _field("attempts"),
    "origin_topic": _field("topic"),
    "origin_partition": _field("partition"),
    "origin_offset": _field("offset"),
    "deaths": lambda letter: letter.get("deaths", 0),
    "parked": _field("parked_behind"),
}


def letter_batches(letters: Iterable[Letter], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The columns `names` of the letters, in their order."""
    schema = pa.schema([LETTERS.field(name) for name in names])
    for few in _in_lots(letters):
        arrays = [
            arrow_column(list(map(CELLS[name], few)), LETTERS.field(name).type) for name in names
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def ranges(numbers: Sequence[int], least: int) -> list[tuple[int, int]]:
    """Numbers of letters, in order, as ranges for tasks: over the first number, up to
    the second.
    """
    if not numbers:
        return [(0, 0)]
    size = min(PIECE, -(-len(numbers) // least))
    lasts = [*numbers[size - 1 : -1 : size], numbers[-1]]
    return list(zip([numbers[0] - 1, *lasts], lasts, strict=False))


def _in_lots(letters: Iterable[Letter]) -> Iterator[list[Letter]]:
    source = iter(letters)
    while first := next(source, None):
        lot, size = [first], len(first.get("body", ""))
        for letter in islice(source, AT_ONCE - 1):
            lot.append(letter)
            size += len(letter.get("body", ""))
            if size > AT_ONCE_BYTES:
                break
        yield lot
