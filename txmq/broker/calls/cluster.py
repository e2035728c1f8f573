"""The control call about the nodes of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.calls.dispatcher import CallContext, Handler
    from txmq.model.cluster import ClusterView
    from txmq.wire.calls.arguments import NoArgs


class ClusterCalls:
    """The call that every node answers. `describe` returns what this one knows."""

    def __init__(self, describe: Callable[[], ClusterView]) -> None:
        self._describe = describe
        self.handlers: dict[str, Handler] = {"cluster.describe": self.describe}

    def describe(self, call: CallContext, args: NoArgs) -> None:
        """List the nodes, at once: it is asked when nothing becomes durable."""
        del args
        view = self._describe()
        call.answer({**view._asdict(), "nodes": [node._asdict() for node in view.nodes]})
