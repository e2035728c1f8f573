"""Control calls of topics."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import structlog

from txmq.broker.access.needs import topic as topic_need
from txmq.broker.calls import operators
from txmq.broker.calls.dispatcher import CallContext, Handler, Reply, then
from txmq.broker.calls.operators import audited
from txmq.broker.calls.pages import page_of
from txmq.broker.engine.log_reader import visible_end
from txmq.core.state.state import TopicSettings
from txmq.core.topics import topics as rules
from txmq.core.topics.schemas import ChangedSchema, ChangeSchema
from txmq.errors import Conflict, RequestRejected
from txmq.model.own_topics import is_own

if TYPE_CHECKING:
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock
    from txmq.config.broker import BrokerSettings
    from txmq.core.audit import Audited
    from txmq.core.state.state import Topic
    from txmq.core.steps import Steps
    from txmq.wire.calls import topics

ENDS_PER_STEP = 64  # partitions, between two looks at the clock
# Until no transaction holds keys; a client waits 5 s, and has to hear the refusal.
GROW_S, GROW_RETRY_S = 3.0, 0.01
MOST_LOGGED = 10  # topics, in one line
log = structlog.get_logger()


class TopicCalls:
    """Calls about topics. `settings` say how topics are made on first use."""

    def __init__(self, engine: Engine, settings: BrokerSettings, clock: Clock) -> None:
        self._engine, self._settings, self._clock = engine, settings, clock
        self.handlers: dict[str, Handler] = {
            "topic.create": self.create,
            "topic.alter": self.alter,
            "topic.schema": self.schema,
            "topic.describe": self.describe,
            "topic.list": self.list_topics,
            "topic.show": self.show,
            "topic.grow": self.grow,
            "topic.delete": self.delete,
        }

    def create(self, call: CallContext, args: topics.TopicCreate) -> None:
        settings = TopicSettings(**args.changes())
        self._engine.submit(
            rules.CreateTopic(args.name, args.partitions, settings, call.user),
            then(call.answer, _topic_view),
        )

    def grow(self, call: CallContext, args: topics.TopicGrow) -> None:
        """Add partitions. Retry for a while if transactions are in the way: nearly all
        are decided within milliseconds.
        """
        command = _audited(call, args, rules.GrowTopic(args.name, args.partitions))
        self._grow(call, command, self._clock.seconds() + GROW_S)

    def _grow(self, call: CallContext, command: Audited, until: float) -> None:
        def grown(reply: rules.TopicView | RequestRejected) -> None:
            if isinstance(reply, Conflict) and self._clock.seconds() < until:
                again = self._engine.later(self._grow)
                self._clock.callLater(GROW_RETRY_S, again, call, command, until)
            else:
                then(call.answer, _topic_view)(reply)

        self._engine.submit(command, grown)

    def alter(self, call: CallContext, args: topics.TopicAlter) -> None:
        def altered(reply: rules.AlteredTopic) -> dict[str, Any]:
            return _topic_view(reply.view) | {"settings": _settings_view(reply.settings)}

        command = _audited(call, args, rules.AlterTopic(args.name, args.changes()))
        self._engine.submit(command, then(call.answer, altered))

    def schema(self, call: CallContext, args: topics.TopicSchema) -> None:
        """Change the schema of a topic, or show it where nothing is given."""
        command = ChangeSchema(
            args.name,
            args.json_schema,
            args.compatibility,
            force=args.force,
            dry_run=args.dry_run,
        )

        def changed(reply: ChangedSchema) -> dict[str, Any]:
            return reply._asdict()

        if args.json_schema is None and args.compatibility is None:
            self._engine.submit(command, then(call.answer, changed))
        else:
            self._engine.submit(_audited(call, args, command), then(call.answer, changed))

    def delete(self, call: CallContext, args: topics.TopicDelete) -> None:
        command = _audited(call, args, rules.DeleteTopic(args.name))
        self._engine.submit(command, then(call.answer, lambda reply: reply._asdict()))

    def describe(self, call: CallContext, args: topics.TopicNames) -> Reply:
        """Describe topics, and create missing ones if the call asks for it and the
        broker allows it. The reply waits until all of them are durable.
        """
        known = self._engine.state.topics
        missing = [name for name in args.names if name not in known]
        similar = self._similar(call, missing[0]) if missing else ""
        if missing and not (args.create and self._settings.create_topics):
            raise rules.unknown_topic(self._engine.state, missing[0], similar)
        replies: list[object] = []
        for name in missing:
            self._engine.submit(
                rules.CreateTopic(name, self._settings.partitions, user=call.user),
                replies.append,
            )
        for reply in replies:
            if isinstance(reply, RequestRejected):  # at once: the disk is full
                raise reply
        refused = [name for name in args.names if name not in known]
        if refused:  # its own reply waits for the disk, and says why; this one waits behind it
            self._engine.answer_when_durable(
                lambda _none: call.answer(_first_refusal(replies)), None
            )
            return None
        views = [_topic_view(rules.topic_view(known[name])) for name in args.names]
        described: dict[str, Any] = {"topics": views}
        if missing:
            described |= {"created": missing, "similar": similar}
            topics = missing[:MOST_LOGGED]
            log.warning("topic.created_at_use", topics=topics, user=call.user, similar=similar)
        return described

    def _similar(self, call: CallContext, name: str) -> str:
        """Return the topic that a user may have meant, of those that he may see."""
        return rules.similar_topic(
            self._engine.state, name, lambda other: call.may(topic_need("describe", other))
        )

    def list_topics(self, call: CallContext, args: topics.TopicList) -> Steps[dict[str, Any]]:
        every = self._engine.state.topics
        known = every if args.own else [name for name in every if not is_own(name)]
        page = page_of(known, args, "topics")
        found: list[dict[str, Any]] = []
        for name in page.names:
            topic = every.get(name)
            ends = [] if topic is None else (yield from self._ends(topic))
            if topic is not None and not topic.deleted:  # it may be by now
                messages = sum(ends) - sum(topic.start_offsets)
                sizes = {"messages": messages, "bytes": sum(topic.partition_bytes)}
                found.append(_topic_view(rules.topic_view(topic)) | sizes)
            yield
        return {"topics": found, "next": page.following}

    def show(self, call: CallContext, args: topics.TopicName) -> Steps[dict[str, Any]]:
        topic = self._engine.state.topics.get(args.name)
        if topic is None:
            raise rules.unknown_topic(self._engine.state, args.name, self._similar(call, args.name))
        groups: list[str] = []
        for group in list(self._engine.state.groups.by_name.values()):
            if (topic.topic_id, 0) in group.positions:  # all partitions, or none
                groups.append(group.name)
            yield
        ends = yield from self._ends(topic)
        if topic.deleted:
            raise rules.unknown_topic(self._engine.state, args.name)
        fields = {
            "firsts": topic.start_offsets[: len(ends)],
            "ends": ends,
            "bytes": sum(topic.partition_bytes),
            "partition_bytes": list(topic.partition_bytes[: len(ends)]),
            "settings": _settings_view(topic.settings),
            "schema": topic.settings.schema,
        }
        return _topic_view(rules.topic_view(topic)) | fields | {"groups": sorted(groups)}

    def _ends(self, topic: Topic) -> Steps[list[int]]:
        ends: list[int] = []
        for partition in count():
            if topic.deleted or partition >= len(topic.end_offsets):  # meanwhile
                break
            durable = self._engine.store.durable
            ends.append(visible_end(self._engine.state, topic.topic_id, partition, durable))
            if not partition % ENDS_PER_STEP:
                yield
        return ends


def _audited(call: CallContext, args: topics.TopicActs, command: object) -> Audited:
    return audited(call.name, operators.topic(args.name), args, command)


def _first_refusal(replies: list[object]) -> RequestRejected:
    return next(reply for reply in replies if isinstance(reply, RequestRejected))


def _settings_view(own: TopicSettings) -> dict[str, Any]:
    """Return the topic's own settings as `topic.alter` takes them; "default" where the
    broker's apply.
    """
    times = {"retention_ms": own.retention_us, "letters_ms": own.letters_us}
    view: dict[str, Any] = {
        name: time // 1_000 if time >= 0 else "default" for name, time in times.items()
    }
    sizes = {"retention_bytes": own.retention_bytes, "message_bytes": own.message_bytes}
    view |= {name: "default" if size < 0 else size for name, size in sizes.items()}
    view |= {"policy": own.policy or "default", "flush": own.flush or "default"}
    view |= {"writable": own.writable, "readable": own.readable}
    view |= {"note": own.note} if own.note else {}
    return view | ({"compatibility": own.compatibility} if own.schema else {})


def _topic_view(view: rules.TopicView) -> dict[str, Any]:
    return view._asdict()
