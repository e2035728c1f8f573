"""Who is still there: members of consumer groups live as long as their heartbeats, or a
moment longer than their connection.

This is the broker's volatile knowledge; that a member is gone becomes an event only
when it is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from txmq.core.consumers.commands import Leave, Rebalance
from txmq.core.events.base import TopicDeleted, TopicGrown
from txmq.core.state.state import Rejected

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.broker.engine import Engine
    from txmq.broker.protocol import Session
    from txmq.broker.reactor.protocols import Clock

SECOND = 1_000_000
log = structlog.get_logger()


@dataclass(slots=True)
class _Seen:
    instance: str
    session: Session | None
    lasts: float  # seconds without a heartbeat
    until: float
    static: bool = False
    paused: frozenset[str] = frozenset()


class Membership:
    """Heartbeats in, departures out. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, clock: Clock, *, grace_s: float) -> None:
        """`grace_s`: how long a member outlives its connection, for it may come back on
        another one.
        """
        self._engine, self._clock, self._grace = engine, clock, grace_s
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._reshaped: set[int] = (
            set()
        )  # topics that have more partitions, or none, than groups have shared out
        for event in (TopicGrown, TopicDeleted):
            engine.listen(event, lambda event, _place: self._reshaped.add(event.topic_id))

    def adopt(self) -> None:
        """The broker has started: static members of before have their session's time to
        come back.

        What members had that were not static is shared out among them, and again when
        those join.
        """
        for group in self._engine.state.consumers.by_id.values():
            lasts = group.settings.session_us / SECOND
            for member in group.members.values():
                until = self._clock.seconds() + lasts
                self._seen[group.name, member.name] = _Seen(
                    member.instance, None, lasts, until, static=True
                )
            if group.members:
                self._engine.submit(Rebalance(group.name), _gone)

    def joined(
        self,
        session: Session,
        group: str,
        member: str,
        instance: str,
        lasts_us: int,
        *,
        static: bool,
    ) -> None:
        """A member joined, or joined again, on this connection."""
        name, lasts = (group, member), lasts_us / SECOND
        self._seen[name] = _Seen(instance, session, lasts, self._clock.seconds() + lasts, static)
        self._watch(name, session)

    def heard(self, session: Session, group: str, member: str, paused: Iterable[str] = ()) -> None:
        """A member is alive, on this connection, and does not fetch the topics that are
        `paused`.
        """
        seen = self._seen.get((group, member))
        if seen is not None:
            seen.until = self._clock.seconds() + seen.lasts
            seen.paused = frozenset(paused)
            if seen.session is not session:
                seen.session = session
                self._watch((group, member), session)

    def _watch(self, name: tuple[str, str], session: Session) -> None:
        session.lost[name] = lambda: self._disconnected(name, session)

    def left(self, group: str, member: str) -> None:
        """A member left by itself."""
        self._seen.pop((group, member), None)

    def paused(self, group: str) -> dict[str, frozenset[str]]:
        """The topics that members do not fetch for now, by member."""
        return {
            member: seen.paused
            for (name, member), seen in self._seen.items()
            if name == group and seen.paused
        }

    def _disconnected(self, name: tuple[str, str], session: Session) -> None:
        seen = self._seen.get(name)
        if seen is not None and seen.session is session and not seen.static:
            seen.until = min(seen.until, self._clock.seconds() + self._grace)

    def _share_out(self) -> None:
        reshaped, self._reshaped = self._reshaped, set()
        if not reshaped:
            return
        for group in list(self._engine.state.consumers.by_id.values()):
            if any(not reshaped.isdisjoint(member.topics) for member in group.members.values()):
                self._engine.submit(Rebalance(group.name), _gone)

    def tick(self) -> None:
        """Timer: whoever has not been heard of is gone; what topics have become is
        shared out.
        """
        self._share_out()
        now = self._clock.seconds()
        for (group, member), seen in [item for item in self._seen.items() if item[1].until <= now]:
            del self._seen[group, member]
            log.warning("member.lost", group=group, member=member)
            self._engine.submit(Leave(group, member, seen.instance, lost=True), _gone)


def _gone(reply: object) -> None:
    """It may have left, or been replaced by a newer instance, a moment ago."""
    if isinstance(reply, Rejected):
        log.info("member.lost_already", message=reply.message)
