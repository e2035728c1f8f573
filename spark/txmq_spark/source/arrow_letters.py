"""Dead letters as Arrow record batches.

The broker lists letters as JSON, with bodies in base64. That is slow, but letters are
few.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from txmq_spark.source.arrow_messages import MESSAGES, TIME, arrow_column

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
        pa.field("deaths", pa.int32()),  # deliveries during which the consumer was lost
        pa.field("parked", pa.int64()),  # later messages of its key that wait behind it
        pa.field("reserved_by", pa.string()),  # the undecided transaction that replays it
        pa.field("state", pa.string()),  # as selections of letters have it
        pa.field("damaged", pa.string()),  # why its message cannot be read; null = it can
        pa.field("number", pa.int64()),  # of this death, in its group
        pa.field("plan", pa.string()),  # the unfinished replay plan that holds it
        # why its body does not fit the schema of its topic; null = it does, or has none
        pa.field("unfit", pa.string()),
    ]
)
BATCH_LETTERS: Final = 1_000  # letters in a record batch
BATCH_BODY_BYTES: Final = 16 << 20  # or bytes of bodies

Letter = Mapping[str, Any]  # as the broker lists it
Cell = Callable[[Letter], Any]


def _field(name: str) -> Cell:
    return lambda letter: letter[name]


def letter_state(letter: Letter) -> str:
    """Return the state of a letter as selections have it: the broker lists one that an
    undecided transaction replays as dead, like an open one.
    """
    if letter["state"] == "dead":
        return "replaying" if letter["reserved_by"] else "open"
    return str(letter["state"])


# A letter keeps its place in its topic, so the origin is that place.
CELLS: Final[dict[str, Cell]] = {
    **{name: _field(name) for name in LETTERS.names},
    "body": lambda letter: b64decode(letter["body"]) if "body" in letter else None,
    "attempt": _field("attempts"),
    "origin_topic": _field("topic"),
    "origin_partition": _field("partition"),
    "origin_offset": _field("offset"),
    "parked": _field("parked_behind"),
    "state": letter_state,
    "damaged": lambda letter: letter.get("damaged"),
    "unfit": lambda letter: letter.get("unfit"),
}


def letter_batches(letters: Iterable[Letter], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the columns `names` of the letters, in their order."""
    schema = pa.schema([LETTERS.field(name) for name in names])
    for few in _in_batches(letters):
        arrays = [
            arrow_column(list(map(CELLS[name], few)), LETTERS.field(name).type) for name in names
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _in_batches(letters: Iterable[Letter]) -> Iterator[list[Letter]]:
    source = iter(letters)
    while first := next(source, None):
        few, size = [first], len(first.get("body", ""))
        for letter in islice(source, BATCH_LETTERS - 1):
            few.append(letter)
            size += len(letter.get("body", ""))
            if size > BATCH_BODY_BYTES:
                break
        yield few
