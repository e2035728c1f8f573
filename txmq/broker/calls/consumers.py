"""Control calls of members, and of operators about consumer groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from txmq.batch import key_hash_at
from txmq.broker.calls import operators
from txmq.broker.calls.dispatcher import Answer, CallContext, Handler, then
from txmq.broker.calls.operators import audited, operator_note
from txmq.broker.calls.pages import page_of
from txmq.broker.engine.log_reader import offset_at_time
from txmq.broker.search import message_view
from txmq.core.consumers import commands as core
from txmq.core.consumers import group_views
from txmq.core.consumers.failures import key_source
from txmq.core.consumers.stall_reasons import StallContext
from txmq.core.events.outcome import Rejected
from txmq.crashpoints import crashpoint
from txmq.errors import CorruptRecord
from txmq.model.retry import FailureReport
from txmq.model.units import MILLISECOND, SECOND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from random import Random

    from txmq.broker.delivery.group_paces import GroupPaces
    from txmq.broker.delivery.long_polls import LongPolls
    from txmq.broker.delivery.member_sessions import MemberSessions
    from txmq.broker.engine.engine import Engine
    from txmq.broker.engine.turn_work import TurnWork
    from txmq.config.broker import ConsumerDefaults
    from txmq.core.consumers.membership import JoinReply
    from txmq.core.state.consumer_groups import GroupSettings
    from txmq.core.steps import Steps
    from txmq.wire.calls import consumers as wire
    from txmq.wire.calls.arguments import ListArgs

KEYS_READ_BYTES = 16 << 20  # of messages, to name the keys of a group's fences
KEY_READ_BYTES = 2 << 20  # of one batch: it is read in one step


class ConsumerGroupCalls:
    """Calls of members, and of operators about consumer groups."""

    def __init__(
        self,
        engine: Engine,
        members: MemberSessions,
        polls: LongPolls,
        random: Random,
        defaults: ConsumerDefaults,
        turns: TurnWork,
        version_joined: Callable[[str, str], None],
        paces: GroupPaces,
    ) -> None:
        """`version_joined` hears of group and version of each member that joins."""
        self._engine, self._members, self._polls, self._random = engine, members, polls, random
        self._defaults, self._turns = defaults, turns
        self._version_joined, self._paces = version_joined, paces
        self.handlers: dict[str, Handler] = {
            "consumer.join": self.join,
            "consumer.heartbeat": self.heartbeat,
            "consumer.leave": self.leave,
            "consumer.nack": self.nack,
            "consumer.return": self.return_messages,
            "consumer.extend": self.extend,
            "group.list": self.list_groups,
            "group.show": self.show,
            "group.alter": self.alter,
            "group.delete": self.delete,
            "group.reset": self.reset,
            "group.clone": self.clone,
            "group.pause": lambda call, args: self._pause(call, args, paused=True),
            "group.resume": lambda call, args: self._pause(call, args, paused=False),
        }

    def _submit(self, command: object, answer: Answer) -> None:
        self._engine.submit(command, then(answer, lambda _reply: {}))

    def _act(
        self,
        call: CallContext,
        name: str,
        args: wire.OperatorArgs,
        command: object,
        make: Callable[[Any], dict[str, Any]],
    ) -> None:
        """Submit a command of an operator about a group."""
        acted = audited(name, operators.group(args.group), args, command)
        self._engine.submit(acted, then(call.answer, make))

    def delete(self, call: CallContext, args: wire.OperatorArgs) -> None:
        command = core.DeleteGroup(args.group, operator_note(args))
        self._act(call, "group.delete", args, command, lambda _reply: {})

    def clone(self, call: CallContext, args: wire.GroupClone) -> None:
        command = core.CloneGroup(args.group, args.to, operator_note(args))
        self._act(call, "group.clone", args, command, lambda reply: reply._asdict())

    def _pause(self, call: CallContext, args: wire.GroupPause, *, paused: bool) -> None:
        command = core.PauseGroup(args.group, paused, operator_note(args), args.topic or "")
        name = "group.pause" if paused else "group.resume"
        self._act(call, name, args, command, lambda _reply: {})

    def list_groups(self, call: CallContext, args: ListArgs) -> None:
        self._turns.run(call.reader, self._list(args), call.answer)

    def _list(self, args: ListArgs) -> Steps[dict[str, Any] | Rejected]:
        known = self._engine.state.groups.by_name
        page = page_of(known, args, "consumer groups")
        if isinstance(page, Rejected):
            return page
        found: list[dict[str, Any]] = []
        for name in page.names:
            group = known.get(name)
            if group is not None:  # it may have been deleted meanwhile
                now = self._engine.now()
                found.append((yield from group_views.summarize(self._engine.state, group, now)))
            yield
        return {"groups": found, "next": page.following}

    def show(self, call: CallContext, args: wire.GroupArgs) -> None:
        engine, paused = self._engine, self._members.paused_topics(args.group)
        seen = StallContext(
            engine.store.durable,
            engine.now(),
            engine.store.quarantined,
            paused,
            self._paces.holds(args.group),
        )
        self._turns.run(call.reader, self._describe(args.group, seen), call.answer)

    def _describe(self, name: str, seen: StallContext) -> Steps[dict[str, Any] | Rejected]:
        """Describe a group, with the keys of its fences as far as `KEYS_READ_BYTES` of
        their messages tell them.
        """
        described = yield from group_views.describe_group(self._engine.state, name, seen)
        if isinstance(described, Rejected):
            return described
        for member in described["member_list"]:
            member.update(self._members.place_of(name, member["member"])._asdict())
        left = KEYS_READ_BYTES
        for fence in described["fence_list"]:
            head = group_views.fence_head(
                self._engine.state, name, fence["topic"], fence["key_hash"]
            )
            fence["key"] = None
            if head is not None and head.length <= min(left, KEY_READ_BYTES):
                left -= head.length
                fence["key"] = self._key_at(head)
            yield
        return described

    def _key_at(self, place: group_views.LogRow) -> str | None:
        """Return the key of a message in the log; None = its batch is damaged."""
        try:
            view = message_view.read_view(self._engine.store, place.position, place.length)
        except CorruptRecord:
            return None
        return view.keys[place.row]

    def join(self, call: CallContext, args: wire.Join) -> None:
        named = args.member is not None
        member = args.member or f"m-{uuid4().hex[:12]}"
        start = args.start
        if isinstance(start, int) and start < 0:
            start += self._engine.now()
        wanted = _settings_of(args)._replace(start=start, strategy=args.strategy)
        if args.group not in self._engine.state.groups.by_name:
            wanted = self._with_defaults(wanted)
        starts = self._offsets_at(args.topics, start) if isinstance(start, int) else ()
        command = core.JoinGroup(
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
            self._version_joined(reply.group, args.version)
            self._polls.end_fetches(reply.group, member)
            self._members.member_joined(
                call.session,
                reply.group,
                member,
                args.instance,
                settings.session_us,
                static=args.static,
                version=args.version,
                filter_=args.filter,
            )
            return {
                "group": reply.group,
                "member": member,
                "generation": reply.generation,
                "epoch": reply.epoch,
                "assignment": reply.assignment,
                "session_ms": settings.session_us // MILLISECOND,
                "lease_ms": settings.lease_us // MILLISECOND,
                "consume_timeout_ms": settings.consume_timeout_us // MILLISECOND,
                "retry": settings.policy.to_json(),
                "on_exhausted": settings.on_exhausted,
                **reply.identities._asdict(),
            }

        self._engine.submit(command, then(call.answer, joined))

    def _with_defaults(self, wanted: core.RequestedSettings) -> core.RequestedSettings:
        """Return the settings of a new group, some left open by its first member."""
        defaults = self._defaults
        if wanted.lease_us is None:
            wanted = wanted._replace(lease_us=defaults.lease_s * SECOND)
        if wanted.session_us is None:
            wanted = wanted._replace(session_us=defaults.session_s * SECOND)
        return wanted

    def _offsets_at(self, topics: Iterable[str], time: int) -> tuple[core.TopicOffset, ...]:
        """Return the offset at a time, for each partition of the topics."""
        known = self._engine.state.topics
        return tuple(
            (
                name,
                partition,
                offset_at_time(self._engine.state, known[name].topic_id, partition, time),
            )
            for name in topics
            if name in known
            for partition in range(len(known[name].end_offsets))
        )

    def heartbeat(self, call: CallContext, args: wire.Heartbeat) -> None:
        reply = group_views.describe_membership(
            self._engine.state, args.group, args.member, args.instance
        )
        if not isinstance(reply, Rejected):
            self._members.heartbeat(call.session, args.group, args.member, args.paused)
        self._engine.answer_when_durable(call.answer, reply)

    def leave(self, call: CallContext, args: wire.MemberArgs) -> None:
        self._members.member_left(args.group, args.member)
        self._submit(core.LeaveGroup(args.group, args.member, args.instance), call.answer)

    def nack(self, call: CallContext, args: wire.Nack) -> None:
        failure = FailureReport(
            args.error.type, args.error.text, args.error.fingerprint, args.error.bases
        )
        delay = None if args.delay_ms is None else args.delay_ms * MILLISECOND
        command = core.NackMessage(
            args.group,
            args.member,
            args.generation,
            args.topic,
            args.partition,
            args.offset,
            None,
            delay,
            failure,
            args.dead,
            self._random.random(),
            args.postpone,
        )
        source = key_source(self._engine.state, command)
        if source is not None:
            begin, read = source.entry.position, self._engine.store.read
            key = key_hash_at(lambda at, size: read(begin + at, size), source.row)
            command = command._replace(key_hash=key, source=source)

        def failed(reply: Any) -> dict[str, Any]:  # noqa: ANN401  # a NackReply
            crashpoint("nack.after_record")
            fields: dict[str, Any] = reply._asdict()
            return fields

        crashpoint("nack.before_record")
        self._engine.submit(command, then(call.answer, failed))

    def return_messages(self, call: CallContext, args: wire.Return) -> None:
        command = core.ReturnMessages(args.group, args.member, args.generation, args.ranges)
        self._engine.submit(command, then(call.answer, lambda reply: {"stale": reply.stale}))

    def extend(self, call: CallContext, args: wire.Extend) -> None:
        command = core.ExtendLeases(args.group, args.member, args.generation, args.leases)
        self._engine.submit(command, then(call.answer, lambda reply: {"deadline": reply.deadline}))

    def alter(self, call: CallContext, args: wire.GroupAlter) -> None:
        def altered(settings: GroupSettings) -> dict[str, Any]:
            return {"settings": group_views.describe_settings(settings)}

        command = core.AlterGroup(args.group, _settings_of(args), operator_note(args))
        self._act(call, "group.alter", args, command, altered)

    def reset(self, call: CallContext, args: wire.GroupReset) -> None:
        to, offsets = "", tuple[tuple[int, int], ...]()
        if isinstance(args.to, str):
            to = args.to
        elif isinstance(args.to, int):
            offsets = tuple(
                (partition, offset)
                for _topic, partition, offset in self._offsets_at((args.topic,), args.to)
            )
        else:
            offsets = tuple(args.to.items())
        command = core.ResetPosition(
            args.group, args.topic, to, offsets, args.reprocess, args.dry_run, operator_note(args)
        )
        self._act(call, "group.reset", args, command, lambda reply: reply._asdict())


def _settings_of(args: wire.GroupSettingsArgs) -> core.RequestedSettings:
    return core.RequestedSettings(
        on_exhausted=args.on_exhausted,
        retry=None if args.retry is None else args.retry.policy(),
        lease_us=None if args.lease_ms is None else args.lease_ms * MILLISECOND,
        session_us=None if args.session_ms is None else args.session_ms * MILLISECOND,
        max_parked=args.max_parked,
        flood_keys=args.flood_keys,
        span=args.span,
        consume_timeout_us=None
        if args.consume_timeout_ms is None
        else args.consume_timeout_ms * MILLISECOND,
        keep_until_exported=getattr(args, "keep_until_exported", None),  # an operator's only
        messages_per_s=getattr(args, "messages_per_s", None),
        cold_bytes_per_s=getattr(args, "cold_bytes_per_s", None),
    )
