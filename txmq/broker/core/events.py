"""Events: what the log holds. Each is the outcome of a decision, never an input to be judged again.

Tuples inside an event come back from the log as plain tuples: `apply` never asks them for an attribute.

An event's body in the log is the MessagePack array of its fields, in order, then its attachment, if it has one
(docs/FORMATS.md 4.1). Fields are appended with a default, never removed; a number is never used again.
Numbers 1..63 are topics, messages and transactions, 64..127 consumers (`consumer_events`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgpack


class Place(NamedTuple):
    """Where and when an event stands in the log."""

    position: int
    end: int  # position just after the record
    attachment: int  # position of the first byte of the attachment
    stored_at: int
    boot_epoch: int


Event = tuple[Any, ...]  # one of the NamedTuples registered below

EVENTS: dict[int, type[Event]] = {}
KINDS: dict[type[Event], int] = {}
E = TypeVar("E", bound=type[Event])


def event(kind: int) -> Callable[[E], E]:
    """Class decorator: give an event its number; two events of one number are an error at import."""

    def register(cls: E) -> E:
        if kind in EVENTS:
            raise ValueError(f"event number {kind} is taken by {EVENTS[kind].__name__}")
        EVENTS[kind] = cls
        KINDS[cls] = kind
        return cls

    return register


def encode(event: Event) -> bytes:
    """The head of an event's record: its fields as one MessagePack array."""
    return bytes(msgpack.packb(event))


def decode(kind: int, head: bytes | memoryview) -> Event:
    """The event of a record. Raises KeyError for a number this version does not know."""
    return EVENTS[kind](*msgpack.unpackb(head, use_list=False))


@event(1)
class Booted(NamedTuple):
    """The broker started: a new boot epoch; nobody is connected and nothing is leased any more."""

    boot_epoch: int
    broker: str


@event(2)
class TopicCreated(NamedTuple):
    """A topic came to be, declared or on first use."""

    topic_id: int
    name: str
    partitions: int


@event(3)
class TopicGrown(NamedTuple):
    """A topic has more partitions from now on; `epoch` counts its shapes from 1."""

    topic_id: int
    partitions: int
    epoch: int


@event(4)
class TopicDeleted(NamedTuple):
    """A topic was deleted; its id is never used again."""

    topic_id: int


@event(5)
class TopicAltered(NamedTuple):
    """A topic has other settings from now on, a `TopicSettings`."""

    topic_id: int
    settings: tuple[Any, ...]


@event(6)
class FirstsMoved(NamedTuple):
    """Retention: messages below these offsets, (partition, offset), are kept no longer.

    `passed` are the groups that had not processed all of them: (group id, partition, messages).
    """

    topic_id: int
    firsts: tuple[tuple[int, int], ...]
    passed: tuple[tuple[int, int, int], ...] = ()


@event(7)
class MessagesCopied(NamedTuple):
    """Single messages out of batches that are kept no longer were copied. Attachment: batches of one row, joined."""

    lengths: tuple[int, ...]


@event(10)
class RowsRepointed(NamedTuple):
    """Rows of table `moved`, (group id, topic id, partition, offset, position, length), are found at a durable copy.

    `unpinned` are positions at which nothing is kept any more.
    """

    rows: tuple[tuple[int, int, int, int, int, int], ...]
    unpinned: tuple[int, ...] = ()


@event(8)
class BatchStored(NamedTuple):
    """A plain batch was published at once. Attachment: the batch."""

    topic_id: int
    partition: int
    base_offset: int
    count: int  # type: ignore[assignment]  # nobody counts in this tuple
    length: int
    tag_filter: int
    producer: bytes
    epoch: int
    sequence: int


@event(9)
class BatchQueued(NamedTuple):
    """A plain batch met a held key: it is stored and waits for its turn. Attachment: the batch.

    Its ticket is its own position; `hashes` are its keys, which it holds from now on like a half message.
    """

    topic_id: int
    partition: int
    count: int  # type: ignore[assignment]  # nobody counts in this tuple
    length: int
    tag_filter: int
    producer: bytes
    epoch: int
    sequence: int
    hashes: tuple[int, ...]


class Delay(NamedTuple):
    """What is kept of a message until it is due; `carried` is its time or span of delivery, as the sender wrote it."""

    carried: int
    sequence: int
    key_hash: int | None


class StoredBatch(NamedTuple):
    """A batch of a group that is stored but has no offsets yet: `start` counts from the attachment's first byte.

    One with a `delay` is a single message; once its group is published it waits for its time.
    """

    topic_id: int
    partition: int
    start: int
    length: int
    count: int  # type: ignore[assignment]  # nobody counts in this tuple
    tag_filter: int
    hashes: tuple[int, ...]  # of its keys, where the decider makes holds; else empty
    delay: Delay | None = None


@event(16)
class PartStored(NamedTuple):
    """A part of a group was stored. Attachment: its batches, joined.

    Part 0 brings the description; the last part carries the seal, and with it the group's ticket: the position of
    that record. A local group comes sealed and decided: `offsets` are its batches' base offsets, part by part
    published at once.
    """

    token: bytes
    part: int
    batches: tuple[StoredBatch, ...]
    sealed: bool
    digest: bytes
    epoch: int
    decider: tuple[object, ...]
    service: str
    actions: tuple[tuple[object, ...], ...]
    check_at: int  # first check-back; 0 = none
    offsets: tuple[int, ...] | None = None
    participants: tuple[tuple[object, ...], ...] = ()  # of a home broker's group: all branches
    commit: bool = False  # decided as it was stored, by a foreign manager in one phase
    slice: int = 0  # of a large group: keys in a piece of it; 0 = its batches are kept in its row
    check_after: int = 0  # from the seal to the first check-back, where the seal is yet to come


class Released(NamedTuple):
    """What a decision made visible: a transaction (by token) or a queued batch (by ticket), and its batches' base
    offsets.
    """

    token: bytes | None
    ticket: int
    offsets: tuple[int, ...]


@event(17)
class Decided(NamedTuple):
    """A transaction was decided, once and for ever, and with it everything that had waited for just this.

    `outcome` is a `Decision`'s number. `released` are the groups and queued batches whose last obstacle it was, in
    the order of publication; a committed transaction that still waits for an earlier ticket is not among them.
    """

    token: bytes
    outcome: int
    by: str
    reason: str
    released: tuple[Released, ...]
    later: tuple[
        tuple[int, bytes | None], ...
    ] = ()  # (ticket, token): perhaps free now, too many or too large for here


@event(18)
class CheckPlanned(NamedTuple):
    """The next check-back of an undecided transaction; `answered` counts the checks that a checker answered or
    refused.
    """

    token: bytes
    check_at: int
    tries: int
    in_doubt: bool


@event(19)
class ConflictSeen(NamedTuple):
    """Somebody asked for the other outcome of a decided transaction; it was refused and is kept for the operator."""

    token: bytes
    outcome: int
    by: str
    reason: str = ""


@event(20)
class JobDecided(NamedTuple):
    """One decision over many groups: the winners are published, in the order named; every other group of the job is
    rolled back.
    """

    token: bytes
    outcome: int
    by: str
    winners: tuple[bytes, ...]
    losers: tuple[bytes, ...]
    released: tuple[Released, ...]
    later: tuple[tuple[int, bytes | None], ...] = ()
    in_steps: bool = False  # the groups themselves are dealt with by `JobGroupsDone`, some at a time


@event(21)
class TransactionsForgotten(NamedTuple):
    """Outcomes older than the time they are kept were dropped; their tokens are refused from now on by their age.

    `looked`: all transactions with tokens before this one have been looked through.
    """

    tokens: tuple[bytes, ...]
    looked: bytes = b""


@event(22)
class TombstoneWritten(NamedTuple):
    """A token that was never heard of was rolled back for good: whatever comes for it later is not stored."""

    token: bytes
    decider: tuple[object, ...]
    by: str


@event(23)
class HeuristicSeen(NamedTuple):
    """A branch was decided by hand, or found otherwise than decided; it is kept until somebody has dealt with it.

    `branch` is its gid, "" = the broker's own; `decided` a `Decision`'s number.
    """

    token: bytes
    branch: str
    decided: int
    found: str
    operator: str
    reason: str


@event(25)
class HeuristicForgotten(NamedTuple):
    """Somebody has dealt with the heuristics of a transaction."""

    token: bytes
    operator: str
    reason: str


@event(26)
class InstanceRegistered(NamedTuple):
    """A process took the place of all earlier ones of its producer instance; `epoch` counts them from 1."""

    service: str
    instance: str
    epoch: int


@event(24)
class ProducerForgotten(NamedTuple):
    """Producers idle for too long are no longer remembered."""

    producers: tuple[bytes, ...]


@event(27)
class GroupWaits(NamedTuple):
    """A committed large group met an earlier ticket in this piece of it: it is looked at again when that lets go."""

    token: bytes
    piece: int


@event(28)
class PublicationBegun(NamedTuple):
    """A large group has its offsets, a run in each of its partitions; readers stop before them until the last piece.

    `bases` are the first offsets, in the order of the group's partitions.
    """

    token: bytes
    bases: tuple[int, ...]


@event(29)
class PieceDone(NamedTuple):
    """One piece of a large group was dealt with: its keys taken, its batches published, or all of it dropped.

    `later` are those who had waited for its keys and are perhaps free now.
    """

    token: bytes
    piece: int
    later: tuple[tuple[int, bytes | None], ...] = ()


@event(30)
class BacklogDone(NamedTuple):
    """Those who were perhaps free have been looked at; the ones that were are published."""

    tickets: tuple[int, ...]
    released: tuple[Released, ...]
    later: tuple[tuple[int, bytes | None], ...] = ()


@event(31)
class GroupRefused(NamedTuple):
    """The first of several parts came too late, for a job that is decided or a source that is past it: nothing of the
    group is stored, now or later. All of its parts are told that its state is `state`.
    """

    token: bytes
    decider: tuple[object, ...]
    service: str
    by: str
    state: int


@event(32)
class ConflictsForgotten(NamedTuple):
    """Contradictions recorded before this position are no longer kept."""

    before: int


@event(33)
class JobsForgotten(NamedTuple):
    """The decisions of these jobs are no longer kept."""

    tokens: tuple[bytes, ...]


@event(34)
class InstancesSeen(NamedTuple):
    """Processes of these producer instances (keys of table `instances`) are connected."""

    keys: tuple[bytes, ...]


@event(35)
class InstancesForgotten(NamedTuple):
    """Producer instances (keys of table `instances`) of which nobody was connected for too long are forgotten."""

    keys: tuple[bytes, ...]


@event(36)
class JobGroupsDone(NamedTuple):
    """So many more groups of a decided job were dealt with: first its winners in their order, then the others."""

    token: bytes
    groups: int
    released: tuple[Released, ...]
    later: tuple[tuple[int, bytes | None], ...] = ()
