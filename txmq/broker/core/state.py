"""State: what the broker knows, a fold of its log over `apply`.

Rules for this module: plain data and look-ups only. What grows with the number of messages is in `tables`; topics, producers and
consumer groups are plain objects, whose rows are written to the tables when they are marked dirty (`save`), so that the tables alone,
at one position of the log, are the whole state.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from txmq.broker.core import tables as t
from txmq.broker.core.consumers import Consumers
from txmq.errors import RequestRejected

if TYPE_CHECKING:
    from txmq.broker.core.events import Event

RECEIPTS_KEPT = 256  # a client has at most this many sends under way on one connection (ARCHITECTURE: delivery, message id)


class Rejected(NamedTuple):
    """The core's no: which error the client shall raise, and why."""

    error: type[RequestRejected]
    message: str
    hint: str = ""
    detail: dict[str, object] | None = None


class Outcome(NamedTuple):
    """What a decision comes to: the events to record, in order, and the reply that may go out once they are durable."""

    events: tuple[Event, ...] = ()
    reply: object = None


@dataclass(slots=True)
class Topic:
    """A topic. `ends` are its partitions' next offsets; `epoch` counts its shapes."""

    topic_id: int
    name: str
    ends: list[int]
    epoch: int = 1
    deleted: bool = False


class SendReceipt(NamedTuple):
    """What a producer learns of a stored batch; offset -1 = queued behind an undecided half of its key."""

    offset: int
    stored_at: int
    duplicate: bool = False


@dataclass(slots=True)
class Producer:
    """The last sends of one producing session: enough to answer a repeated one with its first receipt."""

    epoch: int
    last: int  # sequence of the last row stored
    seen_at: int
    receipts: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=RECEIPTS_KEPT))
    # (sequence of the batch's first row, offset, stored at)


@dataclass(slots=True)
class State:
    """Everything. `apply` is the only writer."""

    tables: t.Tables
    topics: dict[str, Topic] = field(default_factory=dict)
    topics_by_id: dict[int, Topic] = field(default_factory=dict)
    producers: dict[bytes, Producer] = field(default_factory=dict)
    consumers: Consumers = field(default_factory=Consumers)
    holds: Counter[tuple[int, int]] = field(default_factory=Counter)  # held (key, ticket) pairs by (topic id, partition)
    undecided: int = 0
    boot_epoch: int = 0
    next_topic_id: int = 1
    stored_at: int = 0
    dirty_topics: set[int] = field(default_factory=set)
    dirty_producers: set[bytes] = field(default_factory=set)
