"""The control call about the nodes of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from txmq.model.cluster import ClusterView, NodeView
from txmq.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.calls.dispatcher import CallContext, Handler
    from txmq.broker.engine.engine import Engine
    from txmq.config.broker import BrokerSettings
    from txmq.wire.calls.arguments import NoArgs


class Nodes(Protocol):
    """The nodes of a shared log, as one of them knows them."""

    def view(self) -> ClusterView: ...
    def addresses(self) -> tuple[str, ...]:
        """Return where clients find the nodes, the leader first."""


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
