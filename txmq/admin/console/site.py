"""Paths of the console: pages, the event streams below `live/`, and static files.

Files are read once into a fixed table, so that no request opens a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import structlog
from twisted.internet.defer import Deferred

from txmq.admin.console import completion, registry
from txmq.admin.console.csrf import CsrfTokens
from txmq.admin.console.forms import FormHandler
from txmq.admin.console.page import NO_ANSWER, Page, PageRequest, Refused, View
from txmq.admin.console.rendering import RenderQueue, Templates
from txmq.admin.console.streams import Streams
from txmq.admin.http_values import HttpReply, HttpStream, json_reply
from txmq.errors import NotPermitted, RemoteProtocolError, TxmqError
from txmq.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twisted.python.failure import Failure

    from txmq.admin.http_values import HttpForm, Query, Respond
    from txmq.broker.access.guard import Rights
    from txmq.broker.service import BrokerParts

HTML = "text/html; charset=utf-8"
EVENTS = "text/event-stream; charset=utf-8"
TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
STATIC, LIVE = "static/", "live/"
COMPLETION = "complete/letters"
KEPT = {"Cache-Control": "private, max-age=86400, immutable"}  # their addresses have a digest
log = structlog.get_logger()


class Console:
    """The console of one broker. All methods run on the reactor's thread."""

    def __init__(self, parts: BrokerParts) -> None:
        self._parts = parts
        self._csrf = CsrfTokens(secure=parts.certificates is not None)
        self._forms = FormHandler(parts, self._csrf)
        self._templates = Templates(parts.engine.now)
        self._queue = RenderQueue(parts.reactor)
        self._streams = Streams(parts.reactor)
        self._files = {f"{STATIC}{name}": reply for name, reply in _static_files()}
        digest = hashlib.blake2b(b"".join(one.body for one in self._files.values()), digest_size=6)
        self._version = digest.hexdigest()  # another one after an upgrade

    def prepare(self) -> None:
        """Make ready what the first pages need. It belongs to a thread of its own."""
        self._templates.compile()

    def handle(self, path: str, query: Query, respond: Respond, rights: Rights | None) -> bool:
        """Answer a GET request; False = the path is not the console's."""
        path = path.removeprefix("/")
        file = self._files.get(path)
        if file is not None:
            respond(file)
            return True
        if path == COMPLETION:
            self._complete(query, respond, rights)
            return True
        where = path.removeprefix(LIVE)
        found = registry.find(where)
        if found is None:
            return False
        try:
            request = PageRequest(self._parts, rights, where, found.names, query)
        except Refused as refused:
            respond(HttpReply(refused.status, f"{refused}\n".encode()))
            return True
        if where == path:
            self._show(found.page, request, respond)
        elif found.page.live:
            self._stream(found.page, request, respond)
        else:
            return False
        return True

    def act(self, form: HttpForm, respond: Respond, rights: Rights | None) -> None:
        """Do what a form says, and show the outcome: a whole page, or the part of it
        that a script shows within its own.
        """
        path = form.path.removeprefix("/")
        page = Page(path, "Action", _never_called, live=False)
        request = PageRequest(self._parts, rights, path, (), {})

        def shown(view: View) -> None:
            self._render(page, request, view, respond, part=form.part)

        self._then(self._forms.act(form, request), shown)

    def _complete(self, query: Query, respond: Respond, rights: Rights | None) -> None:
        """Answer with what a filter may be completed to: an empty list on errors."""

        def offered(found: list[str]) -> None:
            respond(json_reply({"offers": found}))

        def failed(failure: Failure) -> None:
            if failure.check(TxmqError) is None:
                log.error("console.offers_failed", error=repr(failure.value))
            offered([])

        try:
            request = PageRequest(self._parts, rights, COMPLETION, (), query)
        except Refused:
            offered([])
            return
        waiting: Deferred[list[str]] = Deferred.fromCoroutine(completion.offers(request))
        waiting.addCallbacks(offered, failed)

    def show_error(
        self, path: str, refused: Refused, respond: Respond, rights: Rights | None
    ) -> None:
        """Answer with an error page."""
        path = path.removeprefix("/")
        page = Page(path, "Error", _never_called, live=False)
        request = PageRequest(self._parts, rights, path, (), {})
        self._render(page, request, _error(refused), respond)

    def _show(self, page: Page, request: PageRequest, respond: Respond) -> None:
        def shown(view: View) -> None:
            self._render(page, request, view, respond)

        self._then(page.render(request), shown)

    def _then(self, running: Coroutine[Any, Any, View], shown: Callable[[View], None]) -> None:
        """Run a page's function, and pass on its view, or that of its error."""

        def failed(failure: Failure) -> None:
            shown(_error(_refused(failure.value)))

        waiting: Deferred[View] = Deferred.fromCoroutine(running)
        waiting.addCallbacks(shown, failed)
        waiting.addErrback(lambda failure: log.error("console.failed", error=str(failure.value)))

    def _render(
        self, page: Page, request: PageRequest, view: View, respond: Respond, *, part: bool = False
    ) -> None:
        def done(body: bytes) -> None:
            respond(HttpReply(view.status, body, HTML, self._csrf.headers))

        def failed(error: Exception) -> None:
            log.error("console.template_failed", template=view.template, error=str(error))
            respond(HttpReply(500, b"this page cannot be shown: the broker's log says why\n"))

        render = self._templates.live if part else self._templates.page
        self._queue.render(self._pieces(render, page, request, view), done, failed)

    def _pieces(
        self, render: Callable[..., Iterator[str]], page: Page, request: PageRequest, view: View
    ) -> Iterator[str]:
        broker = self._parts.settings.broker.name
        request.csrf = self._csrf.token(request.user)
        values: dict[str, Any] = {
            "request": request,
            "root": request.root,
            "page": page,
            "is_live": page.live and view.status == 200,
            "navigation": registry.navigation(request),
            "broker": broker,
            "version": __version__,
            "digest": self._version,
            "alarms": self._parts.alarms.raised() if request.may("broker.alarms").allowed else (),
        }
        yield from render(view.template, values | dict(view.values))

    def _stream(self, page: Page, request: PageRequest, respond: Respond) -> None:
        login = self._login_of(request.user)

        def part(give: Callable[[bytes | None], None]) -> None:
            if not self._is_still_let_in(request) or self._login_of(request.user) != login:
                give(None)
                return

            def shown(view: View) -> None:
                if view.status != 200:  # of a broker that does not answer it may do so later
                    give(b"" if view.status == NO_ANSWER else None)
                    return
                pieces = self._pieces(self._templates.live, page, request, view)
                self._queue.render(pieces, give, lambda _error: give(None))

            self._then(page.render(request), shown)

        respond(HttpStream(EVENTS, partial(self._streams.make, part, request.user)))

    def _login_of(self, name: str | None) -> object:
        """Return what a user logs in with: another password or token ends open
        streams.
        """
        user = self._parts.engine.state.users.by_name.get(name or "")
        return None if user is None else (user.verifier, user.tokens)

    def _is_still_let_in(self, request: PageRequest) -> bool:
        """Return whether the viewer of an open stream may go on, and renew its
        rights: users may have been added, changed and deleted.
        """
        guard = self._parts.guard
        if request.rights is None:
            return not guard.has_users
        request.rights = guard.renewed(request.rights)
        return request.rights is not None


async def _never_called(request: PageRequest) -> View:
    """Stand for the function of a page whose view is made elsewhere."""
    raise AssertionError(request)


def _refused(error: BaseException | None) -> Refused:
    match error:
        case Refused():
            return error
        case RemoteProtocolError():  # an argument that no call takes
            return Refused("BadRequest", error.message, error.hint, 400)
        case NotPermitted():
            return Refused(type(error).__name__, error.message, error.hint, 403)
        case TxmqError():
            return Refused(type(error).__name__, error.message, error.hint, 500)
    log.error("console.page_failed", error=repr(error), exc_info=error)
    message = "this page cannot be shown because of a bug"
    return Refused("Bug", message, "report what the broker's log says", 500)


def _error(refused: Refused) -> View:
    return View("error.html", {"error": refused}, refused.status)


def _static_files() -> Iterator[tuple[str, HttpReply]]:
    folder = files("txmq.admin") / "static"
    for place, prefix in ((folder, ""), (folder / "vendor", "vendor/")):
        for file in place.iterdir():
            kind = TYPES.get(file.name.rpartition(".")[2])
            if kind is not None and file.is_file():
                yield prefix + file.name, HttpReply(200, file.read_bytes(), kind, KEPT)
