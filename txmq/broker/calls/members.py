"""Control calls of the members of consumer groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from txmq.batch import key_hash_at
from txmq.broker.calls.dispatcher import CallContext, Handler, then
from txmq.broker.calls.groups import requested_settings
from txmq.core.consumers import commands as core
from txmq.core.consumers import group_views
from txmq.core.consumers.failures import key_source
from txmq.core.consumers.membership import JoinBegun, JoinReply
from txmq.crashpoints import crashpoint
from txmq.model.retry import FailureReport
from txmq.model.units import MILLISECOND, SECOND

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from txmq.broker.delivery.long_polls import LongPolls
    from txmq.broker.delivery.member_sessions import MemberSessions
    from txmq.broker.engine.engine import Engine
    from txmq.config.broker import ConsumerDefaults
    from txmq.wire.calls import consumers as wire


class MemberCalls:
    """Calls of the members of consumer groups.

    `defaults` are for what the first member of a group leaves open. `random` spreads
    retries. `version_joined` hears of group and version of each member that joins.
    """

    def __init__(
        self,
        engine: Engine,
        sessions: MemberSessions,
        polls: LongPolls,
        *,
        defaults: ConsumerDefaults,
        random: Random,
        version_joined: Callable[[str, str], None],
    ) -> None:
        self._engine, self._sessions, self._polls = engine, sessions, polls
        self._defaults, self._random = defaults, random
        self._version_joined = version_joined
        self.handlers: dict[str, Handler] = {
            "consumer.join": self.join,
            "consumer.heartbeat": self.heartbeat,
            "consumer.leave": self.leave,
            "consumer.nack": self.nack,
            "consumer.return": self.return_messages,
            "consumer.extend": self.extend,
        }

    def join(self, call: CallContext, args: wire.Join) -> None:
        named = args.member is not None
        member = args.member or f"m-{uuid4().hex[:12]}"
        start = args.start
        if isinstance(start, int) and start < 0:
            start += self._engine.now()
        wanted = requested_settings(args)._replace(start=start, strategy=args.strategy)
        if args.group not in self._engine.state.groups.by_name:
            wanted = self._with_defaults(wanted)
        command = core.JoinGroup(
            args.group,
            member,
            args.instance,
            args.mode,
            args.topics,
            wanted,
            args.held,
            named,
            args.static,
        )

        def begin_session(group: str, session_us: int) -> None:
            self._sessions.member_joined(
                call.session,
                group,
                member,
                args.instance,
                session_us,
                static=args.static,
                version=args.version,
                filter_=args.filter,
            )

        def joined(reply: JoinReply) -> dict[str, Any]:
            settings = reply.settings
            self._version_joined(reply.group, args.version)
            self._polls.end_fetches(reply.group, member)
            begin_session(reply.group, settings.session_us)
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

        def decided(reply: Any) -> None:  # noqa: ANN401  # JoinReply, JoinBegun or a refusal
            if isinstance(reply, JoinBegun):
                begin_session(reply.group, reply.session_us)
                self._polls.next_turn(go_on)  # other requests come in between
            else:
                then(call.answer, joined)(reply)

        def go_on() -> None:
            self._engine.submit(command._replace(continued=True), decided)

        self._engine.submit(command, decided)

    def _with_defaults(self, wanted: core.RequestedSettings) -> core.RequestedSettings:
        """Return the settings of a new group, some left open by its first member."""
        defaults = self._defaults
        if wanted.lease_us is None:
            wanted = wanted._replace(lease_us=defaults.lease_s * SECOND)
        if wanted.session_us is None:
            wanted = wanted._replace(session_us=defaults.session_s * SECOND)
        return wanted

    def heartbeat(self, call: CallContext, args: wire.Heartbeat) -> dict[str, Any]:
        reply = group_views.describe_membership(
            self._engine.state, args.group, args.member, args.instance
        )
        self._sessions.heartbeat(call.session, args.group, args.member, args.paused)
        return reply

    def leave(self, call: CallContext, args: wire.MemberArgs) -> None:
        self._sessions.member_left(args.group, args.member)
        command = core.LeaveGroup(args.group, args.member, args.instance)
        self._engine.submit(command, then(call.answer, lambda _reply: {}))

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
