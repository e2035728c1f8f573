"""The control calls about the nodes of a cluster."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog

from txmq.broker.calls.operators import audited
from txmq.core.audit import Noted
from txmq.core.events.outcome import Rejected
from txmq.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.calls.dispatcher import CallContext, Handler
    from txmq.broker.engine.engine import Engine
    from txmq.broker.monitoring.cluster_node import ClusterNode
    from txmq.model.cluster import ClusterView
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


class ClusterCalls:
    """`describe`, which every node answers, and `step_down` of the leader. A broker
    `alone` describes itself.
    """

    def __init__(
        self, engine: Engine, cluster: ClusterNode | None, alone: Callable[[], ClusterView]
    ) -> None:
        self._engine, self._cluster, self._alone = engine, cluster, alone
        self.handlers: dict[str, Handler] = {
            "cluster.describe": self.describe,
            "cluster.step_down": self.step_down,
        }

    def describe(self, call: CallContext, args: NoArgs) -> None:
        """List the nodes, at once: it is asked when nothing becomes durable."""
        del args
        view = self._alone() if self._cluster is None else self._cluster.view()
        call.answer({**view._asdict(), "nodes": [node._asdict() for node in view.nodes]})

    def step_down(self, call: CallContext, args: StepDown) -> None:
        """Note it in the audit topic, answer, and let another node lead."""
        cluster = self._cluster
        if cluster is None:
            call.answer(ALONE)
        elif not args.force and not cluster.view().followers:
            call.answer(NO_FOLLOWER)
        else:
            command = audited("cluster.step_down", "cluster", args, Noted())
            log.warning("cluster.steps_down", operator=args.operator, reason=args.reason)
            self._engine.submit(command, partial(_step_down, call, cluster))


def _step_down(call: CallContext, cluster: ClusterNode, reply: object) -> None:
    if isinstance(reply, Rejected):
        call.answer(reply)
        return
    call.answer({})
    cluster.step_down()
