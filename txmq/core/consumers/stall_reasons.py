"""Why a partition of a group is not moving: the first thing that stands in its way,
looked at from the outside in.
"""

from __future__ import annotations

from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from txmq.core.consumers import key_fences, poison
from txmq.core.state import visibility
from txmq.core.topics import growth, topics
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from txmq.core.state.consumer_groups import Group, Spot
    from txmq.core.state.positions import Position
    from txmq.core.state.state import State

SECOND = 1_000_000
FENCES_LOOKED_AT = 1_000  # of a topic


class Reason(NamedTuple):
    """`code` is for programs, `text` for people; what it names (members, tokens, times)
    is in the text.
    """

    code: str
    text: str


class Damaged(Protocol):
    """A span of the log that cannot be read."""

    @property
    def position(self) -> int: ...
    @property
    def end(self) -> int: ...


class Seen(NamedTuple):
    """What the state does not tell: readers see the log up to `durable`, but for spans
    that are `damaged`, and members do not fetch, for now, the topics that they have
    `paused`.
    """

    durable: int
    now: int
    damaged: Sequence[Damaged] = ()
    paused: Mapping[str, Collection[str]] = MappingProxyType({})


class Look(NamedTuple):
    """What the reasons are judged by."""

    state: State
    group: Group
    spot: Spot
    seen: Seen

    @property
    def position(self) -> Position:
        return self.group.positions[self.spot]

    @property
    def owners(self) -> list[str]:
        """Members whose share the partition is."""
        return [
            member.name for member in self.group.members.values() if self.spot in member.partitions
        ]

    @property
    def end(self) -> int:
        """Where readers have to stop, durable or not."""
        return visibility.end(self.state, *self.spot)

    @property
    def drained(self) -> bool:
        """Whether nothing is left to be delivered of what can be seen."""
        return self.position.cursor >= self.end and not self.position.redeliver

    def seconds_since(self, time: int) -> int:
        return max(0, self.seen.now - time) // SECOND


def why(state: State, group: Group, spot: Spot, seen: Seen) -> Reason | None:
    """What keeps a partition from moving; None = nothing does, or there is nothing to
    move.
    """
    look = Look(state, group, spot, seen)
    found = ((rule.__name__.strip("_").replace("_", "-"), rule(look)) for rule in RULES)
    return next((Reason(code, text) for code, text in found if text), None)


def oldest_waiting(state: State, group: Group, spot: Spot) -> int | None:
    """When the oldest message was stored that is neither processed nor moved; None
    where there is none.
    """
    position = group.positions[spot]
    pieces = (ranges.first() for ranges in (position.leased, position.redeliver, position.reserved))
    offsets = [piece.start for piece in pieces if piece is not None]
    if position.cursor < visibility.end(state, *spot):
        offsets.append(position.cursor)
    if not offsets:
        return None
    return next(
        (entry.stored_at for _base, entry in topics.entries_from(state, spot, min(offsets))), None
    )


def _deleted(look: Look) -> str:
    return "the topic was deleted" if look.state.topics_by_id[look.spot[0]].deleted else ""


def _closed(look: Look) -> str:
    readable = look.state.topics_by_id[look.spot[0]].settings.readable
    return "" if readable else "the topic is closed for reading"


def _paused(look: Look) -> str:
    return "the group is paused" if look.group.paused else ""


def _topic_paused(look: Look) -> str:
    return "its topic is paused for the group" if look.spot[0] in look.group.paused_topics else ""


def _being_reset(look: Look) -> str:
    return "a reset brings back many failed messages" if look.spot in look.group.resets else ""


def _being_cloned(look: Look) -> str:
    """What had failed in the group that it is made from is not all looked through."""
    cloning = look.group.cloning
    name = "" if cloning is None else look.state.consumers.by_id[cloning.source].name
    return f"it is still being made from {name}, of which many messages have failed" if name else ""


def _guarded(look: Look) -> str:
    flood = look.group.flood
    if flood is None:
        return ""
    return f"many keys failed alike: the group waits until a probe succeeds ({flood.error_type})"


def _no_member(look: Look) -> str:
    return "" if look.owners else "no member reads this partition"


def _member_paused(look: Look) -> str:
    """Not the group's doing: members may stop fetching topics for a while, each for
    itself.
    """
    topic, owners = look.state.topics_by_id[look.spot[0]].name, look.owners
    paused = all(topic in look.seen.paused.get(member, ()) for member in owners)
    return f"paused by the member itself: {', '.join(owners)}" if paused else ""


def _damaged(look: Look) -> str:
    """The next message, or one that failed and is next: nothing is passed over."""
    back = look.position.redeliver.first()
    offsets = [look.position.cursor] if back is None else [back.start, look.position.cursor]
    for offset in offsets if look.seen.damaged else ():
        row = next(topics.entries_from(look.state, look.spot, offset), None)
        if row is not None and _is_damaged(look, row[1]):
            return f"message {offset} is damaged on the broker's disk: restore the segment, or reset behind it"
    return ""


def _is_damaged(look: Look, entry: t.Entry) -> bool:
    end = entry.position + entry.length
    return any(span.position < end and entry.position < span.end for span in look.seen.damaged)


def _held_before(look: Look) -> str:
    """An ordered partition waits until the member that had it is done with what it
    has.
    """
    owners = look.owners
    leases = [
        look.group.leases[piece.value.lease] for piece in look.position.leased if look.group.ordered
    ]
    others = [lease for lease in leases if lease.member not in owners]
    if not others:
        return ""
    first = min(others, key=lambda lease: lease.granted_at)
    return f"leased to {first.member}, a member that had it before, for {look.seconds_since(first.granted_at)} s"


def _transaction(look: Look) -> str:
    """Acked by one that is undecided: in an ordered group others of their keys might
    overtake these messages.
    """
    reserved = look.position.reserved.first()
    if reserved is None or not (look.group.ordered or (look.drained and not look.position.leased)):
        return ""
    return f"an undecided transaction has acked messages of it: {reserved.value.token.hex()}"


def _fence_full(look: Look) -> str:
    if not (look.group.ordered and key_fences.stopped(look.group, look.spot)):
        return ""
    return "behind a fenced key as many are parked as may be (max_parked)"


def _growth(look: Look) -> str:
    stop = growth.limit(look.state, look.group, look.spot) if look.group.ordered else None
    if stop is None or not stop <= look.position.cursor < look.end:
        return ""
    return "what was sent before the topic grew is not all done with"


def _alone(look: Look) -> str:
    """A message whose consumers died goes out alone; it waits while another such one is
    out.
    """
    back = next(
        (piece for piece in poison.in_turn(look.group, look.spot) if piece.value.deaths), None
    )
    if back is None or not (look.group.ordered or look.position.cursor >= look.end):
        return ""
    members = [look.group.members[name] for name in look.owners]
    what = f"message {back.start} may have killed its consumers ({back.value.deaths})"
    if all(poison.lot_of(look.group, member) is not None for member in members):
        return f"{what} and waits for others that may have: they are out"
    if back.value.deaths < poison.ALONE or any(
        poison.empty_handed(look.group, one) for one in members
    ):
        return ""
    return f"{what} and goes out alone, once {members[0].name} is done with what it has"


def _span(look: Look) -> str:
    """An operator or a member wants no more of it to be under way."""
    span, floor = look.group.settings.span, look.position.floor
    if not span or look.position.redeliver or not floor + span <= look.position.cursor < look.end:
        return ""
    return (
        f"message {floor} is not done with, and {span} messages from there on were delivered (span)"
    )


def _leased(look: Look) -> str:
    """Handlers have it all: one that keeps it for longer than a lease is slow, or
    hangs.
    """
    numbers = {piece.value.lease for piece in look.position.leased}
    if not look.drained or not numbers:
        return ""
    first = min(
        (look.group.leases[number] for number in numbers), key=lambda lease: lease.granted_at
    )
    slow = look.seen.now - first.granted_at > look.group.settings.lease_us
    what = "its handlers are slow, or hang" if slow else "waiting for acks"
    return f"everything is leased, to {first.member} for {look.seconds_since(first.granted_at)} s: {what}"


def _not_durable(look: Look) -> str:
    row = look.state.entries.get(t.ENTRY_KEY.pack(*look.spot, look.position.cursor))
    waits = row is not None and t.Entry._make(row).visible_at > look.seen.durable
    return "the next message is not durable yet" if waits else ""


def _gate(look: Look) -> str:
    gate = look.state.gates.get(look.spot)
    behind = look.state.topics_by_id[look.spot[0]].ends[look.spot[1]]
    if gate is None or look.position.cursor != look.end or look.end == behind:
        return ""
    return f"{behind - look.end} messages are seen once a large transaction is published whole: {gate.token.hex()}"


def _undecided(look: Look) -> str:
    """Producers' transactions hold keys: what is sent of these waits behind them, and
    is not yet in the partition.
    """
    if not look.drained or not look.state.holds[look.spot]:
        return ""
    first = t.PARTITION_KEY.pack(*look.spot)
    rows = look.state.tables[t.HOLDS].range(
        first, t.PARTITION_KEY.pack(look.spot[0], look.spot[1] + 1)
    )
    tokens = (token for _key, (token,) in rows if token is not None)
    token = next(tokens, None)
    of = "" if token is None else f", such as {token.hex()}"
    return f"undecided transactions hold keys of it{of}; in the queues of these keys: {look.state.holds[look.spot]}"


def _retrying(look: Look) -> str:
    count = look.group.retrying[look.spot]
    return f"{count} failed messages wait for their next delivery" if look.drained and count else ""


def _parked(look: Look) -> str:
    """All that is left are messages behind dead letters."""
    if not look.drained:
        return ""
    topic_id, partition = look.spot
    looked_at = islice(look.group.fences.get(topic_id, {}).values(), FENCES_LOOKED_AT)
    parked = [fence.parked for fence in looked_at if fence.partition == partition and fence.parked]
    return (
        f"parked behind failed messages of their keys: {sum(parked)} (keys: {len(parked)})"
        if parked
        else ""
    )


RULES: tuple[Callable[[Look], str], ...] = (
    _deleted, _closed, _paused, _topic_paused, _being_reset, _being_cloned, _guarded, _no_member, _member_paused,
    _damaged, _held_before, _transaction, _fence_full, _growth, _alone, _span, _leased, _not_durable, _gate, _undecided,
    _retrying, _parked,
)  # fmt: skip
