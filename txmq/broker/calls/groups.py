"""Control calls of operators about consumer groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.broker.calls import operators
from txmq.broker.calls.dispatcher import CallContext, Handler, then
from txmq.broker.calls.operators import audited, operator_note
from txmq.broker.calls.pages import page_of
from txmq.broker.search import message_view
from txmq.core.consumers import commands as core
from txmq.core.consumers import group_views
from txmq.core.consumers.stall_reasons import StallContext
from txmq.core.state.visibility import offset_at_time
from txmq.errors import CorruptRecord
from txmq.model.units import MILLISECOND

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.delivery.group_paces import GroupPaces
    from txmq.broker.delivery.member_sessions import MemberSessions
    from txmq.broker.engine.engine import Engine
    from txmq.core.state.consumer_groups import GroupSettings
    from txmq.core.state.state import State
    from txmq.core.steps import Steps
    from txmq.wire.calls import consumers as wire
    from txmq.wire.calls.arguments import ListArgs

KEYS_READ_BYTES = 16 << 20  # of messages, to name the keys of a group's fences
KEY_READ_BYTES = 2 << 20  # of one batch: it is read in one step


class GroupCalls:
    """Calls of operators about consumer groups."""

    def __init__(self, engine: Engine, sessions: MemberSessions, paces: GroupPaces) -> None:
        self._engine, self._sessions, self._paces = engine, sessions, paces
        self.handlers: dict[str, Handler] = {
            "group.list": self.list_groups,
            "group.show": self.show,
            "group.alter": self.alter,
            "group.delete": self.delete,
            "group.reset": self.reset,
            "group.clone": self.clone,
            "group.pause": lambda call, args: self._pause(call, args, paused=True),
            "group.resume": lambda call, args: self._pause(call, args, paused=False),
        }

    def list_groups(self, call: CallContext, args: ListArgs) -> Steps[dict[str, Any]]:
        known = self._engine.state.groups.by_name
        page = page_of(known, args, "consumer groups")
        found: list[dict[str, Any]] = []
        for name in page.names:
            group = known.get(name)
            if group is not None:  # it may have been deleted meanwhile
                now = self._engine.now()
                found.append((yield from group_views.summarize(self._engine.state, group, now)))
            yield
        return {"groups": found, "next": page.following}

    def show(self, call: CallContext, args: wire.GroupArgs) -> Steps[dict[str, Any]]:
        engine, paused = self._engine, self._sessions.paused_topics(args.group)
        seen = StallContext(
            engine.store.durable,
            engine.now(),
            engine.store.quarantined,
            paused,
            self._paces.holds(args.group),
        )
        return self._describe(args.group, seen)

    def _describe(self, name: str, seen: StallContext) -> Steps[dict[str, Any]]:
        """Describe a group, with the keys of its fences as far as `KEYS_READ_BYTES` of
        their messages tell them.
        """
        described = yield from group_views.describe_group(self._engine.state, name, seen)
        for member in described["member_list"]:
            member.update(self._sessions.place_of(name, member["member"])._asdict())
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

    def alter(self, call: CallContext, args: wire.GroupAlter) -> None:
        def altered(settings: GroupSettings) -> dict[str, Any]:
            return {"settings": group_views.describe_settings(settings)}

        command = core.AlterGroup(args.group, requested_settings(args), operator_note(args))
        self._act(call, args, command, altered)

    def delete(self, call: CallContext, args: wire.OperatorArgs) -> None:
        command = core.DeleteGroup(args.group, operator_note(args))
        self._act(call, args, command, lambda _reply: {})

    def reset(self, call: CallContext, args: wire.GroupReset) -> None:
        to, offsets = "", tuple[tuple[int, int], ...]()
        if isinstance(args.to, str):
            to = args.to
        elif isinstance(args.to, int):
            offsets = _offsets_at(self._engine.state, args.topic, args.to)
        else:
            offsets = tuple(args.to.items())
        command = core.ResetPosition(
            args.group, args.topic, to, offsets, args.reprocess, args.dry_run, operator_note(args)
        )
        self._act(call, args, command, lambda reply: reply._asdict())

    def clone(self, call: CallContext, args: wire.GroupClone) -> None:
        command = core.CloneGroup(args.group, args.to, operator_note(args))
        self._act(call, args, command, lambda reply: reply._asdict())

    def _pause(self, call: CallContext, args: wire.GroupPause, *, paused: bool) -> None:
        command = core.PauseGroup(args.group, paused, operator_note(args), args.topic or "")
        self._act(call, args, command, lambda _reply: {})

    def _act(
        self,
        call: CallContext,
        args: wire.OperatorArgs,
        command: object,
        make: Callable[[Any], dict[str, Any]],
    ) -> None:
        """Submit a command of an operator about a group."""
        acted = audited(call.name, operators.group(args.group), args, command)
        self._engine.submit(acted, then(call.answer, make))


def _offsets_at(state: State, name: str, time: int) -> tuple[tuple[int, int], ...]:
    """Return partition and offset at a time, for each partition of a topic."""
    topic = state.topics.get(name)
    if topic is None:
        return ()
    return tuple(
        (partition, offset_at_time(state, topic.topic_id, partition, time))
        for partition in range(len(topic.end_offsets))
    )


def requested_settings(args: wire.GroupSettingsArgs) -> core.RequestedSettings:
    """Return the settings that a member or an operator asks for."""
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
        alarm_severity=getattr(args, "alarm_severity", None),
    )
