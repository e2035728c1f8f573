"""The control calls about the nodes of a log, and about logs listed with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import structlog

from txmq.broker.calls.dispatcher import unless_refused
from txmq.broker.calls.operators import audited
from txmq.core import log_list as rules
from txmq.core.audit import Noted
from txmq.errors import BadRequest
from txmq.model.cluster import ClusterView, ListedLog, LogList, NodeView
from txmq.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.calls.dispatcher import CallContext, Handler
    from txmq.broker.engine.engine import Engine
    from txmq.broker.monitoring.cluster_node import ClusterNode
    from txmq.config.broker import BrokerSettings
    from txmq.wire.calls.arguments import AddLogs, ChangeLog, CopyLogs, NoArgs, StepDown

    LogListArgs = AddLogs | ChangeLog | CopyLogs

log = structlog.get_logger()


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

    def __init__(self, view: Callable[[], ClusterView], logs: Callable[[], LogList]) -> None:
        self._view, self._logs = view, logs
        self.handlers: dict[str, Handler] = {"cluster.describe": self.describe}

    def describe(self, call: CallContext, args: NoArgs) -> None:
        """List nodes and logs, at once: it is asked when nothing becomes durable."""
        view = self._view()
        nodes = [node._asdict() for node in view.nodes]
        call.answer({**view._asdict(), "nodes": nodes, "logs": list_view(self._logs())})


def list_view(listed: LogList) -> dict[str, Any]:
    """Return a list of logs for JSON."""
    logs = [log._asdict() | {"log_id": str(log.log_id)} for log in listed.logs]
    return {"version": listed.version, "logs": logs}


class LogListCalls:
    """The calls that change the list of logs. `changed` is called once that is
    durable.
    """

    def __init__(self, engine: Engine, changed: Callable[[], None]) -> None:
        self._engine, self._changed = engine, changed
        self._durable: LogList | None = None  # since the first change
        self.handlers: dict[str, Handler] = {
            "cluster.add_logs": self.add,
            "cluster.drain_log": self.drain,
            "cluster.remove_log": self.remove,
            "cluster.copy_logs": self.copy,
        }

    @property
    def durable(self) -> LogList:
        """The list that clients may hear of."""
        if self._durable is None:
            self._durable = self._engine.state.logs
        return self._durable

    def add(self, call: CallContext, args: AddLogs) -> None:
        logs = tuple((UUID(one.log_id), one.addresses) for one in args.logs)
        command = rules.ListLogs(self._own, logs, args.together, args.moved)
        self._submit(call, "cluster.add_logs", args, command)

    def drain(self, call: CallContext, args: ChangeLog) -> None:
        command = rules.DrainLog(self._own, UUID(args.log_id))
        self._submit(call, "cluster.drain_log", args, command)

    def remove(self, call: CallContext, args: ChangeLog) -> None:
        command = rules.RemoveLog(self._own, UUID(args.log_id))
        self._submit(call, "cluster.remove_log", args, command)

    def copy(self, call: CallContext, args: CopyLogs) -> None:
        logs = tuple(
            ListedLog(UUID(one.log_id), one.addresses, one.keys_from, one.keys_to)
            for one in args.logs
        )
        command = rules.CopyList(self._own, LogList(args.version, logs))
        self._submit(call, "cluster.copy_logs", args, command)

    @property
    def _own(self) -> UUID:
        return self._engine.store.log_id

    def _submit(self, call: CallContext, name: str, args: LogListArgs, command: object) -> None:
        def answer(reply: LogList) -> None:
            call.answer(list_view(reply))
            if reply.version > self.durable.version:
                self._durable = reply
                log.warning("cluster.logs_listed", version=reply.version, logs=len(reply.logs))
                self._changed()

        acted = audited(name, "cluster", args, command)
        self._engine.submit(acted, unless_refused(call.answer, answer))


class LeaderCalls:
    """The call that only a leader answers. `node` is None for a broker alone."""

    def __init__(self, engine: Engine, node: ClusterNode | None) -> None:
        self._engine, self._node = engine, node
        self.handlers: dict[str, Handler] = {"cluster.step_down": self.step_down}

    def step_down(self, call: CallContext, args: StepDown) -> None:
        """Note it in the audit topic, answer, and let another node lead."""
        node = self._node
        if node is None:
            message = "this broker shares its log with nobody"
            raise BadRequest(message, hint="see docs/operations/cluster.md")
        if not args.force and not node.view().followers:
            message = (
                "no other node is known to follow: nobody would lead until this one does again"
            )
            raise BadRequest(message, hint="txmq cluster nodes; start another one, or: --force")

        def noted(_reply: object) -> None:
            call.answer({})
            node.step_down()

        command = audited("cluster.step_down", "cluster", args, Noted())
        log.warning("cluster.steps_down", operator=args.operator, reason=args.reason)
        self._engine.submit(command, unless_refused(call.answer, noted))
