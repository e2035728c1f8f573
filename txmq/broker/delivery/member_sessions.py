"""Sessions of consumer group members: a member lives as long as its heartbeats, or for
a grace period after its connection is lost.

This knowledge is volatile. The departure of a member becomes an event only when it is
decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import structlog

from txmq.core.consumers.commands import LeaveGroup, Rebalance
from txmq.core.events.topics import TopicCreated, TopicDeleted, TopicGrown
from txmq.errors import ReadOnly, RequestRejected
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock
    from txmq.broker.reactor.protocol import ClientSession
    from txmq.broker.reactor.stall_guard import Moment

log = structlog.get_logger()


class MemberPlace(NamedTuple):
    """Place of a member, as it says: `version` is that of its program, `client` that
    of its txmq. `filter` is what it takes, by tags and selector; "" = everything.
    """

    host: str = ""
    version: str = ""
    client: str = ""
    filter: str = ""


NOWHERE = MemberPlace()


@dataclass(slots=True)
class _MemberSession:
    instance: str
    session: ClientSession | None
    timeout_s: float  # seconds without a heartbeat
    deadline: float
    static: bool = False
    paused: frozenset[str] = frozenset()
    place: MemberPlace = NOWHERE


class MemberSessions:
    """Notes heartbeats, and submits the departure of members without any. All methods
    belong to the reactor's thread.
    """

    def __init__(self, engine: Engine, clock: Clock, *, grace_s: float) -> None:
        """`grace_s`: seconds that a member outlives its connection, because it may come
        back on another one.
        """
        self._engine, self._clock, self._grace = engine, clock, grace_s
        self._sessions: dict[tuple[str, str], _MemberSession] = {}
        # topics that are new, or have other partitions than groups have shared out
        self._changed_topics: set[int] = set()
        self._refused: set[str] = set()  # groups whose rebalance found the disk full
        for event in (TopicCreated, TopicGrown, TopicDeleted):
            engine.listen(event, lambda event, _place: self._changed_topics.add(event.topic_id))

    def adopt_members(self) -> None:
        """Start sessions for the static members that the log knows, so that they may
        come back.

        Partitions of other members are assigned anew now, and again when those join.
        """
        for group in self._engine.state.groups.by_id.values():
            lasts = group.settings.session_us / SECOND
            for member in group.members.values():
                until = self._clock.seconds() + lasts
                self._sessions[group.name, member.name] = _MemberSession(
                    member.instance, None, lasts, until, static=True
                )
            if group.members:
                self._rebalance(group.name)

    def member_joined(
        self,
        session: ClientSession,
        group: str,
        member: str,
        instance: str,
        timeout_us: int,
        *,
        static: bool,
        version: str = "",
        filter_: str = "",
    ) -> None:
        """Begin the session of a member that joined, perhaps again, on this
        connection.
        """
        name, lasts = (group, member), timeout_us / SECOND
        client = "" if session.hello is None else session.hello.client
        place = MemberPlace(session.peer_host, version, client, filter_)
        self._sessions[name] = _MemberSession(
            instance, session, lasts, self._clock.seconds() + lasts, static, place=place
        )
        self._watch(name, session)

    def heartbeat(
        self, session: ClientSession, group: str, member: str, paused: Iterable[str] = ()
    ) -> None:
        """Extend a member's session. The member does not fetch the `paused` topics."""
        seen = self._sessions.get((group, member))
        if seen is not None:
            seen.deadline = self._clock.seconds() + seen.timeout_s
            seen.paused = frozenset(paused)
            if seen.session is not session:
                seen.session = session
                self._watch((group, member), session)

    def _watch(self, name: tuple[str, str], session: ClientSession) -> None:
        session.on_lost[name] = lambda: self._disconnected(name, session)

    def member_left(self, group: str, member: str) -> None:
        """End the session of a member that has left."""
        self._sessions.pop((group, member), None)

    def place_of(self, group: str, member: str) -> MemberPlace:
        """Return where a member runs; empty texts if it has not come back yet."""
        seen = self._sessions.get((group, member))
        return NOWHERE if seen is None else seen.place

    def filters(self) -> dict[str, dict[str, str]]:
        """Return what members take, as they said at their join, by group and member."""
        found: dict[str, dict[str, str]] = {}
        for (group, member), seen in self._sessions.items():
            if seen.place is not NOWHERE:
                found.setdefault(group, {})[member] = seen.place.filter
        return found

    def paused_topics(self, group: str) -> dict[str, frozenset[str]]:
        """Return the topics that members do not fetch for now, by member."""
        return {
            member: seen.paused
            for (name, member), seen in self._sessions.items()
            if name == group and seen.paused
        }

    def _disconnected(self, name: tuple[str, str], session: ClientSession) -> None:
        seen = self._sessions.get(name)
        if seen is not None and seen.session is session and not seen.static:
            seen.deadline = min(seen.deadline, self._clock.seconds() + self._grace)

    def _rebalance_changed(self) -> None:
        reshaped, self._changed_topics = self._changed_topics, set()
        refused, self._refused = self._refused, set()
        if not reshaped and not refused:
            return
        topics = self._engine.state.topics_by_id
        # by name: a topic may be made again under the name of a deleted one
        names = {topics[topic_id].name for topic_id in reshaped}
        for group in list(self._engine.state.groups.by_id.values()):
            read = {topic_id for member in group.members.values() for topic_id in member.topics}
            if group.name in refused or any(topics[topic_id].name in names for topic_id in read):
                self._rebalance(group.name)

    def _rebalance(self, group: str) -> None:
        def replied(reply: object) -> None:
            if isinstance(reply, ReadOnly):
                self._refused.add(group)

        self._engine.submit(Rebalance(group), replied)

    def tick(self, moment: Moment) -> None:
        """Timer: remove members that were silent for too long at this moment, and
        rebalance groups whose topics have changed.
        """
        if self._engine.store.read_only:  # nothing can be recorded: once there is space
            return
        self._rebalance_changed()
        for (group, member), seen in [
            item for item in self._sessions.items() if item[1].deadline <= moment.seconds
        ]:
            del self._sessions[group, member]
            log.warning("member.lost", group=group, member=member)
            self._engine.submit(
                LeaveGroup(group, member, seen.instance, lost=True),
                partial(self._removed, (group, member), seen),
            )

    def _removed(self, name: tuple[str, str], seen: _MemberSession, reply: object) -> None:
        """Note a refusal: the disk is full, or the member has left, or a newer instance
        has replaced it.
        """
        if not isinstance(reply, RequestRejected):
            return
        if isinstance(reply, ReadOnly):
            self._sessions.setdefault(name, seen)  # over, so the next tick removes it
        else:
            log.info("member.lost_already", message=reply.message)
