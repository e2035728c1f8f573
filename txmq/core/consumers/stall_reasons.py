"""Stall reasons: why a partition of a group delivers nothing.

The first obstacle counts, in the order from the topic down to single messages.
"""

from __future__ import annotations

from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from txmq.core.consumers import key_fences, poison, store_views
from txmq.core.state import failed_messages, visibility
from txmq.core.topics import topics
from txmq.model.measures import counted
from txmq.model.units import SECOND
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.state.positions import GroupPosition
    from txmq.core.state.state import State
    from txmq.model.topic_partition import TopicPartition

MAX_FENCES_READ = 1_000  # of one topic


class StallReason(NamedTuple):
    """A reason: `code` for programs, `text` for operators.

    Members, tokens and times are named in the text.
    """

    code: str
    text: str


class DamagedSpan(Protocol):
    """A span of the log that cannot be read."""

    @property
    def position(self) -> int: ...
    @property
    def end(self) -> int: ...


class StallContext(NamedTuple):
    """Facts that are not part of the state.

    Readers see the log up to `durable`, except `damaged` spans. `paused` are the topics
    that each member has stopped fetching for now. `limit` is the group's limit that its
    fetches wait for.
    """

    durable: int
    now: int
    damaged: Sequence[DamagedSpan] = ()
    paused: Mapping[str, Collection[str]] = MappingProxyType({})
    limit: str = ""


class StallCheck(NamedTuple):
    """Input of one reason: a partition of a group, with the facts around it."""

    state: State
    group: ConsumerGroup
    tp: TopicPartition
    context: StallContext

    @property
    def position(self) -> GroupPosition:
        return self.group.positions[self.tp]

    @property
    def owners(self) -> list[str]:
        """Members to which the partition is assigned."""
        return [
            member.name for member in self.group.members.values() if self.tp in member.partitions
        ]

    @property
    def end(self) -> int:
        """Offset at which readers have to stop, durable or not."""
        return visibility.visible_end(self.state, *self.tp)

    @property
    def drained(self) -> bool:
        """True if no visible message is left to be delivered."""
        return self.position.cursor >= self.end and not self.position.redeliver

    def seconds_since(self, time: int) -> int:
        return max(0, self.context.now - time) // SECOND


def stall_reason(
    state: State, group: ConsumerGroup, tp: TopicPartition, context: StallContext
) -> StallReason | None:
    """Return the first obstacle that keeps a partition from delivering.

    None if there is no obstacle, or nothing to deliver.
    """
    check = StallCheck(state, group, tp, context)
    texts = ((code, rule(check)) for code, rule in REASONS)
    return next((StallReason(code, text) for code, text in texts if text), None)


def _deleted(check: StallCheck) -> str:
    return "the topic was deleted" if check.state.topics_by_id[check.tp[0]].deleted else ""


def _closed(check: StallCheck) -> str:
    readable = check.state.topics_by_id[check.tp[0]].settings.readable
    return "" if readable else "the topic is closed for reading"


def _paused(check: StallCheck) -> str:
    return "the group is paused" if check.group.paused else ""


def _topic_paused(check: StallCheck) -> str:
    return "its topic is paused for the group" if check.tp[0] in check.group.paused_topics else ""


def _being_reset(check: StallCheck) -> str:
    return "a reset restores many failed messages" if check.tp in check.group.pending_resets else ""


def _being_cloned(check: StallCheck) -> str:
    cloning = check.group.clone_progress
    name = "" if cloning is None else check.state.groups.by_id[cloning.source].name
    return (
        f"it is still being cloned from {name}, of which many messages have failed" if name else ""
    )


def _breaker_open(check: StallCheck) -> str:
    breaker = check.group.breaker
    if breaker is None:
        return ""
    waits = f"the group waits until a probe succeeds ({breaker.error_type})"
    gone = check.group.unreachable
    lost = f"; {counted(gone, 'message')} cannot be probes, in local stores without an owner"
    return f"many keys failed alike: {waits}{lost if gone else ''}"


def _no_member(check: StallCheck) -> str:
    return "" if check.owners else "no member reads this partition"


def _member_paused(check: StallCheck) -> str:
    """Report pauses of members: each may stop fetching topics for a while."""
    topic, owners = check.state.topics_by_id[check.tp[0]].name, check.owners
    paused = all(topic in check.context.paused.get(member, ()) for member in owners)
    return f"paused by the member itself: {', '.join(owners)}" if paused else ""


def _damaged(check: StallCheck) -> str:
    """Report a damaged next message or redelivery: nothing is passed over."""
    back = check.position.redeliver.first()
    offsets = [check.position.cursor] if back is None else [back.start, check.position.cursor]
    for offset in offsets if check.context.damaged else ():
        row = next(topics.scan_entries(check.state, check.tp, offset), None)
        if row is not None and _is_damaged(check, row[1]):
            return (
                f"message {offset} is damaged on the broker's disk: "
                "restore the segment, or reset behind it"
            )
    return ""


def _is_damaged(check: StallCheck, entry: t.BatchEntry) -> bool:
    end = entry.position + entry.length
    return any(span.position < end and entry.position < span.end for span in check.context.damaged)


def _held_before(check: StallCheck) -> str:
    """Report leases of a previous owner, which an ordered partition has to wait for."""
    owners = check.owners
    leases = [
        check.group.leases[held.value.lease]
        for held in check.position.leased
        if check.group.ordered
    ]
    others = [lease for lease in leases if lease.member not in owners]
    if not others:
        return ""
    first = min(others, key=lambda lease: lease.granted_at)
    seconds = check.seconds_since(first.granted_at)
    return f"leased to {first.member}, a member that had it before, for {seconds} s"


def _transaction(check: StallCheck) -> str:
    """Report acks of an undecided transaction.

    In an ordered group, other messages of their keys could overtake the acked messages.
    """
    reserved = check.position.reserved.first()
    if reserved is None or not (
        check.group.ordered or (check.drained and not check.position.leased)
    ):
        return ""
    return f"an undecided transaction has acked messages of it: {reserved.value.token.hex()}"


def _fence_full(check: StallCheck) -> str:
    if not (check.group.ordered and key_fences.is_stopped(check.group, check.tp)):
        return ""
    return "a fenced key has its maximum of parked messages (max_parked)"


def _growth(check: StallCheck) -> str:
    stop = topics.growth_limit(check.state, check.group, check.tp) if check.group.ordered else None
    if stop is None or not stop <= check.position.cursor < check.end:
        return ""
    return "messages sent before the topic grew are not all processed"


def _isolated(check: StallCheck) -> str:
    """Report an isolated message that waits until the member holds nothing else."""
    back = next(
        (held for held in poison.next_redeliveries(check.group, check.tp) if held.value.deaths),
        None,
    )
    if back is None or not (check.group.ordered or check.position.cursor >= check.end):
        return ""
    members = [check.group.members[name] for name in check.owners]
    what = f"message {back.start} may have killed its consumers ({back.value.deaths})"
    if all(poison.suspect_lease(check.group, member) is not None for member in members):
        return f"{what} and waits for other suspects, which are leased"
    if back.value.deaths < failed_messages.ISOLATED_AFTER or any(
        poison.holds_nothing(check.group, one) for one in members
    ):
        return ""
    return f"{what} and is delivered alone, once {members[0].name} holds nothing else"


def _span(check: StallCheck) -> str:
    """Report the limit of messages under way that an operator or member has set."""
    span, floor = check.group.settings.span, check.position.floor
    if (
        not span
        or check.position.redeliver
        or not floor + span <= check.position.cursor < check.end
    ):
        return ""
    return (
        f"message {floor} is not processed, and only {counted(span, 'message')} from there on may"
        " be delivered (span)"
    )


def _limit(check: StallCheck) -> str:
    name = check.context.limit
    if not name or check.drained:
        return ""
    most = getattr(check.group.settings, name)
    return f"the group has had its {name} of {most}: it goes on at that rate (group alter --limit)"


def _leased(check: StallCheck) -> str:
    """Report that all messages are leased; a handler that exceeds a lease is slow or
    hangs.
    """
    numbers = {held.value.lease for held in check.position.leased}
    if not check.drained or not numbers:
        return ""
    first = min(
        (check.group.leases[number] for number in numbers), key=lambda lease: lease.granted_at
    )
    slow = check.context.now - first.granted_at > check.group.settings.lease_us
    what = "its handlers are slow, or hang" if slow else "waiting for acks"
    seconds = check.seconds_since(first.granted_at)
    return f"everything is leased, to {first.member} for {seconds} s: {what}"


def _not_durable(check: StallCheck) -> str:
    row = check.state.entries.get(t.ENTRY_KEY.pack(*check.tp, check.position.cursor))
    waits = row is not None and t.BatchEntry._make(row).visible_at > check.context.durable
    return "the next message is not durable yet" if waits else ""


def _visibility_barrier(check: StallCheck) -> str:
    barrier = check.state.barriers.get(check.tp)
    behind = check.state.topics_by_id[check.tp[0]].end_offsets[check.tp[1]]
    if barrier is None or check.position.cursor != check.end or check.end == behind:
        return ""
    hidden, token = counted(behind - check.end, "message"), barrier.token.hex()
    return f"a large transaction hides {hidden} until it is published whole: {token}"


def _undecided(check: StallCheck) -> str:
    """Report producers' transactions that hold keys.

    Messages sent with these keys wait behind them and are not in the partition yet.
    """
    if not check.drained or not check.state.held_keys[check.tp]:
        return ""
    first = t.PARTITION_KEY.pack(*check.tp)
    rows = check.state.tables[t.HOLDS].range(
        first, t.PARTITION_KEY.pack(check.tp[0], check.tp[1] + 1)
    )
    tokens = (token for _key, (token,) in rows if token is not None)
    token = next(tokens, None)
    example = "" if token is None else f", such as {token.hex()}"
    queued = check.state.held_keys[check.tp]
    return f"undecided transactions hold keys of it{example}; in the queues of these keys: {queued}"


def _retrying(check: StallCheck) -> str:
    count = check.group.retrying[check.tp]
    return (
        f"{count} failed messages wait for their next delivery" if check.drained and count else ""
    )


def _at_consumers(check: StallCheck) -> str:
    """Report messages that consumers have in their local stores."""
    if not check.drained:
        return ""
    counts = store_views.at_consumers(check.state, check.group, *check.tp)
    if not counts:
        return ""
    store_id = max(counts, key=counts.__getitem__)
    store = check.group.stores[store_id]
    at = f"{store.member} on {store.host}" if store.host else store.member
    gone = "" if check.group.has_owner(store) else ", which is gone"
    others = f", and others in {len(counts) - 1} more stores" if len(counts) > 1 else ""
    count = counts[store_id]
    are = "failed message is" if count == 1 else "failed messages are"
    return f"{count} {are} at consumer {at or 'unknown'}{gone} (store {store_id.hex()}){others}"


def _parked(check: StallCheck) -> str:
    """Report a partition whose remaining messages wait behind dead letters."""
    if not check.drained:
        return ""
    topic_id, partition = check.tp
    fences = islice(check.group.fences.get(topic_id, {}).values(), MAX_FENCES_READ)
    parked = [fence.parked for fence in fences if fence.partition == partition and fence.parked]
    return (
        f"parked behind failed messages of their keys: {sum(parked)} (keys: {len(parked)})"
        if parked
        else ""
    )


# The codes are part of the interface: programs read them.
REASONS: tuple[tuple[str, Callable[[StallCheck], str]], ...] = (
    ("deleted", _deleted),
    ("closed", _closed),
    ("paused", _paused),
    ("topic-paused", _topic_paused),
    ("being-reset", _being_reset),
    ("being-cloned", _being_cloned),
    ("guarded", _breaker_open),
    ("no-member", _no_member),
    ("member-paused", _member_paused),
    ("damaged", _damaged),
    ("held-before", _held_before),
    ("transaction", _transaction),
    ("fence-full", _fence_full),
    ("growth", _growth),
    ("alone", _isolated),
    ("span", _span),
    ("limit", _limit),
    ("leased", _leased),
    ("not-durable", _not_durable),
    ("gate", _visibility_barrier),
    ("undecided", _undecided),
    ("retrying", _retrying),
    ("at-consumer", _at_consumers),
    ("parked", _parked),
)
