"""Replies of a node that follows: probes, its metrics, and where the console is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.admin.http_values import HttpReply, Query, Respond, error_reply
from txmq.admin.metrics.exposition import CONTENT_TYPE, FollowerMetrics
from txmq.errors import NotPermitted
from txmq.model.access import Need
from txmq.model.cluster import who_leads

if TYPE_CHECKING:
    from txmq.broker.access.guard import Rights
    from txmq.broker.service import FollowerParts


class FollowerSite:
    """Request handler of a node until it leads. It listens once it has read the log."""

    def __init__(self, parts: FollowerParts) -> None:
        self._engine, self._cluster = parts.engine, parts.cluster
        self._metrics = FollowerMetrics(parts)

    def handle(self, path: str, query: Query, respond: Respond, rights: Rights | None) -> None:
        """Answer one GET request, by the rights of a user where there are users."""
        del query
        if path in ("/healthz", "/readyz"):
            failed = self._engine.failed is not None
            respond(HttpReply(503, b"failed\n") if failed else HttpReply(200, b"ok\n"))
        elif path == "/metrics":
            respond(self._metrics_page(rights))
        else:
            respond(self._elsewhere())

    def _metrics_page(self, rights: Rights | None) -> HttpReply:
        try:
            if rights is not None:
                rights.require((Need("describe", "cluster"),))
        except NotPermitted as denied:
            return error_reply(403, type(denied).__name__, denied.message, denied.hint)
        return HttpReply(200, self._metrics.text(), CONTENT_TYPE)

    def _elsewhere(self) -> HttpReply:
        message = f"this node does not lead: {who_leads(self._cluster.view())}"
        return error_reply(503, "NotLeader", message, "the console is the leader's")
