"""Control calls of consumer groups and dead letters."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from txmq.batch import BatchView, key_hash_at, single_row
from txmq.broker.calls import views
from txmq.broker.calls.control import Answer, Asking, Handler, then
from txmq.broker.log_reader import offset_at, read_batches
from txmq.core.consumers import commands as core
from txmq.core.consumers import queries
from txmq.core.consumers.failures import locate
from txmq.core.consumers.stall_reasons import Seen
from txmq.core.state.state import Rejected
from txmq.errors import CorruptRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from random import Random

    from txmq.broker.engine import Engine
    from txmq.broker.fetch_service import Fetching
    from txmq.broker.session_service import Membership
    from txmq.core.consumers.membership import JoinReply
    from txmq.wire import calls_consumers as wire

MS = 1_000
UNREADABLE: dict[str, Any] = {
    "key": None,
    "tag": None,
    "headers": {},
    "message_id": None,
    "born_at": None,
}


class ConsumerCalls:
    """What members and operators ask of consumer groups."""

    def __init__(
        self, engine: Engine, membership: Membership, fetching: Fetching, chance: Random
    ) -> None:
        self._engine, self._membership, self._fetching, self._chance = (
            engine,
            membership,
            fetching,
            chance,
        )
        self.handlers: dict[str, Handler] = {
            "consumer.join": self.join,
            "consumer.heartbeat": self.heartbeat,
            "consumer.leave": self.leave,
            "consumer.nack": self.nack,
            "consumer.return": self.give_back,
            "consumer.extend": self.extend,
            "group.list": self.listed,
            "group.show": self.show,
            "group.alter": self.alter,
            "group.delete": lambda asking, args: self._do(
                core.GroupDelete(args.group, _by(args)), asking.answer
            ),
            "group.reset": self.reset,
            "group.clone": self.clone,
            "group.pause": lambda asking, args: self._pause(asking, args, paused=True),
            "group.resume": lambda asking, args: self._pause(asking, args, paused=False),
        }

    def _do(self, command: object, answer: Answer) -> None:
        self._engine.submit(command, then(answer, lambda _reply: {}))

    def clone(self, asking: Asking, args: wire.GroupClone) -> None:
        command = core.GroupClone(args.group, args.to, _by(args))
        self._engine.submit(command, then(asking.answer, lambda reply: reply._asdict()))

    def _pause(self, asking: Asking, args: wire.GroupPause, *, paused: bool) -> None:
        self._do(core.GroupPause(args.group, paused, _by(args), args.topic or ""), asking.answer)

    def listed(self, asking: Asking, args: object) -> None:
        del args
        self._engine.tell(
            asking.answer, {"groups": queries.groups(self._engine.state, self._engine.now())}
        )

    def show(self, asking: Asking, args: wire.Group) -> None:
        engine, paused = self._engine, self._membership.paused(args.group)
        seen = Seen(engine.store.durable, engine.now(), engine.store.quarantined, paused)
        engine.tell(asking.answer, queries.show(engine.state, args.group, seen))

    def join(self, asking: Asking, args: wire.Join) -> None:
        named = args.member is not None
        member = args.member or f"m-{uuid4().hex[:12]}"
        start = args.start
        if isinstance(start, int) and start < 0:
            start += self._engine.now()
        wanted = _wanted(args)._replace(start=start, strategy=args.strategy)
        starts = self._starts(args.topics, start) if isinstance(start, int) else ()
        command = core.Join(
            args.group,
            member,
            args.instance,
            args.mode,
            args.topics,
            wanted,
            starts,
            args.held,
            named,
            args.static,
        )

        def joined(reply: JoinReply) -> dict[str, Any]:
            settings = reply.settings
            self._fetching.end(reply.group, member)
            self._membership.joined(
                asking.session,
                reply.group,
                member,
                args.instance,
                settings.session_us,
                static=args.static,
            )
            return {
                "group": reply.group,
                "member": member,
                "generation": reply.generation,
                "epoch": reply.epoch,
                "assignment": reply.assignment,
                "session_ms": settings.session_us // MS,
                "lease_ms": settings.lease_us // MS,
                "consume_timeout_ms": settings.consume_timeout_us // MS,
            }

        self._engine.submit(command, then(asking.answer, joined))

    def _starts(self, topics: Iterable[str], time: int) -> tuple[core.TopicOffset, ...]:
        """Where a time stands in each partition of the topics."""
        known = self._engine.state.topics
        return tuple(
            (name, partition, offset_at(self._engine.state, known[name].topic_id, partition, time))
            for name in topics
            if name in known
            for partition in range(len(known[name].ends))
        )

    def heartbeat(self, asking: Asking, args: wire.Heartbeat) -> None:
        reply = queries.membership(self._engine.state, args.group, args.member, args.instance)
        if not isinstance(reply, Rejected):
            self._membership.heard(asking.session, args.group, args.member, args.paused)
        self._engine.tell(asking.answer, reply)

    def leave(self, asking: Asking, args: wire.Member) -> None:
        self._membership.left(args.group, args.member)
        self._do(core.Leave(args.group, args.member, args.instance), asking.answer)

    def nack(self, asking: Asking, args: wire.Nack) -> None:
        failure = core.Failure(
            args.error.type, args.error.text, args.error.fingerprint, args.error.bases
        )
        delay = None if args.delay_ms is None else args.delay_ms * MS
        command = core.Nack(
            args.group, args.member, args.generation, args.topic, args.partition, args.offset, None, delay, failure,
            args.dead, self._chance.random(), args.postpone,
        )  # fmt: skip
        source = locate(self._engine.state, command)
        if source is not None:
            begin, store = source.position, self._engine.store
            key = key_hash_at(lambda at, length: store.read(begin + at, length), source.row)
            command = command._replace(key_hash=key)
        self._engine.submit(command, then(asking.answer, lambda reply: reply._asdict()))

    def give_back(self, asking: Asking, args: wire.Return) -> None:
        command = core.Return(args.group, args.member, args.generation, args.ranges)
        self._engine.submit(command, then(asking.answer, lambda reply: {"stale": reply.stale}))

    def extend(self, asking: Asking, args: wire.Extend) -> None:
        command = core.ExtendLeases(args.group, args.member, args.generation, args.leases)
        self._engine.submit(
            command, then(asking.answer, lambda reply: {"deadline": reply.deadline})
        )

    def alter(self, asking: Asking, args: wire.GroupAlter) -> None:
        def told(_reply: object) -> dict[str, Any]:
            return {"settings": queries.settings(self._engine.state.consumers.groups[args.group])}

        self._engine.submit(
            core.GroupSet(args.group, _wanted(args), _by(args)), then(asking.answer, told)
        )

    def reset(self, asking: Asking, args: wire.GroupReset) -> None:
        to, offsets = "", tuple[tuple[int, int], ...]()
        if isinstance(args.to, str):
            to = args.to
        elif isinstance(args.to, int):
            offsets = tuple(
                (partition, offset)
                for _topic, partition, offset in self._starts((args.topic,), args.to)
            )
        else:
            offsets = tuple(args.to.items())
        command = core.ResetPosition(
            args.group, args.topic, to, offsets, args.reprocess, args.dry_run, _by(args)
        )
        self._engine.submit(command, then(asking.answer, lambda reply: reply._asdict()))


class LetterCalls:
    """Dead letters: seen, replayed, closed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.handlers: dict[str, Handler] = {
            "dlq.list": self.listed,
            "dlq.show": self.show,
            "dlq.stats": lambda asking, args: engine.tell(
                asking.answer, queries.letter_stats(engine.state, args.group)
            ),
            "dlq.replay": self.replay,
            "dlq.abandon": self.abandon,
        }

    def listed(self, asking: Asking, args: wire.DlqList) -> None:
        found = queries.letters(self._engine.state, args.group, args.after, args.limit)
        if isinstance(found, Rejected):
            asking.answer(found)
            return
        letters, following = found
        shown = list(views.as_fit(self._readable(letters, bodies=args.bodies)))
        if len(shown) < len(letters):
            following = shown[-1]["number"]
        self._engine.tell(asking.answer, {"letters": shown, "next": following})

    def show(self, asking: Asking, args: wire.DlqShow) -> None:
        letter = queries.letter(
            self._engine.state, args.group, args.topic, args.partition, args.offset
        )
        told = letter if isinstance(letter, Rejected) else self._told(letter, bodies=True)
        self._engine.tell(asking.answer, told)

    def _readable(
        self, letters: Sequence[queries.Letter], *, bodies: bool
    ) -> Iterator[dict[str, Any]]:
        """Without bodies each, and of a damaged one that it is; with bodies those
        before the first damaged one.
        """
        for number, letter in enumerate(letters):
            try:
                yield self._told(letter, bodies=bodies)
            except CorruptRecord as error:
                if bodies and not number:
                    raise
                if bodies:
                    return
                yield letter.fields | UNREADABLE | {"damaged": error.message}

    def _told(self, letter: queries.Letter, *, bodies: bool) -> dict[str, Any]:
        """A letter with what only its batch knows; letters of what is not durable yet
        do not exist, so the log can be read.
        """
        (batch,) = read_batches(self._engine.store, [(letter.position, letter.length)])
        view = BatchView(single_row(bytes(batch), letter.row))
        told = letter.fields | {
            "key": view.keys[0],
            "tag": view.tags[0],
            "headers": dict(view.headers[0]),
        }
        told |= {"message_id": view.message_ids[0], "born_at": view.born_at[0]}
        return told | {"body": b64encode(view.bodies[0]).decode()} if bodies else told

    def replay(self, asking: Asking, args: wire.DlqReplay) -> None:
        command = core.ReplayLetters(args.group, args.letters, _by(args))
        self._engine.submit(command, then(asking.answer, lambda reply: reply._asdict()))

    def abandon(self, asking: Asking, args: wire.DlqAbandon) -> None:
        command = core.AbandonLetters(args.group, args.letters, args.reason, args.operator or "")
        self._engine.submit(command, then(asking.answer, lambda reply: reply._asdict()))


def _wanted(args: wire.Wanted) -> core.Wanted:
    return core.Wanted(
        on_exhausted=args.on_exhausted,
        retry=None if args.retry is None else args.retry.policy(),
        lease_us=None if args.lease_ms is None else args.lease_ms * MS,
        session_us=None if args.session_ms is None else args.session_ms * MS,
        max_parked=args.max_parked,
        flood_keys=args.flood_keys,
        span=args.span,
        consume_timeout_us=None
        if args.consume_timeout_ms is None
        else args.consume_timeout_ms * MS,
    )


def _by(args: wire.Operation) -> str:
    """Who did it and why, for the log."""
    return ": ".join(filter(None, (args.operator, args.reason)))
