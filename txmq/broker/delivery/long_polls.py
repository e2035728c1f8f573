"""Long polls: a request that finds nothing is answered when there are messages, or when
its time is up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, get_args

from txmq.core.events.consumers import (
    LeasesExpired,
    MemberLeft,
    PositionReset,
    Rebalanced,
    Replayed,
    Returned,
)
from txmq.core.events.letters import LetterTried
from txmq.core.events.topics import TopicDeleted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from txmq.broker.engine.engine import Engine, Requester
    from txmq.broker.reactor.interfaces import Clock, Timer
    from txmq.broker.reactor.protocol import ClientSession

# Events after which messages may be deliverable that were not before, without new ones.
FreeingEvent = (
    Returned | Rebalanced | MemberLeft | LeasesExpired | Replayed | LetterTried | PositionReset
)
MAX_WAIT_MS = 60_000
MAX_WAITING = 1_024  # requests of one connection
TURN_S = 0.002  # of a turn of the reactor, for waiters that are retried


class Attempt(Protocol):
    """Tries to answer; True = answered. `last`: the time is up, so it answers with what
    there is.
    """

    def __call__(self, *, last: bool) -> bool: ...


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request that waits. Messages of its `topics` can end the wait; `timed` ones may
    also become answerable without new messages. `member` is the fetching one. `end`
    answers the request with nothing.
    """

    session: ClientSession
    attempt: Attempt
    end: Callable[[], None]
    topics: Collection[str]
    requester: Requester
    timed: bool
    member: tuple[str, str] | None
    timer: Timer | None = None


_Waiters = dict[_Waiter, None]  # in their order


class LongPolls:
    """Holds requests that wait for messages. All methods belong to the reactor's
    thread.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._waiters: _Waiters = {}
        self._timed: _Waiters = {}
        self._by_topic: dict[str, _Waiters] = {}
        self._by_member: dict[tuple[str, str], _Waiters] = {}
        self._by_session: dict[ClientSession, _Waiters] = {}
        self._ready: _Waiters = {}  # to be retried, in this turn or the next ones
        self._retrying: Timer | None = None
        engine.on_published.append(self._wake)
        self._freed_groups: set[int] = set()  # to be retried in the next turn
        for kind in get_args(FreeingEvent):
            engine.listen(kind, self._group_freed)
        engine.listen(TopicDeleted, self._topic_deleted)

    def next_turn(self, function: Callable[[], None]) -> Timer:
        """Call a function in the next turn of the reactor."""
        return self._clock.callLater(0, self._engine.later(function))

    def ms_until(self, time: float) -> int:
        """Return the milliseconds until a time of the clock."""
        return int((time - self._clock.seconds()) * 1_000)

    def wait(
        self,
        session: ClientSession,
        wait_ms: int,
        attempt: Attempt,
        end: Callable[[], None],
        *,
        topics: Collection[str] = (),
        timed: bool = False,
        member: tuple[str, str] | None = None,
    ) -> None:
        """Retry an attempt when messages of these topics become visible, until
        `wait_ms` have passed; `timed` ones also with a timer.

        A connection has at most `MAX_WAITING` of them: the oldest ones end.
        """
        waiter = _Waiter(session, attempt, end, topics, self._engine.requester, timed, member)
        of_session = self._by_session.get(session, {})
        if len(of_session) >= MAX_WAITING:
            self._end(next(iter(of_session)))
        for waiters in self._indexes(waiter):
            waiters[waiter] = None
        self._engine.readers_waiting = True
        waiter.timer = self._clock.callLater(
            min(wait_ms, MAX_WAIT_MS) / 1_000, self._expire, waiter
        )
        session.on_lost[waiter] = lambda: self._remove(waiter)

    def _indexes(self, waiter: _Waiter) -> Iterator[_Waiters]:
        """Return the collections that a waiter belongs to."""
        yield self._waiters
        yield self._by_session.setdefault(waiter.session, {})
        if waiter.timed:
            yield self._timed
        if waiter.member is not None:
            yield self._by_member.setdefault(waiter.member, {})
        for topic in waiter.topics:
            yield self._by_topic.setdefault(topic, {})

    def end_fetches(self, group: str, member: str, session: ClientSession | None = None) -> None:
        """End the waiting fetches of a member, those of all connections unless
        `session` is given.
        """
        for waiter in list(self._by_member.get((group, member), ())):
            if session is None or waiter.session is session:
                self._end(waiter)

    def end_all(self, session: ClientSession) -> None:
        """End the waiting requests of a connection."""
        for waiter in list(self._by_session.get(session, ())):
            self._end(waiter)

    def _end(self, waiter: _Waiter) -> None:
        self._remove(waiter)
        self._engine.carry_out(waiter.requester, waiter.end)

    def _remove(self, waiter: _Waiter) -> None:
        if waiter not in self._waiters:
            return
        for waiters in (*self._indexes(waiter), self._ready):
            waiters.pop(waiter, None)
        if not self._by_session[waiter.session]:
            del self._by_session[waiter.session]
        if waiter.member is not None and not self._by_member[waiter.member]:
            del self._by_member[waiter.member]
        for topic in waiter.topics:
            if not self._by_topic[topic]:
                del self._by_topic[topic]
        waiter.session.on_lost.pop(waiter, None)
        self._engine.readers_waiting = bool(self._waiters)
        if waiter.timer is not None and waiter.timer.active():
            waiter.timer.cancel()

    def _expire(self, waiter: _Waiter) -> None:
        if waiter.session.is_choked:  # more replies would only fill the memory
            self._end(waiter)
            return
        self._remove(waiter)
        self._engine.carry_out(waiter.requester, partial(waiter.attempt, last=True))

    def _wake(self, topic_ids: set[int]) -> None:
        topics = self._engine.state.topics_by_id
        for topic_id in topic_ids:
            topic = topics.get(topic_id)
            if topic is not None:
                self._ready |= self._by_topic.get(topic.name, {})
        self._retry_ready()

    def _topic_deleted(self, event: TopicDeleted, _place: object) -> None:
        """Answer those who wait for its messages in the next turn."""
        self.next_turn(partial(self._wake, {event.topic_id}))

    def _group_freed(self, event: FreeingEvent, _place: object) -> None:
        """Retry the group's fetches in the next turn: messages became deliverable."""
        if self._by_member:
            if not self._freed_groups:
                self.next_turn(self._retry_freed)
            self._freed_groups.add(event.group_id)

    def _retry_freed(self) -> None:
        freed, self._freed_groups = self._freed_groups, set()
        groups = self._engine.state.groups.by_id
        names = {groups[group_id].name for group_id in freed if group_id in groups}
        for (group, _member), waiters in self._by_member.items():
            if group in names:
                self._ready |= waiters
        self._retry_ready()

    def retry_waiting(self) -> None:
        """Timer: retry fetches for messages that become due by time alone."""
        self._ready |= self._timed
        self._retry_ready()

    def _retry_ready(self) -> None:
        """Retry waiters for a while, and the rest in the next turn."""
        until = self._clock.seconds() + TURN_S
        while self._ready:
            waiter = next(iter(self._ready))
            del self._ready[waiter]
            self._retry(waiter)
            if self._clock.seconds() >= until and self._retrying is None:
                self._retrying = self._clock.callLater(0, self._retry_rest)
                return

    def _retry_rest(self) -> None:
        self._retrying = None
        self._retry_ready()

    def _retry(self, waiter: _Waiter) -> None:
        if waiter.session.is_choked:
            waiter.timed = True  # until its client has read the replies before
            self._timed[waiter] = None
            return
        attempt = partial(waiter.attempt, last=False)
        # after an exception it has its answer as well
        if self._engine.carry_out(waiter.requester, attempt) is not False:
            self._remove(waiter)
