"""The state of a broker: a fold of its log over `apply`.

This module holds plain data. What grows with the number of messages is in `tables`.
Topics, producers and consumer groups are plain objects. Their rows are written to the
tables when they are marked dirty (`core/persistence.py`), so that the tables alone are
the whole state at one position of the log.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.state.group_registry import GroupRegistry
from txmq.core.state.plans import PlanRegistry
from txmq.core.state.trial_outcomes import TrialOutcomes
from txmq.core.state.users import UserRegistry
from txmq.model.cluster import NOT_LISTED
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.model.decider import DatabaseId
    from txmq.model.topic_partition import TopicPartition

# Topics of the broker itself. Their ids are above all that count up, those after a
# restore of the log included.
FIRST_OWN_ID = (1 << 31) - 1_024
MAX_RECEIPTS = 256  # sends that a client may have in flight on one connection


class TopicSettings(NamedTuple):
    """Settings of one topic; -1 and "" stand for the broker's default, 0 for no limit.

    `flush` is "sync" or (milliseconds, messages). Dead letters of the topic's messages
    expire after `letters_us`. `schema` is the JSON Schema of bodies; its changes follow
    the rule `compatibility`, "backward", "forward" or "none".
    """

    retention_us: int = -1
    retention_bytes: int = -1
    letters_us: int = -1
    policy: str = ""  # "delete" or "archive"
    flush: tuple[int, int] | str = ""
    message_bytes: int = -1
    writable: bool = True
    readable: bool = True
    schema: str = ""
    compatibility: str = ""
    note: str = ""  # an operator's, for people


DEFAULT_SETTINGS = TopicSettings()


@dataclass(slots=True)
class Topic:
    """A topic. The lists have an item for each partition.

    `start_offsets` are the first offsets that retention has left, `end_offsets` the
    next to be given. `partition_bytes` counts the bytes of the batches between them.
    `epoch` counts the topic's shapes; `ends_at_growth` are the end offsets at each
    growth, `ends_at_restore` those at each restore of the log, with its epoch.
    """

    topic_id: int
    name: str
    end_offsets: list[int]
    epoch: int = 1
    deleted: bool = False
    ends_at_growth: list[tuple[int, ...]] = field(default_factory=list)
    settings: TopicSettings = DEFAULT_SETTINGS
    start_offsets: list[int] = field(default_factory=list)
    partition_bytes: list[int] = field(default_factory=list)
    made_at: int = 0
    ends_at_restore: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    # since the start of the broker; not part of the fold
    published_bytes: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        self.grow(len(self.end_offsets))

    @property
    def counted_partitions(self) -> int:
        """The number of partitions that count against the limit of all topics."""
        return len(self.end_offsets) if self.topic_id < FIRST_OWN_ID else 0

    def grow(self, partitions: int) -> None:
        """Add empty partitions up to this number."""
        for numbers in (self.end_offsets, self.start_offsets, self.partition_bytes):
            numbers.extend([0] * (partitions - len(numbers)))


@dataclass(slots=True)
class ProducerState:
    """The last sends of one producing session, so that a repeated send gets its first
    receipt again.
    """

    epoch: int
    last: int  # sequence of the last row stored
    seen_at: int
    owner: str = ""  # the user that it belongs to; "" = nobody's
    # (sequence of a batch's first row, offset, stored at)
    receipts: deque[tuple[int, int, int]] = field(
        default_factory=lambda: deque(maxlen=MAX_RECEIPTS)
    )


class Restore(NamedTuple):
    """A restore: the incarnation of the log that it began, with the position at which
    this one left the one before.

    `stored_to` is the time of the last record before that position. `accepted`: an
    operator has dealt with what was lost.
    """

    incarnation: bytes
    position: int
    at: int
    stored_to: int
    epoch: int
    accepted: bool = False


class VisibilityBarrier(NamedTuple):
    """The offset at which readers of a partition stop: a row of table `barriers`.

    `lifted_at` is the log position that must be durable before readers pass; 0 = the
    barrier is up.
    """

    offset: int
    token: bytes
    lifted_at: int = 0


class State:
    """All that the rules read. Only `apply` changes it."""

    def __init__(self, tables: t.Tables) -> None:
        # Plain look-ups: rules look tables up several times per command.
        self.tables = {name: tables[name] for name in t.NAMES}
        self.entries = tables[t.ENTRIES]
        self.transactions = tables[t.TRANSACTIONS]
        self.failed_messages = tables[t.FAILED]
        self.letters = tables[t.LETTERS]
        self.topics: dict[str, Topic] = {}
        self.topics_by_id: dict[int, Topic] = {}
        self.partitions = 0  # of all topics
        self.schema_characters = 0  # of all topics
        self.producers: dict[bytes, ProducerState] = {}
        self.groups = GroupRegistry()
        self.plans = PlanRegistry()
        self.users = UserRegistry()
        self.logs = NOT_LISTED  # that have topics in common with this one
        # number of rows of table `holds`
        self.held_keys: Counter[TopicPartition] = Counter()
        self.barriers: dict[TopicPartition, VisibilityBarrier] = {}
        self.backlog = 0  # number of rows of table `backlog`
        self.undecided = 0
        # number of undecided tokens by their first bytes, by the database that decides
        # them, None = any other decider (`core/transactions`)
        self.undecided_spans: dict[DatabaseId | None, dict[bytes, int]] = {}
        self.delayed_count = 0  # rows of table `delayed`
        self.listed: Counter[int] = Counter()  # rows of table `listed`, by kind
        # token up to which the expiry of outcomes has scanned the transactions
        self.expired_to = b""
        self.last_forgotten_epoch = 0  # the highest of a forgotten producer instance
        # end of the last span of the log that a repair gave up; 0 = none
        self.lost_log_end = 0
        # time before which all lost records were stored; 0 = not known before the next
        # start
        self.lost_before_time = 0
        # (position, end) of what was lost, though the tables knew the records
        self.lost_spans: tuple[tuple[int, int], ...] = ()
        self.restores: tuple[Restore, ...] = ()  # of the log from backups, the last one last
        self.backed_up_at = 0  # time up to which a backup has the log; 0 = there was none
        self.boot_epoch = 0
        self.next_topic_id = 1
        self.stored_at = 0  # the newest time of a record, unless it was set back
        # microseconds by which the broker's time may be ahead of the true one
        self.doubted = 0
        self.trials = TrialOutcomes()
        # not part of the fold: the engine clears it when it wakes readers
        self.topics_with_new_entries: set[int] = set()
        self.dirty_topics: set[int] = set()
        self.dirty_producers: set[bytes] = set()

    def certain(self, now: int) -> int:
        """Return a time that is past without doubt, where the broker's time is `now`.

        What is removed for its age, and who is refused for it, goes by this.
        """
        return max(now - self.doubted, 0)
