"""Who is still there: sessions, lost connections, and members that may be away for a
while.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.task import Clock

from tests.core.consumer_world import World
from txmq.broker.session_service import Membership
from txmq.core.consumers.commands import Leave, Rebalance

SESSION_US = 30_000_000


class Place:
    """A membership and its engine's commands."""

    def __init__(self) -> None:
        self.world, self.clock, self.asked = World(t=2), Clock(), list[object]()
        self.listeners: dict[type, Any] = {}
        self.membership = Membership(self, self.clock, grace_s=1.0)  # type: ignore[arg-type]  # what it needs of an engine

    @property
    def state(self) -> Any:
        return self.world.state

    def listen(self, event: type, listener: Any) -> None:
        self.listeners[event] = listener

    def submit(self, command: object, deliver: Any) -> None:
        self.asked.append(command)
        deliver(self.world.do(command))

    def joins(self, name: str, *, static: bool) -> Any:
        """A member on a connection of its own."""
        session: Any = SimpleNamespace(lost={})
        self.world.join(name, static=static)
        self.membership.joined(session, "g", name, name, SESSION_US, static=static)
        return session

    def later(self, seconds: float) -> list[str]:
        """Who is a member after so long."""
        self.clock.advance(seconds)
        self.membership.tick()
        return list(self.world.group().members)


def broken(session: Any) -> None:
    for callback in list(session.lost.values()):
        callback()


@pytest.mark.parametrize("static", [False, True])
def test_a_member_that_says_nothing_is_lost_when_its_session_is_over(static: bool) -> None:
    place = Place()
    session = place.joins("a", static=static)
    assert place.later(29) == ["a"]
    place.membership.heard(session, "g", "a")
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
    again = Membership(place, place.clock, grace_s=1.0)  # type: ignore[arg-type]  # as above
    again.adopt()
    assert place.asked == [Rebalance("g")]
    place.world.join("a", static=True)
    again.joined(place.joins("a", static=True), "g", "a", "a", SESSION_US, static=True)
    place.clock.advance(15)
    again.heard(SimpleNamespace(lost={}), "g", "a")  # type: ignore[arg-type]  # what it needs of a session
    place.clock.advance(16)
    again.tick()
    assert place.asked[1:] == [Leave("g", "b", "b", lost=True)]
