"""What each path gives. The files of the console are a fixed table, read once: no path
of a request reaches a disk.
"""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING

from txmq.admin.http import Query, Reply, Respond, as_json, refused
from txmq.admin.metrics import CONTENT_TYPE, Metrics
from txmq.admin.routes import PREFIX, call_of
from txmq.core.state.state import Rejected
from txmq.errors import RemoteProtocolError, TxmqError

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.service import Parts

FILES = {
    "/": ("console.html", "text/html; charset=utf-8"),
    "/transactions": ("transactions.html", "text/html; charset=utf-8"),
    **{
        f"/{name}": (name, "text/javascript; charset=utf-8")
        for name in ("common.js", "console.js", "transactions.js")
    },
    "/console.css": ("console.css", "text/css; charset=utf-8"),
}


class Site:
    """Answers for one broker. All methods belong to the reactor's thread."""

    def __init__(self, parts: Parts) -> None:
        self._engine, self._calls = parts.engine, parts.calls
        self._metrics = Metrics(parts)
        self._pages: dict[str, Callable[[Respond], None]] = {
            "/healthz": self._health,
            "/readyz": self._readiness,
            "/metrics": self._tell_metrics,
        }
        for path, (name, content_type) in FILES.items():
            reply = Reply(200, (files("txmq.admin") / "static" / name).read_bytes(), content_type)
            self._pages[path] = partial(_always, reply)

    def handle(self, path: str, query: Query, respond: Respond) -> None:
        """Answer one GET."""
        page = self._pages.get(path)
        if page is not None:
            page(respond)
            return
        try:
            self._call(path, query, respond)
        except RemoteProtocolError as error:
            respond(refused(400, "BadRequest", str(error), error.hint or ""))
        except TxmqError as error:
            respond(refused(500, type(error).__name__, str(error), error.hint or ""))

    def _call(self, path: str, query: Query, respond: Respond) -> None:
        asked = call_of(path, query) if path.startswith(PREFIX) else None
        if asked is None:
            respond(
                refused(
                    404,
                    "NotFound",
                    "there is nothing here",
                    f"the console is at /, JSON under {PREFIX}",
                )
            )
            return

        def answer(reply: object) -> None:
            if isinstance(reply, Rejected):  # a question is refused only for what is not there
                respond(refused(404, reply.error.__name__, reply.message, reply.hint))
            else:
                respond(as_json(reply))

        self._calls.ask(asked.call, asked.args, answer)

    def _health(self, respond: Respond) -> None:
        failed = self._engine.failed is not None
        respond(Reply(503, b"failed\n") if failed else Reply(200, b"ok\n"))

    def _readiness(self, respond: Respond) -> None:
        if self._engine.failed is None and self._engine.store.read_only:
            respond(Reply(503, b"the disk is full\n"))
        else:
            self._health(respond)

    def _tell_metrics(self, respond: Respond) -> None:
        self._engine.tell(respond, Reply(200, self._metrics.text(), CONTENT_TYPE))


def _always(reply: Reply, respond: Respond) -> None:
    respond(reply)
