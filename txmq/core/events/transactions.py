"""Events of transactions, jobs and producer instances.

Each is the outcome of a decision, and what must happen together is one event (see
`events.base`). `txmq log dump` prints the names of classes and fields, so these keep
the words of the wire: a "group" is a bundle, a "slice" the number of keys in a piece.
"""

from __future__ import annotations

from typing import NamedTuple

from txmq.core.events.base import event
from txmq.core.events.delays import Delay


class UnpublishedBatch(NamedTuple):
    """A batch of a bundle that is stored but has no offsets yet.

    `start` counts from the attachment's first byte. A batch with a `delay` is a single
    message, which waits for its time once its bundle is published.
    """

    topic_id: int
    partition: int
    start: int
    length: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    tag_filter: int
    hashes: tuple[int, ...]  # of its keys
    delay: Delay | None


@event(16)
class PartStored(NamedTuple):
    """A part of a bundle was stored. Attachment: its batches, joined.

    Part 0 brings the description and the bundle's ticket: the position of its record.
    The last part carries the seal. A bundle may be published as it is stored: then
    `offsets` are the base offsets of its batches.
    """

    token: bytes
    part: int
    batches: tuple[UnpublishedBatch, ...]
    sealed: bool
    digest: bytes
    epoch: int
    decider: tuple[object, ...]
    service: str
    actions: tuple[tuple[object, ...], ...]
    check_at: int  # first check-back; 0 = none
    offsets: tuple[int, ...] | None = None
    participants: tuple[tuple[object, ...], ...] = ()  # of a home broker's bundle: all branches
    commit: bool = False  # committed with the seal
    slice: int = 0  # of a large bundle: keys per piece; 0 = its batches are in its row
    check_after: int = 0  # of an open bundle: from the seal to the first check-back
    origin: bytes = b""  # the process to ask first, where a checker decides; empty = unknown


class Released(NamedTuple):
    """A transaction (by token) or a queued batch (by ticket) that a decision published,
    with the base offsets of its batches.
    """

    token: bytes | None
    ticket: int
    offsets: tuple[int, ...]


@event(17)
class Decided(NamedTuple):
    """A transaction was decided, and what had waited only for it was published.

    `outcome` is a `Decision`'s number. `released` are the bundles and queued batches
    published by this record, in their order. A committed transaction that still waits
    for an earlier ticket is not among them. `later` are tickets for the backlog.
    """

    token: bytes
    outcome: int
    by: str
    reason: str
    released: tuple[Released, ...]
    later: tuple[tuple[int, bytes | None], ...] = ()  # (ticket, token)


@event(11)
class GroupsStored(NamedTuple):
    """Bundles of one request were stored, each whole and undecided: `PartStored`s.

    Attachment: the batches of all, joined. A bundle's ticket is the record's position
    plus its index.
    """

    groups: tuple[PartStored, ...]


@event(12)
class GroupsDecided(NamedTuple):
    """Transactions were decided by one request: `Decided`s, each as if those before it
    stood in the log.
    """

    decisions: tuple[Decided, ...]


@event(18)
class CheckPlanned(NamedTuple):
    """The next check-back of an undecided transaction was planned."""

    token: bytes
    check_at: int
    tries: int
    in_doubt: bool


@event(19)
class ConflictSeen(NamedTuple):
    """A decision that contradicts an outcome was refused, and is kept for operators."""

    token: bytes
    outcome: int
    by: str
    reason: str


@event(20)
class JobDecided(NamedTuple):
    """A job was decided.

    Its winners are published in this order, its other bundles are rolled back.
    """

    token: bytes
    outcome: int
    by: str
    winners: tuple[bytes, ...]
    losers: tuple[bytes, ...]
    released: tuple[Released, ...]
    later: tuple[tuple[int, bytes | None], ...] = ()
    in_steps: bool = False  # `JobGroupsDone` follow, each for some of the bundles


@event(21)
class TransactionsForgotten(NamedTuple):
    """Expired outcomes were dropped; from now on their tokens are refused by their age.

    `looked`: all transactions with tokens before this one have been examined.
    """

    tokens: tuple[bytes, ...]
    looked: bytes


@event(22)
class TombstoneWritten(NamedTuple):
    """An unknown token was rolled back for good: no bundle is stored for it later."""

    token: bytes
    decider: tuple[object, ...]
    by: str


@event(23)
class HeuristicSeen(NamedTuple):
    """A branch was decided by hand, or found otherwise than decided.

    `branch` is its gid, "" = the broker's own; `decided` is a `Decision`'s number.
    """

    token: bytes
    branch: str
    decided: int
    found: str
    operator: str
    reason: str


@event(25)
class HeuristicForgotten(NamedTuple):
    """An operator has cleared the heuristics of a transaction."""

    token: bytes
    operator: str
    reason: str


@event(38)
class VerificationOwed(NamedTuple):
    """A transaction was decided by hand while its database could not be asked; or, with
    `owed` False, the database has been asked since.
    """

    token: bytes
    owed: bool


@event(27)
class GroupWaits(NamedTuple):
    """A committed large bundle met an earlier ticket on a key of this piece.

    It leaves the backlog until that ticket releases the key.
    """

    token: bytes
    piece: int


@event(28)
class PublicationBegun(NamedTuple):
    """A large bundle has its offsets, a range in each of its partitions.

    Readers stop before them until the last piece is published. `bases` are the first
    offsets, in the order of the bundle's partitions.
    """

    token: bytes
    bases: tuple[int, ...]


@event(29)
class PieceDone(NamedTuple):
    """A piece of a large bundle was processed: its keys are held, its batches are
    published, or it is dropped.

    `later` are the tickets that waited for its keys and may be free now.
    """

    token: bytes
    piece: int
    later: tuple[tuple[int, bytes | None], ...] = ()


@event(30)
class BacklogDone(NamedTuple):
    """Tickets of the backlog were considered, and those that were free published."""

    tickets: tuple[int, ...]
    released: tuple[Released, ...]
    later: tuple[tuple[int, bytes | None], ...]


@event(31)
class GroupRefused(NamedTuple):
    """The first of several parts came too late: its job was decided, or a watermark
    had passed it.

    Nothing of the bundle is stored. The receipt of each part has this `state`.
    """

    token: bytes
    decider: tuple[object, ...]
    service: str
    by: str
    state: int


@event(32)
class ConflictsForgotten(NamedTuple):
    """Conflicts recorded before this position were dropped."""

    before: int


@event(33)
class JobsForgotten(NamedTuple):
    """The decisions of these jobs were dropped."""

    tokens: tuple[bytes, ...]


@event(36)
class JobGroupsDone(NamedTuple):
    """The next bundles of a decided job were processed: winners first."""

    token: bytes
    groups: int
    released: tuple[Released, ...]
    later: tuple[tuple[int, bytes | None], ...]


@event(26)
class InstanceRegistered(NamedTuple):
    """A process registered as a producer instance and fenced off its predecessors;
    `epoch` counts from 1.
    """

    service: str
    instance: str
    epoch: int


@event(34)
class InstancesSeen(NamedTuple):
    """Processes of these producer instances (keys of table `instances`) are
    connected.
    """

    keys: tuple[bytes, ...]


@event(35)
class InstancesForgotten(NamedTuple):
    """Producer instances (keys of table `instances`) were forgotten, because no process
    was connected for too long.
    """

    keys: tuple[bytes, ...]
