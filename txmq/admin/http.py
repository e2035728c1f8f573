"""HTTP connections of the admin pages: GET and HEAD, and POST of forms, with limits of
size and time. `request_checks` says which requests are refused.
"""

from __future__ import annotations

import socket
from collections import Counter
from io import BytesIO
from math import ceil
from typing import TYPE_CHECKING, Any

import structlog
from twisted.internet.protocol import connectionDone
from twisted.web.http import HTTPChannel, HTTPFactory, Request, datetimeToString

from txmq.admin.http_values import HttpForm, HttpReply, HttpStream, error_reply
from txmq.admin.request_checks import ACTIONS, OPEN_ACCESS, HttpAccess, refusal_of, values_of
from txmq.broker.reactor.bounded_log import BoundedLog
from txmq.broker.reactor.connection_limits import network_of
from txmq.errors import LoginFailed, Throttled
from txmq.wire.lost_peers import notice_lost_peer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twisted.internet.interfaces import IAddress
    from twisted.python.failure import Failure

    from txmq.admin.http_values import Act, Handle, Source

# from a reply to the end of the next request, and to read the last reply
REQUEST_TIMEOUT_S = 20.0
# only forms need a body; a short one is skipped, so that its sender gets a reply
MAX_BODY_BYTES = 4_096
MAX_FORM_BYTES = 512 << 10  # with the edited body of a dead letter
LOGOUT = b"/logout"  # a browser forgets a password that is refused
OPEN_PATHS = frozenset({b"/healthz", b"/readyz"})  # they say nothing but yes or no
PART_HEADER = "X-Txmq-Part"  # of a script that shows the reply within its page
MAX_HEADER_BYTES = 8_192
MAX_HEADER_LINES = 64
MAX_CONNECTIONS = 64  # a browser opens six
MAX_OF_USER = 32  # requests at a time without a reply: one alone does not keep others out
BUG_HINT = "report what the broker's log says"

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    # with no-referrer, a browser does not say where a form comes from
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# reasons of a status that Twisted does not know
REASONS = {421: b"Misdirected Request", 429: b"Too Many Requests"}
TOO_LARGE = b"HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

NO_PLACE = HttpReply(503, b"too many live pages are open\n")
log = structlog.get_logger()


class _Backpressure:
    """The producer that the transport pauses while the client does not read."""

    paused = False

    def pauseProducing(self) -> None:
        self.paused = True

    def resumeProducing(self) -> None:
        self.paused = False

    def stopProducing(self) -> None:
        """Do nothing: `connectionLost` is called as well."""


class AdminRequest(Request):
    """One request and its reply."""

    _disconnected = False
    _is_form = False
    _source: Source | None = None  # of a reply that goes on
    # counts the request of a user, whose client may be gone before there is a reply
    _work: tuple[Counter[str], str] | None = None
    channel: Any  # an AdminChannel; Twisted's attribute

    def __init__(self, *args: Any, **fields: Any) -> None:  # noqa: ANN401  # Twisted's
        super().__init__(*args, **fields)
        self._backpressure = _Backpressure()
        self._parsePOSTFormSubmission = False  # this is Twisted's: forms are parsed after the login

    def gotLength(self, length: int | None) -> None:
        """Refuse a body that is too large, or of unknown length. Twisted calls it after
        the headers.
        """
        self._is_form = self.channel.sends_form
        if length is None or length > (MAX_FORM_BYTES if self._is_form else MAX_BODY_BYTES):
            self.channel.write(TOO_LARGE)
            self.channel.loseConnection()
        self.content = BytesIO()  # never a file

    def process(self) -> None:
        """Answer the request. Twisted calls it when the request is complete."""
        factory: Any = self.channel.factory
        self.channel.answering = True
        # the reply goes out in another turn: pipelined requests let others in between
        factory.clock.callLater(0, self._begin, factory)

    def _begin(self, factory: AdminFactory) -> None:
        if self._disconnected:
            return
        try:
            self._answer(factory)
        except Exception as error:  # noqa: BLE001  # without a reply the connection stays for ever
            factory.warnings.warn(log, "http.failed", error=repr(error), exc_info=error)
            if self.startedWriting or self._disconnected:
                self.channel.transport.abortConnection()
            else:
                self._respond(error_reply(500, "Bug", "this request met a bug", BUG_HINT))

    def _answer(self, factory: AdminFactory) -> None:
        is_form = factory.act is not None and self._is_form
        rights: Any = None
        refusal = refusal_of(self.requestHeaders, self.method, factory.access, is_form=is_form)
        if refusal is None and self.path not in OPEN_PATHS:
            rights, refusal = self._log_in(factory.access)
        if refusal is None and not self._begin_work(factory, getattr(rights, "user", None)):
            message = f"{MAX_OF_USER} requests of this user have no reply yet"
            refusal = _throttled(message, "wait for their replies", 1)
        if refusal is not None:
            self._respond(refusal)
        elif is_form and factory.act is not None:
            factory.act(self._form(), self._respond, rights)
        else:
            factory.handle(self.path.decode("latin-1"), self.args, self._respond, rights)

    def _log_in(self, access: HttpAccess) -> tuple[object | None, HttpReply | None]:
        """Return the rights of the user, None without users; or why there are none."""
        try:
            return self._rights(access), None
        except LoginFailed as failed:
            self.responseHeaders.setRawHeaders(
                "WWW-Authenticate", ['Basic realm="txmq", charset="UTF-8"', 'Bearer realm="txmq"']
            )
            return None, error_reply(401, "LoginFailed", failed.message, failed.hint)
        except Throttled as throttled:
            wait_s = max(1, ceil(throttled.retry_after_s))
            return None, _throttled(throttled.message, throttled.hint, wait_s)

    def _rights(self, access: HttpAccess) -> object | None:
        headers = values_of(self.requestHeaders, "Authorization")
        peer: Any = self.client
        host = str(getattr(peer, "host", peer))
        rights = access.log_in(host, headers[0] if len(headers) == 1 else None)
        if rights is not None and self.path == LOGOUT:
            raise LoginFailed("you are logged out", hint="log in again, or leave the page")
        return rights

    def _begin_work(self, factory: AdminFactory, user: str | None) -> bool:
        """Count a request of a user until its reply. False = the user has too many."""
        if user is None:
            return True
        if factory.at_work[user] >= MAX_OF_USER:
            return False
        factory.at_work[user] += 1
        self._work = factory.at_work, user
        return True

    def _end_work(self) -> None:
        if self._work is not None:
            counts, user = self._work
            self._work = None
            counts[user] -= 1
            if not counts[user]:
                del counts[user]

    def _form(self) -> HttpForm:
        content: Any = self.content
        part = self.requestHeaders.hasHeader(PART_HEADER)

        def cookie(name: str) -> str:
            cookies: dict[bytes, bytes] = self.received_cookies
            return cookies.get(name.encode(), b"").decode("latin-1")

        return HttpForm(self.path.decode("latin-1"), content.read(), cookie, part)

    def _respond(self, reply: HttpReply | HttpStream) -> None:
        self._end_work()
        if self._disconnected:
            return
        if self.channel.has_pipelined:  # one reply at a time: the rest is not worked off
            self.channel.persistent = False
            self.responseHeaders.setRawHeaders("Connection", ["close"])
        if isinstance(reply, HttpStream):
            source = reply.make(self.channel.network)
            if source is not None:
                self._set_headers({"Content-Type": reply.content_type})
                self._stream(source)
                return
            reply = NO_PLACE
        self.setResponseCode(reply.status, REASONS.get(reply.status))
        length = {"Content-Length": str(len(reply.body))}
        self._set_headers({"Content-Type": reply.content_type, **length, **reply.headers})
        Request.write(self, reply.body)
        Request.finish(self)

    def _set_headers(self, fields: Mapping[str, str]) -> None:
        date = {"Date": datetimeToString().decode()}
        for name, value in (HEADERS | date | dict(fields)).items():
            self.responseHeaders.setRawHeaders(name, [value])

    def _stream(self, source: Source) -> None:
        self._source = source
        if self.method == b"HEAD":
            self.end()
            return
        self.registerProducer(self._backpressure, True)  # type: ignore[no-untyped-call] # Twisted's
        source.opened(self)

    @property
    def is_full(self) -> bool:
        """Return whether the client has not read what was sent."""
        return self._backpressure.paused

    def end(self) -> None:
        """End the reply."""
        source, self._source = self._source, None
        if source is not None:
            source.closed()
            if not self._disconnected:
                if self.method != b"HEAD":
                    self.unregisterProducer()  # type: ignore[no-untyped-call] # Twisted's
                Request.finish(self)

    def connectionLost(self, reason: Failure) -> None:
        self._disconnected = True
        source, self._source = self._source, None
        if source is not None:
            source.closed()
        Request.connectionLost(self, reason)


def _throttled(message: str, hint: str, wait_s: int) -> HttpReply:
    return error_reply(429, "Throttled", message, hint, {"Retry-After": str(wait_s)})


class AdminChannel(HTTPChannel):
    """One HTTP connection: a request, then its response."""

    requestFactory = AdminRequest
    totalHeadersSize = MAX_HEADER_BYTES
    maxHeaders = MAX_HEADER_LINES
    answering = False  # a complete request
    network = ""  # of the client

    @property
    def sends_form(self) -> bool:
        """Return whether the request whose headers are there may change something."""
        path: Any = self._path  # Twisted has no type for it
        return self._command == b"POST" and bool(path.startswith(ACTIONS))

    @property
    def has_pipelined(self) -> bool:
        """Return whether the client has sent more before it had a reply."""
        return bool(self._dataBuffer)

    def connectionMade(self) -> None:
        factory: Any = self.factory
        factory.channels[self] = None
        # an event stream writes little, and would not notice that its viewer is gone
        if (handle := getattr(self.transport, "getHandle", None)) is not None:  # a socket's
            notice_lost_peer(handle(), socket)
        HTTPChannel.connectionMade(self)

    def dataReceived(self, data: bytes) -> None:
        transport: Any = self.transport
        if not transport.disconnecting:  # TLS reads on after a refusal, whose rest is no request
            HTTPChannel.dataReceived(self, data)

    def resetTimeout(self) -> None:
        """Keep the time-out running. Twisted calls this for each piece of data, and
        slow clients must not stay.
        """

    def requestDone(self, request: Request) -> None:
        self.answering = False
        HTTPChannel.requestDone(self, request)
        if not self.persistent:
            factory: Any = self.factory
            # a client that does not read the reply would stay for ever
            HTTPChannel.setTimeout(self, factory.timeOut)

    def timeoutConnection(self) -> None:
        _abort(self)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        factory: Any = self.factory
        factory.channels.pop(self, None)
        HTTPChannel.connectionLost(self, reason)


def _abort(channel: AdminChannel) -> None:
    transport: Any = channel.transport
    transport.abortConnection()


class AdminFactory(HTTPFactory):
    """Factory of the connections; aborts them when it stops."""

    protocol = AdminChannel  # type: ignore[assignment]  # without HTTP/2, which the base class adds
    noisy = False

    def __init__(
        self,
        handle: Handle,
        reactor: Any,  # noqa: ANN401  # Twisted's
        *,
        request_s: float = REQUEST_TIMEOUT_S,
        access: HttpAccess = OPEN_ACCESS,
        act: Act | None = None,
    ) -> None:
        super().__init__(timeout=request_s, reactor=reactor)
        self.access, self.act = access, act
        self.handle, self.clock, self.warnings = handle, reactor, BoundedLog(reactor)
        self.channels: dict[AdminChannel, None] = {}  # the oldest first
        self.at_work: Counter[str] = Counter()  # requests without a reply, by user

    def buildProtocol(self, addr: IAddress | None) -> Any:  # noqa: ANN401  # an AdminChannel; the base class has no type for it
        """Return a new connection. Beyond the limit it takes the place of one that has
        no complete request: slow clients must not keep others out.
        """
        if len(self.channels) >= MAX_CONNECTIONS:
            idle = self._dispensable()
            if idle is None:
                return None
            del self.channels[idle]
            _abort(idle)
        channel: Any = super().buildProtocol(addr)
        if channel is not None:
            channel.network = network_of(str(getattr(addr, "host", addr)))
        return channel

    def _dispensable(self) -> AdminChannel | None:
        """Return the oldest connection without a complete request, of the host that has
        the most of them: one that connects again and again pushes out its own.
        """
        idle = [one for one in self.channels if not one.answering]
        counts = Counter(one.network for one in idle)
        return max(idle, key=lambda one: counts[one.network], default=None)

    def stopFactory(self) -> None:
        for channel in tuple(self.channels):
            _abort(channel)
        super().stopFactory()

    def log(self, request: Request) -> None:
        """Log nothing: an open console sends requests every two seconds."""
