"""Topics: created, grown, deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.base import TopicAltered, TopicCreated, TopicDeleted, TopicGrown
from txmq.core.state import visibility
from txmq.core.state.state import DEFAULTS, Outcome, Rejected, State, Topic, TopicSettings
from txmq.errors import (
    BadRequest,
    Conflict,
    OffsetOutOfRange,
    StaleTopic,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import Event, Place
    from txmq.core.state.consumer_groups import Spot

MAX_PARTITIONS = 4_096  # of one topic: each has a row in the state and a place in every assignment


class CreateTopic(NamedTuple):
    """Make a topic; the same topic again is fine, another shape of it is not."""

    name: str
    partitions: int
    settings: TopicSettings = DEFAULTS


class AlterTopic(NamedTuple):
    """Change settings of a topic: names of a `TopicSettings`, and values."""

    name: str
    changes: dict[str, Any]


class GrowTopic(NamedTuple):
    """Give a topic more partitions. Refused while a transaction that writes to it is
    undecided.
    """

    name: str
    partitions: int


class DeleteTopic(NamedTuple):
    """Remove a topic and forget its messages."""

    name: str


class TopicView(NamedTuple):
    """What clients need to know of a topic."""

    name: str
    partitions: int
    epoch: int


def find(state: State, name: str, partition: int = 0, epoch: int = 0) -> Topic | Rejected:
    """The topic that a sender or reader means; `epoch` is the shape it knows, 0 = it
    does not say.
    """
    topic = state.topics.get(name)
    if topic is None:
        return Rejected(
            UnknownTopic,
            f"there is no topic {name!r}",
            "create it: txmq topic create",
            {"topic": name},
        )
    if epoch and epoch != topic.epoch:
        return Rejected(
            StaleTopic,
            f"topic {name!r} has grown",
            "fetch its metadata",
            {"topic": name, "epoch": topic.epoch},
        )
    if partition >= len(topic.ends):
        message = f"topic {name!r} has no partition {partition}: it has {len(topic.ends)}, from 0"
        hint = "name none, and the key or the client chooses one"
        return Rejected(
            UnknownPartition, message, hint, {"topic": name, "partitions": len(topic.ends)}
        )
    return topic


def _bad_count(partitions: int) -> Rejected | None:
    if 1 <= partitions <= MAX_PARTITIONS:
        return None
    return Rejected(
        BadRequest, f"a topic has 1 to {MAX_PARTITIONS} partitions", f"{partitions} is out of range"
    )


def decide_create(state: State, command: CreateTopic, now: int) -> Outcome | Rejected:
    del now
    if bad := _bad_count(command.partitions):
        return bad
    topic = state.topics.get(command.name)
    if topic is None:
        return Outcome(
            _created(state.next_topic_id, command), TopicView(command.name, command.partitions, 1)
        )
    if len(topic.ends) != command.partitions:
        message = f"topic {command.name!r} exists with {len(topic.ends)} partitions"
        return Rejected(TopicExists, message, "to grow it: txmq topic set --partitions")
    if command.settings not in (DEFAULTS, topic.settings):
        return Rejected(
            TopicExists, f"topic {command.name!r} exists with other settings", "txmq topic alter"
        )
    return Outcome(reply=view(topic))


def _created(topic_id: int, command: CreateTopic) -> tuple[Event, ...]:
    created = TopicCreated(topic_id, command.name, command.partitions)
    if command.settings == DEFAULTS:
        return (created,)
    return created, TopicAltered(topic_id, command.settings)


def decide_alter(state: State, command: AlterTopic, now: int) -> Outcome | Rejected:
    del now
    topic = find(state, command.name)
    if isinstance(topic, Rejected):
        return topic
    settings = topic.settings._replace(**command.changes)
    return Outcome(
        (TopicAltered(topic.topic_id, settings),) if settings != topic.settings else (), view(topic)
    )


def decide_grow(state: State, command: GrowTopic, now: int) -> Outcome | Rejected:
    del now
    topic = find(state, command.name)
    if isinstance(topic, Rejected):
        return topic
    if bad := _bad_count(command.partitions):
        return bad
    if command.partitions < len(topic.ends):
        message = f"topic {command.name!r} has {len(topic.ends)} partitions; it can only grow"
        return Rejected(BadRequest, message, "for fewer partitions, make another topic")
    if command.partitions == len(topic.ends):
        return Outcome(reply=view(topic))
    if held := _held(state, topic):
        return held  # what they hold would come into partitions that are no longer their keys'
    grown = TopicGrown(topic.topic_id, command.partitions, topic.epoch + 1)
    return Outcome((grown,), TopicView(topic.name, command.partitions, topic.epoch + 1))


def decide_delete(state: State, command: DeleteTopic, now: int) -> Outcome | Rejected:
    """Refused while a transaction that writes to the topic is undecided: its decision
    must not hit nothing.
    """
    del now
    topic = find(state, command.name)
    if isinstance(topic, Rejected):
        return topic
    if held := _held(state, topic):
        return held
    return Outcome((TopicDeleted(topic.topic_id),), view(topic))


def _held(state: State, topic: Topic) -> Rejected | None:
    spots = [(topic.topic_id, partition) for partition in range(len(topic.ends))]
    if any(state.holds[spot] or visibility.is_shut(state, spot) for spot in spots):
        return Rejected(
            Conflict,
            f"undecided transactions hold keys of topic {topic.name!r}",
            "see: txmq tx list",
        )
    return None


def outside(
    state: State, topic: Topic, partition: int, offset: int, durable: int | None = None
) -> Rejected | None:
    """The no to an offset below the first message that is kept, or beyond the last that
    can be seen.
    """
    first, end = topic.firsts[partition], visibility.end(state, topic.topic_id, partition, durable)
    if first <= offset <= end:
        return None
    why = f"its messages begin at {first}" if offset < first else f"its messages end at {end}"
    hint = (
        "go on from the first that is kept: retention took those before" if offset < first else ""
    )
    message = f"offset {offset} of {topic.name}/{partition}: {why}"
    return Rejected(OffsetOutOfRange, message, hint, {"first": first, "end": end})


def view(topic: Topic) -> TopicView:
    """The topic as clients see it."""
    return TopicView(topic.name, len(topic.ends), topic.epoch)


def apply_created(state: State, event: TopicCreated, place: Place) -> None:
    del place
    topic = Topic(event.topic_id, event.name, [0] * event.partitions)
    state.topics[event.name] = state.topics_by_id[event.topic_id] = topic
    state.next_topic_id = max(state.next_topic_id, event.topic_id + 1)
    state.dirty_topics.add(event.topic_id)


def apply_altered(state: State, event: TopicAltered, place: Place) -> None:
    del place
    state.topics_by_id[event.topic_id].settings = TopicSettings(*event.settings)
    state.dirty_topics.add(event.topic_id)


def apply_grown(state: State, event: TopicGrown, place: Place) -> None:
    del place
    topic = state.topics_by_id[event.topic_id]
    topic.growths.append(tuple(topic.ends))
    topic.grow(event.partitions)
    topic.epoch = event.epoch
    state.dirty_topics.add(event.topic_id)


def apply_deleted(state: State, event: TopicDeleted, place: Place) -> None:
    """The name is free again; the entries stay until retention drops their segments."""
    del place
    topic = state.topics_by_id[event.topic_id]
    topic.deleted = True
    state.topics.pop(topic.name, None)
    state.dirty_topics.add(event.topic_id)


def entries(state: State, topic_id: int, partition: int, offset: int) -> list[tuple[int, t.Entry]]:
    """(base offset, entry) of the published batch that holds `offset`, if there is one:
    at most one item.
    """
    start = t.ENTRY_KEY.pack(topic_id, partition, 0)
    for key, row in state.entries.range(
        start, t.ENTRY_KEY.pack(topic_id, partition, offset + 1), reverse=True
    ):
        base: int = t.ENTRY_KEY.unpack(key)[2]
        entry = t.Entry._make(row)
        return [(base, entry)] if offset < base + entry.count else []
    return []


def entries_from(state: State, spot: Spot, offset: int) -> Iterator[tuple[int, t.Entry]]:
    """(base offset, entry) of the published batches from the one that holds `offset`
    on.
    """
    start = t.ENTRY_KEY.pack(*spot, offset)
    if state.entries.get(start) is None:
        for base, entry in entries(state, *spot, offset):
            start = t.ENTRY_KEY.pack(*spot, base + entry.count)
            yield base, entry
    unpack, make = t.ENTRY_KEY.unpack, t.Entry._make  # looked up once: there may be thousands
    for key, row in state.entries.range(start, t.ENTRY_KEY.pack(*spot, t.SIGN)):
        yield unpack(key)[2], make(row)


DECIDERS: dict[type, Any] = {
    CreateTopic: decide_create,
    AlterTopic: decide_alter,
    GrowTopic: decide_grow,
    DeleteTopic: decide_delete,
}
APPLIERS: dict[type, Any] = {
    TopicCreated: apply_created,
    TopicAltered: apply_altered,
    TopicGrown: apply_grown,
    TopicDeleted: apply_deleted,
}
