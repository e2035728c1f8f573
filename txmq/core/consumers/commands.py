"""Commands of consumers: what members, the engine's timers and operators ask for.

Topics go by name, ranges are (topic, partition, start, end), messages (topic,
partition, offset). `generation` is the one that the member last heard of.
"""

from __future__ import annotations

from typing import NamedTuple

from txmq.core.consumers.candidates import Candidate
from txmq.model.retry import RetryPolicy

TopicRange = tuple[str, int, int, int]
TopicOffset = tuple[str, int, int]


class Wanted(NamedTuple):
    """Settings that a member or an operator names; None = no opinion. Times are
    microseconds.
    """

    on_exhausted: str | None = None
    retry: RetryPolicy | None = None
    lease_us: int | None = None
    session_us: int | None = None
    start: str | int | None = None
    strategy: str | None = None
    max_parked: int | None = None
    flood_keys: int | None = None
    span: int | None = None
    consume_timeout_us: int | None = None


class Join(NamedTuple):
    """Become a member, or change or confirm one's topics.

    `instance` tells two processes of one member name apart: the newer one wins. The
    same instance may join again, after a lost connection; `held` are then the ranges it
    still has, all else that was leased to it is given back (None = it has all).
    `starts` are (topic, partition, offset) where a new topic begins if `start` is a
    time: the engine knows the times. `named` False: a broadcast member that wants no
    memory of where it was. `static`: its partitions wait for it as long as its session
    lasts, whatever becomes of its connection, its process or the broker's.
    """

    group: str
    member: str
    instance: str
    mode: str
    topics: tuple[str, ...]
    wanted: Wanted = Wanted()
    starts: tuple[TopicOffset, ...] = ()
    held: tuple[TopicRange, ...] | None = None
    named: bool = True
    static: bool = False


class Leave(NamedTuple):
    """The member goes. `lost`: the engine says so, because its session lapsed or its
    connection stayed away.
    """

    group: str
    member: str
    instance: str
    lost: bool = False


class Rebalance(NamedTuple):
    """Share out partitions again, because a topic of the group has more of them."""

    group: str


class GroupSet(NamedTuple):
    """Change settings of a group; the mode cannot be changed."""

    group: str
    wanted: Wanted
    by: str = ""


class GroupPause(NamedTuple):
    """Stop or start deliveries of a group, of one `topic` or of all. What is leased
    stays leased.
    """

    group: str
    paused: bool
    by: str = ""
    topic: str = ""


class GroupClone(NamedTuple):
    """Make a group that goes on where this one stands: what is not acked here is
    delivered there, dead letters not.
    """

    group: str
    to: str
    by: str = ""


class TidyGroups(NamedTuple):
    """Timer: go on with resets and deletions of what has very many moved messages, a
    slice at a time; the reply says if there is more.
    """


class GroupDelete(NamedTuple):
    """Forget a group, its letters included. Refused while it has members."""

    group: str
    by: str = ""


class ResetPosition(NamedTuple):
    """Go on from other offsets: `to` "first" or "last", or the (partition, offset)
    given, where the engine looked up a time.

    Retried, parked and dead messages at or above the new offset are back in their
    place. `reprocess` raises the group's epoch, so that the inbox lets them pass again.
    """

    group: str
    topic: str
    to: str = ""
    offsets: tuple[tuple[int, int], ...] = ()
    reprocess: bool = False
    dry_run: bool = False
    by: str = ""


class Pick(NamedTuple):
    """A candidate that the engine has read; `keys` are the key hashes of its rows where
    it `needs_keys`.

    `expired` are the offsets of its messages whose time to live is over. It is not read
    where it is `unwanted`: it has none of the tags that the member wants.
    """

    candidate: Candidate
    keys: tuple[int | None, ...] | None = None
    expired: frozenset[int] = frozenset()
    unwanted: bool = False


class Deliver(NamedTuple):
    """Lease these candidates to the member. What has changed since they were planned is
    left out.
    """

    group: str
    member: str
    generation: int
    picks: tuple[Pick, ...]


class Ack(NamedTuple):
    """These messages were processed."""

    group: str
    member: str
    generation: int
    ranges: tuple[TopicRange, ...]


class Return(NamedTuple):
    """Give messages back un-started: their attempt does not count."""

    group: str
    member: str
    generation: int
    ranges: tuple[TopicRange, ...]


class Failure(NamedTuple):
    """Why a message failed, in the consumer's words."""

    type: str = ""
    text: str = ""
    fingerprint: str = ""
    bases: tuple[str, ...] = ()  # of the error's class, the nearest first


class Nack(NamedTuple):
    """A message failed. `delay` (µs) overrides the policy's; `dead` sends it to the
    dead letters at once.

    `postpone`: it has not failed, it is only to come again later, and this delivery
    does not count. `key_hash` is read by the engine from the batch that
    `letters.locate` names; `chance` (0 to 1) places the jitter.
    """

    group: str
    member: str
    generation: int
    topic: str
    partition: int
    offset: int
    key_hash: int | None = None
    delay: int | None = None
    failure: Failure = Failure()
    dead: bool = False
    chance: float = 0.5
    postpone: bool = False


class ExtendLeases(NamedTuple):
    """The member is still at work: its leases (all of them where none is named) end
    `lease_us` from now.
    """

    group: str
    member: str
    generation: int
    leases: tuple[int, ...] = ()
    lease_us: int | None = None


class ExpireLeases(NamedTuple):
    """Timer: give back what is leased past its deadline, a bounded number at a time;
    the reply says if there is more.
    """


class ReplayLetters(NamedTuple):
    """Deliver dead letters again, each in the order of its key."""

    group: str
    letters: tuple[TopicOffset, ...]
    by: str = ""


class AbandonLetters(NamedTuple):
    """Close dead letters for ever; `reason` is kept with them."""

    group: str
    letters: tuple[TopicOffset, ...]
    reason: str
    by: str = ""
