"""Control calls: what each means. Calls about consumers and about transactions have
modules of their own.

A handler gets the session and its checked arguments, and answers through `answer`,
which takes a JSON-able dict, now or later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.broker.log_reader import end_of
from txmq.core.state.state import Rejected, TopicSettings
from txmq.core.topics import topics as rules
from txmq.errors import Conflict, CorruptRecord, MessagesDamaged
from txmq.wire import calls as wire
from txmq.wire.json import dump

if TYPE_CHECKING:
    from txmq.broker.alarms.alarms import Alarms
    from txmq.broker.engine import Engine
    from txmq.broker.protocol import Session
    from txmq.broker.reactor.protocols import Clock
    from txmq.broker.statistics import Statistics
    from txmq.config.broker import Settings
    from txmq.core.state.state import Topic
    from txmq.wire import calls_topics as topics
    from txmq.wire.calls_alarms import AlarmsReport
    from txmq.wire.frames import Frame

GROW_S, GROW_AGAIN_S = (
    5.0,
    0.01,
)  # how long a moment without held keys is waited for, and how often it is looked
Answer = Callable[[Any], None]  # a dict, or a Rejected
Handler = Callable[["Asking", Any], None]


class Asking(NamedTuple):
    """One call under way: who asked, and how to answer."""

    caller: Session | None  # None = asked from inside this process, about what is
    answer: Answer

    @property
    def session(self) -> Session:
        """The session of whoever asked."""
        assert self.caller is not None, "this call is for clients only"
        return self.caller


class Calls:
    """The table of all calls."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        missing = wire.CALLS.keys() ^ handlers.keys()
        assert not missing, f"calls without a handler, or the other way round: {sorted(missing)}"
        self._handlers = handlers

    def handle(self, session: Session, frame: Frame) -> None:
        """Carry out one call."""
        name, args = wire.decode_call(frame.payload)

        def answer(reply: Any) -> None:  # whatever JSON can hold
            if isinstance(reply, Rejected):
                session.reject(frame, reply)
            else:
                session.reply(frame, dump(reply))

        self._carry_out(name, Asking(session, answer), args)

    def ask(self, name: str, args: dict[str, object], answer: Answer) -> None:
        """Carry out a call that only reads, for an edge of the broker; its arguments
        are checked like a client's.

        `answer` gets a dict or a Rejected. Raises RemoteProtocolError for arguments
        that are none of the call's.
        """
        _name, checked = wire.decode_call(wire.encode_call(name, args))
        self._carry_out(name, Asking(None, answer), checked)

    def _carry_out(self, name: str, asking: Asking, args: Any) -> None:  # the call's own model
        try:
            self._handlers[name](asking, args)
        except CorruptRecord as error:
            detail: dict[str, object] = {"path": error.path, "position": error.position}
            hint = "the broker's alarms name the file: restore it from a backup, or ask for what comes after it"
            asking.answer(Rejected(MessagesDamaged, error.message, hint, detail))


def then(answer: Answer, make: Callable[[Any], dict[str, Any]]) -> Answer:
    """An `answer` for replies of the core: refusals pass, everything else goes through
    `make`.
    """
    return lambda reply: answer(reply if isinstance(reply, Rejected) else make(reply))


class TopicCalls:
    """Topics, and the broker itself."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        alarms: Alarms,
        clock: Clock,
        statistics: Statistics,
    ) -> None:
        self._engine, self._settings, self._alarms, self._clock = engine, settings, alarms, clock
        self._statistics = statistics
        self.handlers: dict[str, Handler] = {
            "topic.create": self.create,
            "topic.alter": self.alter,
            "topic.describe": self.describe,
            "topic.list": self.listed,
            "topic.show": self.show,
            "topic.grow": self.grow,
            "topic.delete": self.delete,
            "broker.show": self.broker,
            "broker.alarms": self.alarms,
            "broker.stats": self.stats,
            "alarms.report": self.report,
        }

    def create(self, asking: Asking, args: topics.TopicCreate) -> None:
        settings = TopicSettings(**args.changes())
        self._engine.submit(
            rules.CreateTopic(args.name, args.partitions, settings), then(asking.answer, _shape)
        )

    def grow(self, asking: Asking, args: topics.TopicShape) -> None:
        """Tries for a while where transactions are in the way: nearly all are decided
        within milliseconds.
        """
        self._grow(
            asking, rules.GrowTopic(args.name, args.partitions), self._clock.seconds() + GROW_S
        )

    def _grow(self, asking: Asking, command: rules.GrowTopic, until: float) -> None:
        def told(reply: rules.TopicView | Rejected) -> None:
            if (
                isinstance(reply, Rejected)
                and reply.error is Conflict
                and self._clock.seconds() < until
            ):
                self._clock.callLater(GROW_AGAIN_S, self._grow, asking, command, until)
            else:
                asking.answer(reply if isinstance(reply, Rejected) else _shape(reply))

        self._engine.submit(command, told)

    def alter(self, asking: Asking, args: topics.TopicAlter) -> None:
        def altered(view: rules.TopicView) -> dict[str, Any]:
            return _shape(view) | {"settings": _settings(self._engine.state.topics[view.name])}

        self._engine.submit(
            rules.AlterTopic(args.name, args.changes()), then(asking.answer, altered)
        )

    def delete(self, asking: Asking, args: topics.TopicName) -> None:
        self._engine.submit(
            rules.DeleteTopic(args.name), then(asking.answer, lambda view: {"name": view.name})
        )

    def describe(self, asking: Asking, args: topics.TopicNames) -> None:
        """Creates what is missing where that is asked for and allowed; the reply waits
        until all of it is durable.
        """
        known = self._engine.state.topics
        missing = [name for name in args.names if name not in known]
        if missing and not (args.create and self._settings.broker.create_topics):
            asking.answer(rules.find(self._engine.state, missing[0]))
            return
        replies: list[object] = []
        for name in missing:
            self._engine.submit(
                rules.CreateTopic(name, self._settings.broker.partitions), replies.append
            )
        for reply in replies:
            if isinstance(reply, Rejected):  # at once: the disk is full
                asking.answer(reply)
                return
        views = [_shape(rules.view(known[name])) for name in args.names]
        self._engine.tell(asking.answer, {"topics": views})

    def listed(self, asking: Asking, args: wire.NoArgs) -> None:
        del args
        found = [
            _shape(rules.view(topic)) | {"messages": sum(self._ends(topic)) - sum(topic.firsts)}
            for topic in self._engine.state.topics.values()
        ]
        asking.answer({"topics": sorted(found, key=lambda topic: str(topic["name"]))})

    def show(self, asking: Asking, args: topics.TopicName) -> None:
        topic = rules.find(self._engine.state, args.name)
        if isinstance(topic, Rejected):
            asking.answer(topic)
            return
        groups = [
            g.name
            for g in self._engine.state.consumers.groups.values()
            if any(spot[0] == topic.topic_id for spot in g.positions)
        ]
        kept = {
            "firsts": topic.firsts,
            "ends": self._ends(topic),
            "bytes": sum(topic.sizes),
            "settings": _settings(topic),
        }
        asking.answer(_shape(rules.view(topic)) | kept | {"groups": sorted(groups)})

    def _ends(self, topic: Topic) -> list[int]:
        durable = self._engine.store.durable
        return [
            end_of(self._engine.state, topic.topic_id, partition, durable)
            for partition in range(len(topic.ends))
        ]

    def alarms(self, asking: Asking, args: wire.NoArgs) -> None:
        """At once: with a full disk, which is an alarm, nothing becomes durable."""
        del args
        asking.answer({"alarms": [alarm._asdict() for alarm in self._alarms.raised()]})

    def report(self, asking: Asking, args: AlarmsReport) -> None:
        asking.answer(self._alarms.reported.report(args) or {})

    def stats(self, asking: Asking, args: wire.Stats) -> None:
        asking.answer(self._statistics.tell(args.limit))

    def broker(self, asking: Asking, args: wire.NoArgs) -> None:
        del args
        store, state = self._engine.store, self._engine.state
        asking.answer(
            {
                "name": self._settings.broker.name,
                "log_id": str(store.log_id),
                "boot_epoch": state.boot_epoch,
                "end": store.end,
                "durable": store.durable,
                "read_only": store.read_only or self._engine.disk.refusing,
                "disk": None
                if self._engine.disk.space is None
                else self._engine.disk.space._asdict(),
                "topics": len(state.topics),
                "groups": len(state.consumers.groups),
                "undecided": state.undecided,
                "delayed": state.delayed,
                "segments": len(store.segments()),
                "resolvers": [resolver.name for resolver in self._settings.resolver],
            }
        )


def _settings(topic: Topic) -> dict[str, Any]:
    """What was set for the topic, as the call that sets it takes it; the rest is as the
    broker has it.
    """
    own = topic.settings
    times = {"retention_ms": own.retention_us, "letters_ms": own.letters_us}
    told: dict[str, Any] = {
        name: time // 1_000 if time >= 0 else "default" for name, time in times.items()
    }
    sizes = {"retention_bytes": own.retention_bytes, "message_bytes": own.message_bytes}
    told |= {name: "default" if size < 0 else size for name, size in sizes.items()}
    told |= {"policy": own.policy or "default", "flush": own.flush or "default"}
    return told | {"writable": own.writable, "readable": own.readable}


def _shape(view: rules.TopicView) -> dict[str, Any]:
    return {"name": view.name, "partitions": view.partitions, "epoch": view.epoch}
