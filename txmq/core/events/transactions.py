"""Events of transactions and jobs: what became of groups, from their first part to the
last piece of their publication.

Each is the outcome of a decision, and what must happen together is one event; see
`events`.
"""

from __future__ import annotations

from typing import NamedTuple

from txmq.core.events.base import Delay, event


class StoredBatch(NamedTuple):
    """A batch of a group that is stored but has no offsets yet: `start` counts from the
    attachment's first byte.

    One with a `delay` is a single message; once its group is published it waits for its
    time.
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

    Part 0 brings the description; the last part carries the seal, and with it the
    group's ticket: the position of that record. A local group comes sealed and decided:
    `offsets` are its batches' base offsets, part by part published at once.
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
    origin: bytes = b""  # the process to ask first, where a checker decides; empty = unknown


class Released(NamedTuple):
    """What a decision made visible: a transaction (by token) or a queued batch (by
    ticket), and its batches' base offsets.
    """

    token: bytes | None
    ticket: int
    offsets: tuple[int, ...]


@event(17)
class Decided(NamedTuple):
    """A transaction was decided, once and for ever, and with it everything that had
    waited for just this.

    `outcome` is a `Decision`'s number. `released` are the groups and queued batches
    whose last obstacle it was, in the order of publication; a committed transaction
    that still waits for an earlier ticket is not among them.
    """

    token: bytes
    outcome: int
    by: str
    reason: str
    released: tuple[Released, ...]
    later: tuple[
        tuple[int, bytes | None], ...
    ] = ()  # (ticket, token): perhaps free now, too many or too large for here


@event(11)
class GroupsStored(NamedTuple):
    """Several groups were stored by one request, each whole, undecided, and of a token
    of its own: `PartStored`s.

    Attachment: the batches of all, joined. A group's ticket is the record's position
    plus its place among them.
    """

    groups: tuple[PartStored, ...]


@event(12)
class GroupsDecided(NamedTuple):
    """Several transactions were decided by one request: `Decided`s, each as if those
    before it stood in the log.
    """

    decisions: tuple[Decided, ...]


@event(18)
class CheckPlanned(NamedTuple):
    """The next check-back of an undecided transaction; `answered` counts the checks
    that a checker answered or refused.
    """

    token: bytes
    check_at: int
    tries: int
    in_doubt: bool


@event(19)
class ConflictSeen(NamedTuple):
    """Somebody asked for the other outcome of a decided transaction; it was refused and
    is kept for the operator.
    """

    token: bytes
    outcome: int
    by: str
    reason: str = ""


@event(20)
class JobDecided(NamedTuple):
    """One decision over many groups: the winners are published, in the order named;
    every other group of the job is rolled back.
    """

    token: bytes
    outcome: int
    by: str
    winners: tuple[bytes, ...]
    losers: tuple[bytes, ...]
    released: tuple[Released, ...]
    later: tuple[tuple[int, bytes | None], ...] = ()
    in_steps: bool = (
        False  # the groups themselves are dealt with by `JobGroupsDone`, some at a time
    )


@event(21)
class TransactionsForgotten(NamedTuple):
    """Outcomes older than the time they are kept were dropped; their tokens are refused
    from now on by their age.

    `looked`: all transactions with tokens before this one have been looked through.
    """

    tokens: tuple[bytes, ...]
    looked: bytes = b""


@event(22)
class TombstoneWritten(NamedTuple):
    """A token that was never heard of was rolled back for good: whatever comes for it
    later is not stored.
    """

    token: bytes
    decider: tuple[object, ...]
    by: str


@event(23)
class HeuristicSeen(NamedTuple):
    """A branch was decided by hand, or found otherwise than decided; it is kept until
    somebody has dealt with it.

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


@event(27)
class GroupWaits(NamedTuple):
    """A committed large group met an earlier ticket in this piece of it: it is looked
    at again when that lets go.
    """

    token: bytes
    piece: int


@event(28)
class PublicationBegun(NamedTuple):
    """A large group has its offsets, a run in each of its partitions; readers stop
    before them until the last piece.

    `bases` are the first offsets, in the order of the group's partitions.
    """

    token: bytes
    bases: tuple[int, ...]


@event(29)
class PieceDone(NamedTuple):
    """One piece of a large group was dealt with: its keys taken, its batches published,
    or all of it dropped.

    `later` are those who had waited for its keys and are perhaps free now.
    """

    token: bytes
    piece: int
    later: tuple[tuple[int, bytes | None], ...] = ()


@event(30)
class BacklogDone(NamedTuple):
    """Those who were perhaps free have been looked at; the ones that were are
    published.
    """

    tickets: tuple[int, ...]
    released: tuple[Released, ...]
    later: tuple[tuple[int, bytes | None], ...] = ()


@event(31)
class GroupRefused(NamedTuple):
    """The first of several parts came too late, for a job that is decided or a source
    that is past it: nothing of the group is stored, now or later. All of its parts are
    told that its state is `state`.
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


@event(36)
class JobGroupsDone(NamedTuple):
    """So many more groups of a decided job were dealt with: first its winners in their
    order, then the others.
    """

    token: bytes
    groups: int
    released: tuple[Released, ...]
    later: tuple[tuple[int, bytes | None], ...] = ()
