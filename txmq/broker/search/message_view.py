"""Messages and pages of lists as replies show them."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

from txmq.batch import BatchView
from txmq.broker.engine.log_reader import read_batches
from txmq.model.message import message_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.store.log.log import Log

PAGE_BYTES = 1 << 20  # of a list with users' texts, roughly; one entry may be larger
ENTRY_BYTES = 512  # of an entry's names and numbers
NESTED = frozenset((dict, list, tuple))


def fit_entries(entries: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Return as many entries as fit in a reply, at least one; the rest is for the next
    page.
    """
    size = 0
    for entry in entries:
        weight = weight_of(entry)
        if size and size + weight > PAGE_BYTES:
            return
        size += weight
        yield entry


def weight_of(entry: dict[str, Any]) -> int:
    """Return the bytes of an entry in a reply, roughly."""
    values = entry.values()
    texts = sum([len(value) for value in values if type(value) is str])
    nested = sum([len(str(value)) for value in values if type(value) in NESTED])
    return ENTRY_BYTES + texts + nested


def read_view(store: Log, position: int, length: int) -> BatchView:
    """Return the batch at a position. Raises CorruptRecord."""
    [data] = read_batches(store, [(position, length)])
    return BatchView(bytes(data))


def describe_message(view: BatchView, row: int, *, bodies: bool) -> dict[str, Any]:
    """Return the view of a message, wherever it stands."""
    fields = {
        "message_id": message_id(view.header.producer_id, view.header.sequence + row),
        "key": view.keys[row],
        "tag": view.tags[row],
        "headers": dict(view.headers[row]),
        "born_at": view.born_at[row],
        "size": view.size_of(row),
    }
    return fields | {"body": b64encode(view.bodies[row]).decode()} if bodies else fields
