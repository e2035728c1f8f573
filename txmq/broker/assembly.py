"""The parts of a broker, put together around an engine: the same for the process that
serves and for the simulation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.task import LoopingCall

from txmq.broker.alarms.alarms import Alarms
from txmq.broker.calls.consumers import ConsumerCalls, LetterCalls
from txmq.broker.calls.control import Calls, TopicCalls
from txmq.broker.calls.messages import MessageCalls
from txmq.broker.calls.transactions import TransactionCalls
from txmq.broker.calls.xa import XaCalls
from txmq.broker.catalogues.catalogue_service import Cataloguing
from txmq.broker.checkback.checkback_service import CheckBacks
from txmq.broker.checkback.in_doubt_service import Doubts
from txmq.broker.checkback.listeners import Watching
from txmq.broker.data_directory.retention_service import Retaining
from txmq.broker.delay_service import LOOK_S, Delays
from txmq.broker.fetch_service import Fetching
from txmq.broker.protocol import SessionFactory
from txmq.broker.publication_service import Backlog
from txmq.broker.reactor.stall_guard import Reprieve
from txmq.broker.requests import Requests
from txmq.broker.session_service import Membership
from txmq.broker.statistics import Statistics
from txmq.core.consumers.background_work import TidyReply
from txmq.core.consumers.commands import ExpireLeases, TidyGroups
from txmq.core.retention.outcome_expiry import Sweep
from txmq.core.transactions.instances import key_of
from txmq.model import limits
from txmq.tx.checkback import CheckSchedule
from txmq.wire.hello import Limits, Welcome
from txmq.wire.together import FEATURE, SENDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from twisted.python.failure import Failure

    from txmq.broker.checkback.resolver_service import Resolves
    from txmq.broker.engine import Engine
    from txmq.broker.reactor.protocols import Clock, Timer
    from txmq.config.broker import Checks, Settings

TICK_S = 0.05  # how late a retry, a check-back or a lost lease may be noticed
SWEEP_S = 600.0
ALARMS_S = 1.0


class Assembly:
    """Everything between the engine and the connections.

    `sessions` makes the protocols, `calls` are the control calls, `watching` tells what
    becomes of transactions, `alarms` what an operator has to know; `start` begins the
    timers.
    """

    def __init__(
        self, engine: Engine, settings: Settings, clock: Clock, resolving: Resolves, chance: Random
    ) -> None:
        self._engine, self._settings, self._clock = engine, settings, clock
        self.watching = Watching(engine)
        checks = CheckBacks(engine, _schedule(settings.checks), resolving, chance, self.watching)
        fetching = Fetching(engine, clock)
        self._membership = membership = Membership(
            engine, clock, grace_s=settings.consumers.lost_connection_grace_s
        )
        self.retaining = Retaining(engine, settings.retention, clock)
        self.alarms = Alarms(engine, settings.alarms, resolving, self.watching, self.retaining)
        self.cataloguing = Cataloguing(engine, settings.catalogue, clock)
        self.statistics = Statistics(engine, clock, self.retaining, self.cataloguing)
        parts = (
            TopicCalls(engine, settings, self.alarms, clock, self.statistics),
            ConsumerCalls(engine, membership, fetching, chance),
            LetterCalls(engine),
            TransactionCalls(engine, checks, fetching),
            XaCalls(engine),
            MessageCalls(engine, self.cataloguing),
        )
        self.calls = Calls(
            {name: handler for part in parts for name, handler in part.handlers.items()}
        )
        requests = Requests(
            engine,
            fetching,
            self.calls,
            resolving,
            self.watching,
            message_bytes=settings.broker.message_bytes,
        )
        self.sessions = SessionFactory(requests.handle, self._welcome, clock)
        self._backlog = Backlog(engine, clock)
        self._delays = Delays(engine, clock)
        engine.before_answers.append(self.sessions.gather)
        engine.on_durable.append(
            self.sessions.flush
        )  # the last to hear of it: readers have been answered by then
        self._reprieve = Reprieve(clock, membership.tick, self._expire)
        self._timers: list[tuple[float, Callable[[], None]]] = [
            (TICK_S, self._reprieve.tick),
            (TICK_S, checks.tick),
            (TICK_S, fetching.retry),
            (TICK_S, self._backlog.tick),
            (TICK_S, self._tidy),
            (LOOK_S, self._delays.tick),
            (SWEEP_S, self._delays.sweep),
            (SWEEP_S, self._sweep),
            (settings.retention.every_s, self.retaining.tick),
            (ALARMS_S, Doubts(engine, settings.checks.in_doubt_after_s).tick),
            (ALARMS_S, self.alarms.tick),
            (ALARMS_S, self.statistics.tick),
            (ALARMS_S, self.cataloguing.tick),
        ]
        self._loops: list[LoopingCall] = []
        self._tidying = False
        self._more: Timer | None = None  # of a sweep that has not come to its end

    def every(self, seconds: float, function: Callable[[], None]) -> None:
        """One more timer; before `start`."""
        self._timers.append((seconds, function))

    def start(self, failed: Callable[[Failure], None]) -> None:
        """Begin the timers; one that fails has met a bug, and ends the broker through
        `failed`.
        """
        self._membership.adopt()
        self._reprieve.tick()  # the first, by which the next one is late or not
        self._delays.tick()  # what was due meanwhile comes before whatever is sent now
        for seconds, function in self._timers:
            loop = LoopingCall(function)
            loop.clock = self._clock  # type: ignore[assignment]  # Twisted's type is an interface of zope's
            loop.start(seconds, now=False).addErrback(failed)
            self._loops.append(loop)

    def stop(self) -> None:
        """End the timers."""
        for loop in self._loops:
            if loop.running:
                loop.stop()
        self._backlog.stop()
        self.retaining.stop()
        self._delays.stop()
        if self._more is not None:
            self._more.cancel()
            self._more = None

    def _expire(self) -> None:
        self._engine.submit(ExpireLeases(), _ignore)

    def _tidy(self) -> None:
        consumers = self._engine.state.consumers
        if not self._tidying and (consumers.doomed or consumers.resetting or consumers.cloning):
            self._tidying = True
            self._engine.submit(TidyGroups(), self._tidied)

    def _tidied(self, reply: object) -> None:
        """The next slice at once, when this one is durable: others have had their
        turn.
        """
        self._tidying = False
        if isinstance(reply, TidyReply) and reply.more:
            self._tidy()

    def _sweep(self) -> None:
        if self._more is None:  # else the sweep before has not come to its end
            connected = frozenset(key_of(*instance) for instance in self.sessions.instances())
            self._sweep_on(Sweep(connected=connected))

    def _sweep_on(self, command: Sweep) -> None:
        self._more = None
        self._engine.submit(command, self._swept)

    def _swept(self, following: object) -> None:
        """Goes on soon where there is more, a step at a time."""
        if isinstance(following, Sweep) and self._more is None:
            self._more = self._clock.callLater(TICK_S, self._sweep_on, following)

    def _welcome(self, version: int) -> Welcome:
        store, state = self._engine.store, self._engine.state
        sizes = Limits(frame=limits.FRAME, message=self._settings.broker.message_bytes)
        name = self._settings.broker.name
        return Welcome(
            version=version, features=(FEATURE, SENDS), broker=name, log_id=store.log_id, boot_epoch=state.boot_epoch,
            limits=sizes,
        )  # fmt: skip


def _schedule(settings: Checks) -> CheckSchedule:
    seconds = 1_000_000
    return CheckSchedule(
        first=int(settings.first_s * seconds),
        second=int(settings.then_s * seconds),
        longest=int(settings.longest_s * seconds),
        in_doubt_after=settings.in_doubt_after,
    )


def _ignore(reply: Any) -> None:  # whatever the core says
    """A timer's command is told by the state."""
