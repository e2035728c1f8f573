"""Replies for each path: probes, metrics, JSON, and the console's for all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.admin.console.page import Refused
from txmq.admin.console.site import Console
from txmq.admin.http_values import (
    HttpForm,
    HttpReply,
    Query,
    Respond,
    error_reply,
    json_reply,
)
from txmq.admin.metrics.exposition import CONTENT_TYPE, Metrics
from txmq.admin.metrics.partitions import PartitionMetrics
from txmq.admin.routes import PREFIX, call_of, one_of_each
from txmq.errors import NotPermitted, RemoteProtocolError, RequestRejected, TxmqError
from txmq.model.access import Need

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.access.guard import Rights
    from txmq.broker.service import BrokerParts

METRICS_S = 1.0  # how old metrics may be: each scrape reads much of the state
PARTITIONS = "/metrics/partitions"


class AdminSite:
    """Request handler of one broker. All methods run on the reactor's thread."""

    def __init__(self, parts: BrokerParts) -> None:
        self._engine, self._calls, self._liveness = parts.engine, parts.calls, parts.liveness
        self._turns, self._reactor = parts.turns, parts.reactor
        self._metrics, self._partitions = Metrics(parts), PartitionMetrics(parts.engine)
        self._scrapes: list[Respond] = []  # that wait for the metrics
        self._scraped_text: bytes | None = None
        self._scraped_until = 0.0
        self._console = Console(parts)
        self._pages: dict[str, Callable[[Respond], None]] = {
            "/healthz": self._health_page,
            "/readyz": self._readiness_page,
            "/metrics": self._metrics_page,
        }

    def prepare(self) -> None:
        """Make ready what the first requests need, in a thread of its own."""
        self._console.prepare()

    def handle(self, path: str, query: Query, respond: Respond, rights: Rights | None) -> None:
        """Answer one GET request, by the rights of a user where there are users."""
        try:
            if rights is not None and path.startswith("/metrics"):
                rights.require((Need("describe", "cluster"),))
            self._answer(path, query, respond, rights)
        except NotPermitted as denied:
            respond(error_reply(403, type(denied).__name__, denied.message, denied.hint))

    def act(self, form: HttpForm, respond: Respond, rights: Rights | None) -> None:
        """Do what a form of the console says."""
        self._console.act(form, respond, rights)

    def _answer(self, path: str, query: Query, respond: Respond, rights: Rights | None) -> None:
        page = self._pages.get(path)
        if page is not None:
            page(respond)
            return
        try:
            if self._console.handle(path, query, respond, rights):
                return
            if path == PARTITIONS:
                self._partitions_page(query, respond)
            else:
                self._api(path, query, respond, rights)
        except RemoteProtocolError as error:
            respond(error_reply(400, "BadRequest", error.message, error.hint or ""))
        except NotPermitted:
            raise
        except TxmqError as error:
            respond(error_reply(500, type(error).__name__, str(error), error.hint or ""))

    def _api(self, path: str, query: Query, respond: Respond, rights: Rights | None) -> None:
        call = call_of(path, query) if path.startswith(PREFIX) else None
        if call is None:
            self._missing(path, respond, rights)
            return

        def answer(reply: object) -> None:
            # reading calls are refused only for missing objects
            if isinstance(reply, RequestRejected):
                respond(error_reply(404, type(reply).__name__, reply.message, reply.hint))
            else:
                respond(json_reply(reply))

        self._calls.ask(call.call, call.args, answer, rights)

    def _missing(self, path: str, respond: Respond, rights: Rights | None) -> None:
        message, hint = "no such page", f"use / for the console, or JSON below {PREFIX}"
        if path.startswith("/api"):
            respond(error_reply(404, "NotFound", message, hint))
        else:
            refused = Refused("NotFound", message, hint)
            self._console.show_error(path, refused, respond, rights)

    def _health_page(self, respond: Respond) -> None:
        if self._engine.failed is not None:
            respond(HttpReply(503, b"failed\n"))
        elif self._liveness.is_silent:
            text = f"requests have had no reply for {self._liveness.silent_s:.0f} s\n"
            respond(HttpReply(503, text.encode()))
        else:
            respond(HttpReply(200, b"ok\n"))

    def _readiness_page(self, respond: Respond) -> None:
        if self._engine.failed is None and self._engine.store.read_only:
            respond(HttpReply(503, b"the disk is full\n"))
        else:
            self._health_page(respond)

    def _metrics_page(self, respond: Respond) -> None:
        """Respond with metrics that are at most `METRICS_S` old. Scrapes that come
        meanwhile get those of the one under way.
        """
        now = self._reactor.seconds()
        if self._scraped_text is not None and now < self._scraped_until:
            respond(HttpReply(200, self._scraped_text, CONTENT_TYPE))
            return
        self._scrapes.append(respond)
        if len(self._scrapes) == 1:
            self._turns.run(self, self._metrics.steps(), self._scraped)

    def _partitions_page(self, query: Query, respond: Respond) -> None:
        names = one_of_each(query, ("topic", "group"))
        self._turns.run(
            self,
            self._partitions.steps(names.get("topic"), names.get("group")),
            lambda text: respond(HttpReply(200, text, CONTENT_TYPE)),
        )

    def _scraped(self, text: bytes) -> None:
        scrapes, self._scrapes = self._scrapes, []
        self._scraped_text, self._scraped_until = text, self._reactor.seconds() + METRICS_S
        for respond in scrapes:
            respond(HttpReply(200, text, CONTENT_TYPE))
