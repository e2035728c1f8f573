"""State: what the broker knows, a fold of its log over `apply`.

Rules for this module: plain data and look-ups only. What grows with the number of
messages is in `tables`; topics, producers and consumer groups are plain objects, whose
rows are written to the tables when they are marked dirty (`persist`), so that the
tables alone, at one position of the log, are the whole state.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sortedcontainers import SortedDict

from txmq.core.state.group_registry import Consumers
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import Event
    from txmq.core.state.visibility import Gate
    from txmq.errors import RequestRejected

RECEIPTS_KEPT = 256  # sends that a client may have under way on one connection (ARCHITECTURE 5)


class Rejected(NamedTuple):
    """The core's no: which error the client shall raise, and why."""

    error: type[RequestRejected]
    message: str
    hint: str = ""
    detail: dict[str, object] | None = None


class Outcome(NamedTuple):
    """What a command comes to: the events to record, in order, and the reply that may
    go out once they are durable.

    `attachment` belongs to the first event, where that has one. `early`: the events
    need not be durable before the reply goes out, because losing them does no more than
    a lost reply would (first leases, heartbeats).
    """

    events: tuple[Event, ...] = ()
    reply: object = None
    attachment: bytes = b""
    early: bool = False


class TopicSettings(NamedTuple):
    """What was set for one topic; -1 and "" are what the broker has, 0 is no limit.

    `flush` is "sync" or (milliseconds, messages). Dead letters of the topic's messages
    go after `letters_us`.
    """

    retention_us: int = -1
    retention_bytes: int = -1
    letters_us: int = -1
    policy: str = ""  # "delete" or "archive"
    flush: tuple[int, int] | str = ""
    message_bytes: int = -1
    writable: bool = True
    readable: bool = True


DEFAULTS = TopicSettings()


@dataclass(slots=True)
class Topic:
    """A topic. `ends` are its partitions' next offsets, `firsts` the first ones that
    are kept, `sizes` the bytes of the batches between them; `epoch` counts its shapes;
    `growths` are the ends that its partitions had whenever they became more.
    """

    topic_id: int
    name: str
    ends: list[int]
    epoch: int = 1
    deleted: bool = False
    growths: list[tuple[int, ...]] = field(default_factory=list)
    settings: TopicSettings = DEFAULTS
    firsts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    stored: int = field(
        default=0, compare=False
    )  # bytes published since the start (not part of the fold)

    def __post_init__(self) -> None:
        self.grow(len(self.ends))

    def grow(self, partitions: int) -> None:
        """Have so many partitions, the new ones empty."""
        for numbers in (self.ends, self.firsts, self.sizes):
            numbers.extend([0] * (partitions - len(numbers)))


class SendReceipt(NamedTuple):
    """What a producer learns of a stored batch; offset -1 = queued behind an undecided
    half of its key, or delayed.
    """

    offset: int
    stored_at: int
    duplicate: bool = False


@dataclass(slots=True)
class Producer:
    """The last sends of one producing session: enough to answer a repeated one with its
    first receipt.
    """

    epoch: int
    last: int  # sequence of the last row stored
    seen_at: int
    receipts: deque[tuple[int, int, int]] = field(
        default_factory=lambda: deque(maxlen=RECEIPTS_KEPT)
    )
    # (sequence of the batch's first row, offset, stored at)


class State:
    """Everything. `apply` is the only writer."""

    def __init__(self, tables: t.Tables) -> None:
        self.tables = tables
        self.entries = tables[t.ENTRIES]
        self.transactions = tables[t.TRANSACTIONS]
        self.topics: dict[str, Topic] = {}
        self.topics_by_id: dict[int, Topic] = {}
        self.producers: dict[bytes, Producer] = {}
        self.consumers = Consumers()
        self.holds: Counter[tuple[int, int]] = (
            Counter()
        )  # rows of table `holds` by (topic id, partition)
        self.gates: dict[tuple[int, int], Gate] = {}  # table `gates`, by (topic id, partition)
        self.backlog = 0  # rows of table `backlog`
        self.undecided = 0
        self.undecided_spans: SortedDict[bytes, int] = (
            SortedDict()
        )  # by the beginnings of their tokens (`undecided`)
        self.delayed = 0  # rows of table `delayed`
        self.listed: Counter[int] = Counter()  # rows of table `listed` by kind
        self.swept = (
            b""  # the old transactions before this token have been looked through (`sweeping`)
        )
        self.last_forgotten_epoch = 0  # the highest of an instance that was forgotten
        self.lost_to = (
            0  # where the last span of the log ends that was lost to a repair; 0 = nothing was
        )
        self.lost_before = (
            0  # when all that was lost had been stored; 0 = before whatever comes next
        )
        self.boot_epoch = 0
        self.next_topic_id = 1
        self.stored_at = 0
        self.published: set[int] = (
            set()
        )  # topics with new entries; whoever wakes readers clears it (not part of the fold)
        self.dirty_topics: set[int] = set()
        self.dirty_producers: set[bytes] = set()
