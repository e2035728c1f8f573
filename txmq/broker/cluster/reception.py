"""What a node answers while it follows: who leads, and which nodes there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.broker.access.guard import FollowersGuard
from txmq.broker.calls.cluster import ClusterCalls
from txmq.broker.calls.dispatcher import CallDispatcher
from txmq.broker.engine.turn_work import TurnWork
from txmq.broker.reactor.held_sends import HeldSends
from txmq.broker.reactor.session_factory import SessionFactory
from txmq.errors import NotLeader, TxmqError
from txmq.model import limits
from txmq.model.cluster import who_leads
from txmq.wire.calls import registry
from txmq.wire.data_requests import Opcode
from txmq.wire.hello import BrokerLimits, Welcome, negotiate

if TYPE_CHECKING:
    from txmq.broker.calls.dispatcher import CallContext
    from txmq.broker.engine.engine import Engine
    from txmq.broker.monitoring.cluster_node import Nodes
    from txmq.broker.reactor.interfaces import Clock
    from txmq.broker.reactor.protocol import ClientSession
    from txmq.config.broker import SettingsFile
    from txmq.wire.calls.arguments import Args
    from txmq.wire.frames import Frame
    from txmq.wire.hello import Hello


class Reception:
    """The sessions of a node that does not lead.

    Users log in as at the leader, and learn there who leads. One who asks for any node
    may ask which nodes there are. Nothing is written: the log is the leader's.
    """

    def __init__(self, engine: Engine, settings: SettingsFile, clock: Clock, nodes: Nodes) -> None:
        self._engine, self._settings, self._nodes = engine, settings, nodes
        self.guard = FollowersGuard(engine, clock)
        answered = ClusterCalls(nodes.view, lambda: engine.state.logs)
        handlers = dict.fromkeys(registry.CALLS, self._refuse) | answered.handlers
        self._calls = CallDispatcher(handlers, engine, TurnWork(engine, clock))
        self.sessions = SessionFactory(
            self._handle,
            self._welcome,
            clock,
            HeldSends(engine, clock),
            guard=self.guard,
            per_peer=settings.limits.connections_per_peer,
        )

    def _welcome(self, hello: Hello) -> Welcome:
        version = negotiate(hello)
        if not hello.any_node:
            raise self._not_leader()
        return Welcome(
            version=version,
            broker=self._settings.broker.name,
            log_id=self._engine.store.log_id,
            boot_epoch=self._engine.state.boot_epoch,
            limits=BrokerLimits(frame=limits.FRAME, message=self._settings.broker.message_bytes),
            nodes=self._nodes.addresses(),
        )

    def _handle(self, session: ClientSession, frame: Frame) -> None:
        if frame.opcode != Opcode.CALL or frame.status:
            session.refuse(frame, self._not_leader())
            return
        try:
            self._calls.handle(session, frame)
        except TxmqError as error:
            session.refuse(frame, error)

    def _refuse(self, call: CallContext, args: Args) -> None:
        raise self._not_leader()

    def _not_leader(self) -> NotLeader:
        view = self._nodes.view()
        return NotLeader(
            f"node {view.answered_by} does not lead: {who_leads(view)}",
            hint="clients go there by themselves; another node takes over within seconds",
            detail={"nodes": list(self._nodes.addresses())},
        )
