"""Log pins: positions of the log that are still needed although they lie below the
oldest batches of all partitions.

The batches of a partition are in the log in the order of their offsets. Those of a
transaction are the exception: they may have been stored long before they were
published. A batch stored more than `SLACK_BYTES` before gets a pin. So does the copy of
a failed message whose batch has expired. A pin is a row of table `log_pins`, by
position; the thing that it stands for may be gone already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State

SLACK_BYTES = 4 << 20  # a transaction that is decided at once needs no pin
PUBLISHED_BATCH = 0  # in place of a group id: the pin of a published batch


class LogPin(NamedTuple):
    """A pinned position: of a published batch, or of the copy of a group's failed
    message.
    """

    position: int
    group_id: int
    topic_id: int
    partition: int
    offset: int


def put(
    state: State, position: int, group_id: int, topic_id: int, partition: int, offset: int
) -> None:
    """Apply: pin a position."""
    state.tables[t.LOG_PINS].put(t.PIN_KEY.pack(position), (group_id, topic_id, partition, offset))


def drop(state: State, position: int) -> None:
    """Apply: remove the pin of a position, if it has one."""
    state.tables[t.LOG_PINS].delete(t.PIN_KEY.pack(position))


def get(state: State, position: int) -> LogPin | None:
    """Return the pin of a position, if it has one."""
    row: Any = state.tables[t.LOG_PINS].get(t.PIN_KEY.pack(position))
    return None if row is None else LogPin(position, *row)


def pins_below(state: State, position: int) -> Iterator[LogPin]:
    """Yield the pins below a position, lowest first."""
    for key, row in state.tables[t.LOG_PINS].range(b"", t.PIN_KEY.pack(position)):
        yield LogPin(t.PIN_KEY.unpack(key)[0], *row)
