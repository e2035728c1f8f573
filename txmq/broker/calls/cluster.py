"""The control calls about the nodes of a cluster."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog

from txmq.broker.calls.operators import audited
from txmq.core.audit import Noted
from txmq.core.events.outcome import Rejected
from txmq.errors import BadRequest
from txmq.model.cluster import ClusterView, NodeView
from txmq.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.calls.dispatcher import CallContext, Handler
    from txmq.broker.engine.engine import Engine
    from txmq.broker.monitoring.cluster_node import ClusterNode
    from txmq.config.broker import BrokerSettings
    from txmq.wire.calls.arguments import NoArgs, StepDown

log = structlog.get_logger()
ALONE = Rejected(
    BadRequest, "this broker shares its log with nobody", "see docs/operations/cluster.md"
)
NO_FOLLOWER = Rejected(
    BadRequest,
    "no other node is known to follow: nobody would lead until this one does again",
    "txmq cluster nodes; start another one, or: --force",
)


class Alone:
    """The nodes of a log that nobody shares."""

    def __init__(self, engine: Engine, settings: BrokerSettings) -> None:
        self._engine, self._settings = engine, settings

    def view(self) -> ClusterView:
        store, epoch = self._engine.store, self._engine.state.boot_epoch
        name, address = self._settings.name, self._settings.listen
        node = NodeView(name, address, "leader", epoch, store.end, 0, 0.0, 0.0, __version__)
        return ClusterView(str(store.log_id), epoch, name, (node,))

    def addresses(self) -> tuple[str, ...]:
        return ()


class ClusterCalls:
    """The call that every node answers, whether it leads or not."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self._view = view
        self.handlers: dict[str, Handler] = {"cluster.describe": self.describe}

    def describe(self, call: CallContext, args: NoArgs) -> None:
        """List the nodes, at once: it is asked when nothing becomes durable."""
        del args
        view = self._view()
        call.answer({**view._asdict(), "nodes": [node._asdict() for node in view.nodes]})


class LeaderCalls:
    """The call that only a leader answers. `node` is None for a broker alone."""

    def __init__(self, engine: Engine, node: ClusterNode | None) -> None:
        self._engine, self._node = engine, node
        self.handlers: dict[str, Handler] = {"cluster.step_down": self.step_down}

    def step_down(self, call: CallContext, args: StepDown) -> None:
        """Note it in the audit topic, answer, and let another node lead."""
        node = self._node
        if node is None:
            call.answer(ALONE)
        elif not args.force and not node.view().followers:
            call.answer(NO_FOLLOWER)
        else:
            command = audited("cluster.step_down", "cluster", args, Noted())
            log.warning("cluster.steps_down", operator=args.operator, reason=args.reason)
            self._engine.submit(command, partial(_step_down, call, node))


def _step_down(call: CallContext, node: ClusterNode, reply: object) -> None:
    if isinstance(reply, Rejected):
        call.answer(reply)
        return
    call.answer({})
    node.step_down()
