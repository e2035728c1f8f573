"""Rules of topics: creation, settings, growth and deletion, and the checks that sends
and reads of a topic have to pass.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import largest_body
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.topics import (
    TopicAltered,
    TopicCreated,
    TopicDeleted,
    TopicGrown,
    TopicsEmptied,
)
from txmq.core.events.users import TopicOwned
from txmq.core.state import failed_messages, letter_index, visibility
from txmq.core.state.failed_rows import CLOSED
from txmq.core.state.letter_index import LAST, PLACE, Dimension
from txmq.core.state.state import (
    DEFAULT_SETTINGS,
    FIRST_OWN_ID,
    State,
    Topic,
    TopicSettings,
)
from txmq.core.topics.stored_for_jobs import check_none_writes_to, job_writes_to
from txmq.core.users import check_topics
from txmq.errors import (
    BadRequest,
    Conflict,
    MessageTooLarge,
    OffsetOutOfRange,
    StaleTopic,
    Throttled,
    TopicClosed,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from txmq.model.measures import counted
from txmq.model.own_topics import PREFIX, is_own
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from txmq.batch import BatchHeader
    from txmq.core.events.base import Event, RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup

MAX_PARTITIONS = 4_096  # of one topic: each has a row in the state and a place in every assignment
MAX_ALL_PARTITIONS = 1 << 20  # of all topics: they are in memory
MOST_COMPARED = 500  # names, with one that is not there: 3 ms, 12 where all are long
SHORTEST_ALIKE = 4  # characters of a name that may be another one, misspelt
MAX_LETTERS = 1_000  # of a group and a topic that is deleted, looked at in one turn


class CreateTopic(NamedTuple):
    """Create a topic. Repeating the call is fine; another shape under the name is
    not.
    """

    name: str
    partitions: int
    settings: TopicSettings = DEFAULT_SETTINGS
    user: str = ""  # for whose quota it counts, "" = nobody's


class AlterTopic(NamedTuple):
    """Change settings of a topic: field names of `TopicSettings` and their new
    values.
    """

    name: str
    changes: dict[str, Any]


class GrowTopic(NamedTuple):
    """Add partitions to a topic. Refused while an undecided transaction writes to
    it.
    """

    name: str
    partitions: int


class DeleteTopic(NamedTuple):
    """Delete a topic and its messages, failed ones and dead letters among them. Refused
    while an undecided transaction writes to it, or a group keeps its letters until they
    are exported.
    """

    name: str


class EmptyTopics(NamedTuple):
    """Give up what deleted topics have for each partition.

    Only for topics that no message will be published to: those deleted before all
    messages that are not published yet were stored.
    """

    topic_ids: tuple[int, ...]


class TopicView(NamedTuple):
    """The metadata of a topic that clients route by."""

    name: str
    partitions: int
    epoch: int
    topic_id: int


class DeletedTopic(NamedTuple):
    """The name of a topic, and the groups whose failed messages end with it."""

    name: str
    groups: tuple[str, ...]


class AlteredTopic(NamedTuple):
    """A topic's metadata and its new settings."""

    view: TopicView
    settings: TopicSettings


def find_topic(state: State, name: str, partition: int = 0, epoch: int = 0) -> Topic:
    """Return the topic that a sender or reader names.

    `epoch` is the shape of the topic that the client knows; 0 skips that check.
    """
    topic = state.topics.get(name)
    if topic is None:
        raise unknown_topic(state, name)
    if epoch and epoch != topic.epoch:
        raise StaleTopic(
            f"topic {name!r} has grown: its epoch is {topic.epoch}, not {epoch}",
            hint="fetch its metadata again",
            detail={"topic": name, "epoch": topic.epoch},
        )
    if partition >= len(topic.end_offsets):
        partitions = len(topic.end_offsets)
        raise UnknownPartition(
            f"topic {name!r} has no partition {partition}: it has 0 to {partitions - 1}",
            hint="leave the partition out, and the client chooses one by the key or at random",
            detail={"topic": name, "partitions": partitions},
        )
    return topic


def unknown_topic(state: State, name: str, similar: str = "") -> UnknownTopic:
    """Return the refusal of what concerns a topic that is not, or no longer, there."""
    message = f"there is no topic {name!r}"
    where = " at each listed log" if state.logs.logs else ""
    hint = f"create it{where}: txmq topic create {name}"
    if similar:
        hint = f"did you mean {similar!r}? Else {hint}"
    return UnknownTopic(message, hint=hint, detail={"topic": name})


def similar_topic(state: State, name: str, may_see: Callable[[str], bool]) -> str:
    """Return the topic that somebody may have meant who named one that is not there;
    "" where none is alike.
    """
    known = (other for other in islice(state.topics, MOST_COMPARED) if not is_own(other))
    return next((other for other in known if _alike(name, other) and may_see(other)), "")


def _alike(name: str, other: str) -> bool:
    """Return whether one slip makes one name the other: a character more, less or
    another, or two swapped.
    """
    if abs(len(name) - len(other)) > 1 or len(name) < SHORTEST_ALIKE:
        return False
    start = _same(name, other)
    left, right = name[start:], other[start:]
    end = _same(left[::-1], right[::-1])
    left, right = left[: len(left) - end], right[: len(right) - end]
    return max(len(left), len(right)) <= 1 or (len(left) == 2 and left == right[::-1])


def _same(left: str, right: str) -> int:
    """Return how many characters both begin with."""
    both = zip(left, right, strict=False)
    shorter = min(len(left), len(right))
    return next((at for at, (one, two) in enumerate(both) if one != two), shorter)


def find_changeable(state: State, name: str) -> Topic:
    """Return the topic that a call changes, if it is not the broker's own."""
    _check_not_own(name)
    return find_topic(state, name)


def find_writable(
    state: State, name: str, partition: int, epoch: int, header: BatchHeader, batch: bytes
) -> Topic:
    """Return the topic that a sender names if its settings admit the batch."""
    topic = find_topic(state, name, partition, epoch)
    settings = topic.settings
    if not settings.writable:
        _check_not_own(name)
        raise TopicClosed(
            f"topic {name!r} is closed for writing",
            hint="open it: txmq topic alter --set writable=yes",
        )
    if settings.message_bytes >= 0:
        check_message_size(header, batch, settings.message_bytes, f"topic {name!r}")
    return topic


def check_message_size(header: BatchHeader, batch: bytes, limit: int, limited_by: str) -> None:
    """Reject a batch with a body of more than `limit` bytes."""
    if header.size <= limit:  # all bodies together
        return
    largest = largest_body(batch, header)
    if largest <= limit:
        return
    raise MessageTooLarge(
        f"message of {largest} bytes: {limited_by} takes at most {limit}",
        hint="keep large contents in an object store and send their address",
        detail={"limit": limit},
    )


def check_readable(topic: Topic) -> None:
    """Reject reading of a topic that is closed for it."""
    if topic.settings.readable:
        return
    raise TopicClosed(
        f"topic {topic.name!r} is closed for reading",
        hint="open it: txmq topic alter --set readable=yes",
    )


def check_offset(
    state: State, topic: Topic, partition: int, offset: int, durable: int | None = None
) -> None:
    """Reject an offset below the start of a partition or beyond its visible end."""
    first = topic.start_offsets[partition]
    end = visibility.visible_end(state, topic.topic_id, partition, durable)
    if first <= offset <= end:
        return
    if offset < first:
        why, hint = f"begins at {first}", "retention removed what was before: go on from there"
    else:
        why, hint = f"ends at {end}", ""
    raise OffsetOutOfRange(
        f"offset {offset} is out of range: {topic.name}/{partition} {why}",
        hint=hint,
        detail={"first": first, "end": end},
    )


def growth_limit(state: State, group: ConsumerGroup, tp: TopicPartition) -> int | None:
    """Return the offset before which deliveries of a partition to an ordered group must
    stop because the topic has grown; None = no limit.

    Growth may move a key to another partition, and its order must survive that. What
    was published before a growth lies below the end offsets of that moment. The group
    gets nothing beyond them, in any partition, until all of it is settled. Failed
    messages are found by their key, so they stay fenced wherever the key goes on. A
    topic only grows while no transaction holds keys of it, so nothing ordered by them
    is published to a key's former partition later.
    """
    topic_id, partition = tp
    for ends in state.topics_by_id[topic_id].ends_at_growth:
        if not _is_settled(group, topic_id, ends):
            return ends[partition] if partition < len(ends) else 0
    return None


def _is_settled(group: ConsumerGroup, topic_id: int, ends: tuple[int, ...]) -> bool:
    for partition, end in enumerate(ends):
        position = group.positions.get(TopicPartition(topic_id, partition))
        if position is not None and position.floor < end:
            return False
    return True


def _check_not_own(name: str) -> None:
    """Reject changes of a topic whose name is reserved for the broker."""
    if not is_own(name):
        return
    raise BadRequest(
        f"topic {name!r} is the broker's own: names that begin with {PREFIX!r} are reserved",
        hint="choose another name; everybody may read it",
    )


def _check_partitions(partitions: int) -> None:
    if 1 <= partitions <= MAX_PARTITIONS:
        return
    raise BadRequest(
        f"invalid number of partitions: {partitions}", hint=f"a topic has 1 to {MAX_PARTITIONS}"
    )


def _check_all_partitions(state: State, more: int) -> None:
    if state.partitions + more <= MAX_ALL_PARTITIONS:
        return
    raise Throttled(
        f"the topics have {state.partitions} partitions: {more} more would be above "
        f"{MAX_ALL_PARTITIONS}",
        hint="delete topics that nobody uses, or run another broker",
    )


def decide_create(state: State, command: CreateTopic, _now: int) -> Outcome:
    _check_not_own(command.name)
    _check_partitions(command.partitions)
    topic = state.topics.get(command.name)
    if topic is None:
        _check_all_partitions(state, command.partitions)
        check_topics(state, command.user)
        return _created(state, command)
    if len(topic.end_offsets) != command.partitions:
        raise TopicExists(
            f"topic {command.name!r} exists with {counted(len(topic.end_offsets), 'partition')}",
            hint="to add partitions: txmq topic set --partitions",
        )
    own = topic.settings._replace(schema="", compatibility="")  # set by calls of their own
    if command.settings not in (DEFAULT_SETTINGS, own):
        raise TopicExists(
            f"topic {command.name!r} exists with other settings",
            hint="to change them: txmq topic alter",
        )
    return Outcome(reply=topic_view(topic))


def _created(state: State, command: CreateTopic) -> Outcome:
    topic_id, name, partitions = state.next_topic_id, command.name, command.partitions
    # Who knows a deleted topic of this name would else take the new one for it.
    epoch = 1 + max(
        (one.epoch for one in state.topics_by_id.values() if one.name == name), default=0
    )
    events: tuple[Event, ...] = (TopicCreated(topic_id, name, partitions, epoch),)
    if command.settings != DEFAULT_SETTINGS:
        events += (TopicAltered(topic_id, command.settings),)
    if command.user:
        events += (TopicOwned(topic_id, command.user),)
    return Outcome(events, TopicView(name, partitions, epoch, topic_id))


def decide_alter(state: State, command: AlterTopic, _now: int) -> Outcome:
    topic = find_changeable(state, command.name)
    settings = topic.settings._replace(**command.changes)
    events = (TopicAltered(topic.topic_id, settings),) if settings != topic.settings else ()
    return Outcome(events, AlteredTopic(topic_view(topic), settings))


def decide_grow(state: State, command: GrowTopic, _now: int) -> Outcome:
    topic = find_changeable(state, command.name)
    _check_partitions(command.partitions)
    if command.partitions < len(topic.end_offsets):
        raise BadRequest(
            f"topic {command.name!r} has {counted(len(topic.end_offsets), 'partition')} and cannot "
            f"shrink to {command.partitions}",
            hint="create another topic with fewer partitions",
        )
    if command.partitions == len(topic.end_offsets):
        return Outcome(reply=topic_view(topic))
    more = command.partitions - len(topic.end_offsets)
    # a decision would publish to partitions that are no longer the keys'
    _check_all_partitions(state, more)
    _check_no_held_keys(state, topic)
    grown = TopicGrown(topic.topic_id, command.partitions, topic.epoch + 1)
    view = TopicView(topic.name, command.partitions, topic.epoch + 1, topic.topic_id)
    return Outcome((grown,), view)


def decide_delete(state: State, command: DeleteTopic, _now: int) -> Outcome:
    topic = find_changeable(state, command.name)
    # a decision would find its topic gone
    _check_no_held_keys(state, topic)
    check_none_writes_to(state, topic.topic_id)
    groups = [one for one in state.groups.by_id.values() if (topic.topic_id, 0) in one.positions]
    for group in groups:
        if group.settings.keep_until_exported and _may_need_export(state, group, topic.topic_id):
            raise _to_be_exported(group, topic)
    failed = (
        group.name
        for group in groups
        if failed_messages.messages_of_topic(state, group, topic.topic_id, 1)
    )
    return Outcome((TopicDeleted(topic.topic_id),), DeletedTopic(topic.name, tuple(failed)))


def _may_need_export(state: State, group: ConsumerGroup, topic_id: int) -> bool:
    """Return True if no export has a letter of the topic, or if it has too many letters
    to look at. The newest come first: those are the ones that no export has.
    """
    looked_at = 0
    for at in letter_index.SETTLED:
        prefix = letter_index.prefix(group.group_id, at, Dimension.TOPIC, topic_id)
        rows = state.tables[t.LETTER_INDEX].range(prefix, prefix + LAST, reverse=True)
        for key, _row in rows:
            row = failed_messages.get(state, group, PLACE.unpack(key[len(prefix) :])[2:])
            looked_at += 1
            is_closed = row is not None and row.kind in CLOSED
            if looked_at > MAX_LETTERS or (row is not None and is_closed and not row.exported):
                return True
    return False


def _to_be_exported(group: ConsumerGroup, topic: Topic) -> Conflict:
    why = f"consumer group {group.name!r} keeps dead letters of topic {topic.name!r} until then"
    return Conflict(
        f"{why}: an export has not all of them, or there are more than {MAX_LETTERS}",
        hint=f"export them: txmq dlq export {group.name} --mark --where 'topic:{topic.name} "
        f"state:open,abandoned'; or give them up: txmq group alter {group.name} "
        "--expire-unexported",
        detail={"group": group.name},
    )


def decide_empty(state: State, command: EmptyTopics, _now: int) -> Outcome:
    read = {tp[0] for group in state.groups.by_id.values() for tp in group.positions}
    ids = tuple(one for one in command.topic_ids if one not in read and _is_empty(state, one))
    return Outcome((TopicsEmptied(ids),) if ids else ())


def _is_empty(state: State, topic_id: int) -> bool:
    topic = state.topics_by_id[topic_id]
    return topic.deleted and topic.start_offsets == topic.end_offsets


def _check_no_held_keys(state: State, topic: Topic) -> None:
    tps = [TopicPartition(topic.topic_id, number) for number in range(len(topic.end_offsets))]
    held = any(state.held_keys[tp] or visibility.is_blocked(state, tp) for tp in tps)
    if held or job_writes_to(state, topic.topic_id):
        raise Conflict(
            f"undecided transactions hold keys of topic {topic.name!r}",
            hint="wait for their decisions, or decide them: txmq tx list",
        )


def topic_view(topic: Topic) -> TopicView:
    """Return the metadata of a topic for clients."""
    return TopicView(topic.name, len(topic.end_offsets), topic.epoch, topic.topic_id)


def apply_created(state: State, event: TopicCreated, context: RecordContext) -> None:
    topic = Topic(event.topic_id, event.name, [0] * event.partitions, made_at=context.stored_at)
    topic.epoch = event.epoch
    state.topics[event.name] = state.topics_by_id[event.topic_id] = topic
    state.partitions += topic.counted_partitions
    if event.topic_id < FIRST_OWN_ID:
        state.next_topic_id = max(state.next_topic_id, event.topic_id + 1)
    state.dirty_topics.add(event.topic_id)


def apply_altered(state: State, event: TopicAltered, _context: RecordContext) -> None:
    topic, settings = state.topics_by_id[event.topic_id], TopicSettings(*event.settings)
    state.schema_characters += len(settings.schema) - len(topic.settings.schema)
    topic.settings = settings
    state.dirty_topics.add(event.topic_id)


def apply_grown(state: State, event: TopicGrown, _context: RecordContext) -> None:
    topic = state.topics_by_id[event.topic_id]
    topic.ends_at_growth.append(tuple(topic.end_offsets))
    state.partitions += event.partitions - len(topic.end_offsets)
    topic.grow(event.partitions)
    topic.epoch = event.epoch
    state.dirty_topics.add(event.topic_id)


def apply_deleted(state: State, event: TopicDeleted, _context: RecordContext) -> None:
    """Free the name. The entries stay until retention removes them, and what groups
    have of the topic until background work has ended it.
    """
    topic = state.topics_by_id[event.topic_id]
    topic.deleted = True
    state.schema_characters -= len(topic.settings.schema)
    topic.settings = topic.settings._replace(schema="")
    state.partitions -= len(topic.end_offsets)
    state.topics.pop(topic.name, None)
    state.users.own(state.tables, event.topic_id, None)
    state.groups.begin_to_tidy(event.topic_id)
    state.dirty_topics.add(event.topic_id)


def apply_emptied(state: State, event: TopicsEmptied, _context: RecordContext) -> None:
    for topic_id in event.topic_ids:
        topic = state.topics_by_id[topic_id]
        state.topics_by_id[topic_id] = Topic(topic_id, topic.name, [], topic.epoch, deleted=True)
        state.dirty_topics.add(topic_id)


def entry_at(
    state: State, topic_id: int, partition: int, offset: int
) -> list[tuple[int, t.BatchEntry]]:
    """Return (base offset, entry) of the published batch that holds `offset`, or an
    empty list.
    """
    start = t.ENTRY_KEY.pack(topic_id, partition, 0)
    for key, row in state.entries.range(
        start, t.ENTRY_KEY.pack(topic_id, partition, offset + 1), reverse=True
    ):
        base: int = t.ENTRY_KEY.unpack(key)[2]
        entry = t.BatchEntry._make(row)
        return [(base, entry)] if offset < base + entry.count else []
    return []


def scan_entries(
    state: State, tp: TopicPartition, offset: int
) -> Iterator[tuple[int, t.BatchEntry]]:
    """Yield (base offset, entry) of the published batches, from the one that holds
    `offset` on.
    """
    start = t.ENTRY_KEY.pack(*tp, offset)
    if state.entries.get(start) is None:
        for base, entry in entry_at(state, *tp, offset):
            start = t.ENTRY_KEY.pack(*tp, base + entry.count)
            yield base, entry
    unpack, make = t.ENTRY_KEY.unpack, t.BatchEntry._make  # local: there may be thousands of rows
    for key, row in state.entries.range(start, t.ENTRY_KEY.pack(*tp, t.SIGN)):
        yield unpack(key)[2], make(row)


DECIDERS: Deciders = {
    CreateTopic: decide_create,
    AlterTopic: decide_alter,
    GrowTopic: decide_grow,
    DeleteTopic: decide_delete,
    EmptyTopics: decide_empty,
}
APPLIERS: Appliers = {
    TopicCreated: apply_created,
    TopicAltered: apply_altered,
    TopicGrown: apply_grown,
    TopicDeleted: apply_deleted,
    TopicsEmptied: apply_emptied,
}
