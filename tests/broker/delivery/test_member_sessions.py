"""Sessions of members: silence, lost connections, and members that may be away for a
while.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.task import Clock

from tests.core.consumers.world import ConsumersWorld
from txmq.broker.delivery.member_sessions import MemberSessions
from txmq.broker.reactor.stall_guard import Moment
from txmq.core.consumers.commands import LeaveGroup, Rebalance
from txmq.core.events.topics import TopicGrown
from txmq.errors import ReadOnly

SESSION_US = 30_000_000


class Place:
    """Member sessions, and the commands that their engine got."""

    def __init__(self) -> None:
        self.world, self.clock, self.asked = ConsumersWorld(t=2), Clock(), list[object]()
        self.listeners: dict[type, Any] = {}
        self.store = SimpleNamespace(read_only=False)
        self.refusing = False
        self.membership = MemberSessions(self, self.clock, grace_s=1.0)  # type: ignore[arg-type]  # what it needs of an engine

    @property
    def state(self) -> Any:
        return self.world.state

    def listen(self, event: type, listener: Any) -> None:
        self.listeners[event] = listener

    def submit(self, command: object, deliver: Any) -> None:
        self.asked.append(command)
        deliver(ReadOnly("full") if self.refusing else self.world.do(command))

    def joins(self, name: str, *, static: bool) -> Any:
        """Join a member on a connection of its own."""
        session: Any = SimpleNamespace(on_lost={}, hello=None, peer_host="127.0.0.1")
        self.world.join(name, static=static)
        self.membership.member_joined(session, "g", name, name, SESSION_US, static=static)
        return session

    def moment(self) -> Moment:
        return Moment(self.clock.seconds(), self.world.now)

    def later(self, seconds: float) -> list[str]:
        """Return the members after some time."""
        self.clock.advance(seconds)
        self.membership.tick(self.moment())
        return list(self.world.group().members)


def broken(session: Any) -> None:
    for callback in list(session.on_lost.values()):
        callback()


@pytest.mark.parametrize("static", [False, True])
def test_a_silent_member_is_lost_when_its_session_is_over(static: bool) -> None:  # noqa: FBT001
    place = Place()
    session = place.joins("a", static=static)
    assert place.later(29) == ["a"]
    place.membership.heartbeat(session, "g", "a")
    assert place.later(29) == ["a"]
    assert place.later(2) == []


def test_a_static_member_outlives_its_connection_by_its_session_and_another_one_by_a_moment() -> (
    None
):
    place = Place()
    for name, static in (("a", True), ("b", False)):
        broken(place.joins(name, static=static))
    assert place.later(0.9) == ["a", "b"]
    assert place.later(0.2) == ["a"]
    place.joins("a", static=True)
    assert place.later(29.5) == ["a"]
    assert place.later(1) == []


def test_after_a_restart_static_members_have_their_sessions_time_to_come_back() -> None:
    place = Place()
    for name in "ab":
        place.joins(name, static=True)
    place.world.boot()
    again = MemberSessions(place, place.clock, grace_s=1.0)  # type: ignore[arg-type]  # as above
    again.adopt_members()
    assert place.asked == [Rebalance("g")]
    place.world.join("a", static=True)
    again.member_joined(place.joins("a", static=True), "g", "a", "a", SESSION_US, static=True)
    place.clock.advance(15)
    again.heartbeat(SimpleNamespace(on_lost={}, hello=None, peer_host="127.0.0.1"), "g", "a")  # type: ignore[arg-type]  # what it needs of a session
    place.clock.advance(16)
    again.tick(place.moment())
    assert place.asked[1:] == [LeaveGroup("g", "b", "b", lost=True)]


def test_a_full_disk_only_puts_off_the_end_of_a_member_and_the_rebalance_of_its_group() -> None:
    place = Place()
    place.joins("a", static=False)
    place.joins("b", static=False)
    place.refusing = True
    topic_id = place.state.topics["t"].topic_id
    place.listeners[TopicGrown](TopicGrown(topic_id, 4, 1), None)
    assert place.later(31) == ["a", "b"]
    place.refusing, place.asked = False, []
    assert place.later(0) == []
    assert place.asked == [
        Rebalance("g"),
        LeaveGroup("g", "a", "a", lost=True),
        LeaveGroup("g", "b", "b", lost=True),
    ]
    place.store.read_only, place.asked = True, []
    place.joins("c", static=False)
    assert place.later(31) == ["c"]
    assert place.asked == []
    place.store.read_only = False
    assert place.later(0) == []
