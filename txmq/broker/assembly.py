"""The services of a broker, put together around an engine.

The process that serves and the simulation use the same assembly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from twisted.internet.task import LoopingCall

from txmq.broker.access.guard import Guard
from txmq.broker.background.clock_service import ClockService
from txmq.broker.background.delay_service import LOOK_AHEAD_S, DelayService
from txmq.broker.background.group_work_service import GroupWorkService
from txmq.broker.background.outcome_expiry_service import OutcomeExpiryService
from txmq.broker.background.plan_service import PlanService
from txmq.broker.background.policy_service import PolicyService
from txmq.broker.background.publication_service import PublicationService
from txmq.broker.calls.audit import AuditCalls
from txmq.broker.calls.broker import BrokerCalls
from txmq.broker.calls.clock import ClockCalls
from txmq.broker.calls.cluster import Alone, ClusterCalls, LeaderCalls, LogListCalls
from txmq.broker.calls.dispatcher import CallDispatcher
from txmq.broker.calls.groups import GroupCalls
from txmq.broker.calls.inboxes import InboxCalls
from txmq.broker.calls.letter_edits import LetterEditCalls
from txmq.broker.calls.letter_redrives import RedriveCalls
from txmq.broker.calls.letters import DeadLetterCalls
from txmq.broker.calls.lives import MessageLifeCalls
from txmq.broker.calls.log import LogCalls
from txmq.broker.calls.members import MemberCalls
from txmq.broker.calls.messages import MessageCalls
from txmq.broker.calls.plans import PlanCalls
from txmq.broker.calls.recover import RecoverCalls
from txmq.broker.calls.topics import TopicCalls
from txmq.broker.calls.transactions import TransactionCalls
from txmq.broker.calls.users import UserCalls
from txmq.broker.calls.xa import XaCalls
from txmq.broker.checkback.checkback_service import CheckBackService
from txmq.broker.checkback.in_doubt_service import InDoubtService
from txmq.broker.checkback.transaction_listeners import TransactionListeners
from txmq.broker.data_directory.log_holds import LogHolds
from txmq.broker.data_directory.retention_service import RetentionService
from txmq.broker.delivery.fetch_service import FetchService
from txmq.broker.delivery.long_polls import LongPolls
from txmq.broker.delivery.member_sessions import MemberSessions
from txmq.broker.engine.turn_work import TurnWork
from txmq.broker.monitoring.alarms import AlarmService
from txmq.broker.monitoring.statistics import Statistics
from txmq.broker.reactor.held_sends import HeldSends
from txmq.broker.reactor.session_factory import SessionFactory
from txmq.broker.reactor.stall_guard import Moment, StallGuard
from txmq.broker.reactor.steady_clock import SteadyClock
from txmq.broker.requests.dispatcher import RequestDispatcher
from txmq.broker.search.catalogue_service import CatalogueService
from txmq.broker.settings_reload import SettingsReload
from txmq.core.events.users import UserDeleted
from txmq.core.state import restores
from txmq.model import limits
from txmq.model.units import SECOND
from txmq.tx.checkback import CheckSchedule
from txmq.wire.hello import BrokerLimits, Welcome, negotiate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from twisted.python.failure import Failure

    from txmq.broker.checkback.resolvers import Resolvers
    from txmq.broker.engine.engine import Engine
    from txmq.broker.monitoring.cluster_node import ClusterNode
    from txmq.broker.reactor.interfaces import Clock
    from txmq.config.broker import CheckbackSettings, SettingsFile
    from txmq.wire.hello import Hello

TICK_S = 0.05  # how late a retry, a check-back or a lost lease may be noticed
CLOCK_S = 0.05  # how late a wall clock that was set may be noticed
EXPIRY_S = 600.0
ALARMS_S = 1.0
POLICIES_S = 5.0
COMPARE_S = 5.0  # between questions to databases about forced decisions
FRAMES_S = 1.0


class Assembly:
    """Everything between the engine and the connections.

    `sessions` makes the protocols of connections. `start` begins the timers.
    """

    def __init__(
        self,
        engine: Engine,
        settings: SettingsFile,
        clock: Clock,
        resolvers: Resolvers,
        random: Random,
        steady: SteadyClock | None = None,
        nodes: ClusterNode | None = None,
    ) -> None:
        """`steady` is the clock behind the engine's time, None where nobody sets it.
        `nodes` are those of a shared log, None for a broker alone.
        """
        self._engine, self._settings, self._clock = engine, settings, clock
        self._nodes = nodes or Alone(engine, settings.broker)
        steady = steady or SteadyClock(engine.now, clock.seconds)
        sends = HeldSends(engine, clock)
        self.turns, self.guard = TurnWork(engine, clock), Guard(engine, clock)
        self.listeners = TransactionListeners(engine)
        self.checks = CheckBackService(
            engine, _schedule(settings.checks), resolvers, random, self.listeners
        )
        self._in_doubt = InDoubtService(engine, settings.checks.in_doubt_after_s)
        self._polls = LongPolls(engine, clock)
        fetches = FetchService(engine, self._polls, clock)
        self.paces = fetches.paces
        self._members = MemberSessions(
            engine, clock, grace_s=settings.consumers.lost_connection_grace_s
        )
        self.retention = RetentionService(engine, settings.retention, clock)
        self.holds = LogHolds(clock.seconds)
        self.clock = ClockService(engine, steady, clock, resolvers)
        self.alarms = AlarmService(
            engine,
            settings,
            resolvers,
            self.listeners,
            self.retention,
            self.clock,
            sends,
            self._members,
        )
        self.alarms.cluster = nodes
        self.catalogues = CatalogueService(engine, settings.catalogue, clock)
        self.statistics = Statistics(engine, clock, self.retention, self.catalogues)
        self.alarms.statistics = self.statistics
        self.reloading = SettingsReload(settings)
        letters = DeadLetterCalls(engine, self.turns)
        self._plans = PlanService(engine, self.turns, clock, letters.next_places)
        self._policies = PolicyService(engine, self.turns, letters.next_places)
        self._log_list = LogListCalls(engine, self._list_changed)
        self.log = LogCalls(engine, self.holds, settings.broker.data)
        self.calls = self._make_calls(letters, resolvers, random, nodes)
        requests = RequestDispatcher(
            engine,
            fetches,
            self.calls,
            resolvers,
            self.listeners,
            self.turns,
            message_bytes=settings.broker.message_bytes,
        )
        self.sessions = SessionFactory(
            requests.handle,
            self._welcome,
            clock,
            sends,
            guard=self.guard,
            per_peer=settings.limits.connections_per_peer,
        )
        self._publication = PublicationService(engine, clock)
        self._delays = DelayService(engine, clock)
        self._outcomes = OutcomeExpiryService(engine, clock, self.sessions.connected_instances)
        self._group_work = GroupWorkService(engine)
        self._stall_guard = StallGuard(
            steady.elapsed,
            lambda: Moment(clock.seconds(), engine.now()),
            self._members.tick,
            self._group_work.expire_leases,
        )
        self._listen(engine)
        self._timers = self._own_timers(steady)
        self._loops: list[LoopingCall] = []

    def _make_calls(
        self,
        letters: DeadLetterCalls,
        resolvers: Resolvers,
        random: Random,
        nodes: ClusterNode | None,
    ) -> CallDispatcher:
        engine, settings, turns = self._engine, self._settings, self.turns
        parts = (
            ClockCalls(self.clock),
            ClusterCalls(self._nodes.view, lambda: self._log_list.durable),
            LeaderCalls(engine, nodes),
            self._log_list,
            self.log,
            BrokerCalls(engine, settings, self.alarms, self.statistics, self._throttled),
            TopicCalls(engine, settings.broker, self._clock),
            MemberCalls(
                engine,
                self._members,
                self._polls,
                defaults=settings.consumers,
                random=random,
                version_joined=self._policies.member_joined,
            ),
            GroupCalls(engine, self._members, self.paces),
            letters,
            LetterEditCalls(engine),
            RedriveCalls(engine, letters, turns),
            PlanCalls(engine, letters, self._plans),
            RecoverCalls(engine, turns),
            InboxCalls(engine),
            TransactionCalls(engine, self.checks, self._polls, resolvers),
            XaCalls(engine, self.listeners, resolvers),
            MessageCalls(engine, self.catalogues),
            MessageLifeCalls(engine, self.catalogues),
            AuditCalls(engine),
            UserCalls(engine, self.guard, self._users_changed),
            self.reloading,
        )
        return CallDispatcher(
            {name: handler for part in parts for name, handler in part.handlers.items()},
            engine,
            turns,
        )

    def _listen(self, engine: Engine) -> None:
        self.reloading.register("alarms", self.alarms.use)
        self.reloading.register("retention", self.retention.use, fixed=("every_s", "archive"))
        self.reloading.register("checks", self._use_checks)
        engine.listen(UserDeleted, self._user_deleted)
        engine.before_replies.append(self.sessions.buffer_replies)
        # readers have their answers by then
        engine.on_durable.append(self.sessions.flush_replies)
        engine.on_durable.append(self.sessions.sends.resume)  # the last: replies are out

    def _own_timers(self, steady: SteadyClock) -> list[tuple[float, Callable[[], None]]]:
        return [
            (CLOCK_S, steady.compare),
            (TICK_S, self._stall_guard.tick),
            (TICK_S, self.checks.tick),
            (COMPARE_S, self.checks.compare),
            (TICK_S, self._polls.retry_waiting),
            (TICK_S, self.sessions.sends.resume),
            (TICK_S, self._publication.tick),
            (TICK_S, self._group_work.tick),
            (TICK_S, self._plans.tick),
            (EXPIRY_S, self._plans.forget_old),
            (POLICIES_S, self._policies.tick),
            (POLICIES_S, self._plans.end_lost),
            (LOOK_AHEAD_S, self._delays.tick),
            (EXPIRY_S, self._delays.forget_recalls),
            (EXPIRY_S, self._outcomes.tick),
            (self._settings.retention.every_s, self.retention.tick),
            (ALARMS_S, self.clock.tick),
            (FRAMES_S, self.sessions.frames.tick),
            (ALARMS_S, self._in_doubt.tick),
            (ALARMS_S, self.alarms.tick),
            (ALARMS_S, self.statistics.tick),
            (ALARMS_S, self.catalogues.tick),
        ]

    def bound_background_work(self, has_room: Callable[[], bool]) -> None:
        """Let background work that changes very many rows wait until there is room."""
        self._plans.has_room = has_room

    def add_timer(self, seconds: float, function: Callable[[], None]) -> None:
        """Add a timer, before `start`."""
        self._timers.append((seconds, function))

    def start(self, failed: Callable[[Failure], None]) -> None:
        """Begin the timers. An exception in one of them is a bug: it is recorded, which
        raises an alarm, and the timer goes on. `failed` is for the clock's own.
        """
        self._members.adopt_members()
        self.statistics.start()
        self._stall_guard.tick()  # the first, which says whether the next one is late
        self._delays.tick()  # overdue messages come before new ones
        # A loop for each period: to wake up costs more than most of these functions.
        loops: dict[float, list[Callable[[], None]]] = {}
        for seconds, function in self._timers:
            place = getattr(function, "__qualname__", "timer")
            loops.setdefault(seconds, []).append(self._engine.faults.guard(place, function))
        for seconds, functions in loops.items():
            loop = LoopingCall(_call_each, functions)
            loop.clock = self._clock  # type: ignore[assignment]  # Twisted's type is an interface of zope's
            loop.start(seconds, now=False).addErrback(failed)
            self._loops.append(loop)

    def stop(self) -> None:
        """Stop all timers and background work."""
        for loop in self._loops:
            if loop.running:
                loop.stop()
        for service in (
            self._publication,
            self.retention,
            self._delays,
            self._outcomes,
            self._group_work,
            self._plans,
            self.statistics,
        ):
            service.stop()

    def _use_checks(self, settings: CheckbackSettings) -> None:
        self.checks.use(_schedule(settings))
        self._in_doubt.use(settings.in_doubt_after_s)

    def _throttled(self) -> dict[str, object]:
        """Return what is throttled, and why, for operators."""
        return self.sessions.sends.view() | {
            "budget_bytes": self._engine.budget.bytes,
            "groups": self.paces.view(),
        }

    def _user_deleted(self, event: UserDeleted, _place: object) -> None:
        self.sessions.note_deleted(event.name)

    def _users_changed(self) -> None:
        self.guard.forget()
        for session in self.sessions.renew_rights():
            # a request that waits was judged when it came: its client asks again
            self._polls.end_all(session)

    def _list_changed(self) -> None:
        self.sessions.welcome_again()

    def _welcome(self, hello: Hello) -> Welcome:
        store, state = self._engine.store, self._engine.state
        sizes = BrokerLimits(frame=limits.FRAME, message=self._settings.broker.message_bytes)
        name, incarnation = self._settings.broker.name, restores.incarnation(state)
        return Welcome(
            version=negotiate(hello),
            broker=name,
            log_id=store.log_id,
            boot_epoch=state.boot_epoch,
            limits=sizes,
            incarnation=None if incarnation is None else UUID(bytes=incarnation),
            nodes=self._nodes.addresses(),
            log_list=self._log_list.durable,
        )


def _schedule(settings: CheckbackSettings) -> CheckSchedule:
    return CheckSchedule(
        first=int(settings.first_s * SECOND),
        second=int(settings.then_s * SECOND),
        longest=int(settings.longest_s * SECOND),
        in_doubt_after=settings.in_doubt_after,
    )


def _call_each(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
