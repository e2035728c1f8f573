"""HTTP for the admin pages: GET and HEAD, and POST of forms, with limits of size and
time.

The browser that shows the console also shows pages of other sites. Therefore a request
must name this machine as its host, so that DNS rebinding fails. It must not come from
another origin. Only a POST below `ACTIONS` changes something: it must say that it comes
from a page of its own origin, and has a token that such pages have (`console/acting`).
"""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from io import BytesIO
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import structlog
from twisted.internet.protocol import connectionDone
from twisted.web.http import HTTPChannel, HTTPFactory, Request, datetimeToString

from txmq.broker.reactor.bounded_log import BoundedLog
from txmq.broker.reactor.connection_limits import network_of
from txmq.config.listen import is_loopback
from txmq.errors import LoginFailed, Throttled
from txmq.wire.json import dump
from txmq.wire.lost_peers import notice_lost_peer

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress
    from twisted.python.failure import Failure

# from a reply to the end of the next request, and to read the last reply
REQUEST_TIMEOUT_S = 20.0
# only forms need a body; a short one is skipped, so that its sender gets a reply
MAX_BODY_BYTES = 4_096
MAX_FORM_BYTES = 512 << 10  # with the edited body of a dead letter
LOGOUT = b"/logout"  # a browser forgets a password that is refused
ACTIONS = b"/act/"  # what forms are sent to
FORM = "application/x-www-form-urlencoded"
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
HOST_HEADER = re.compile(
    r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+)\]|(?P<plain>[A-Za-z0-9.-]+))(?::[0-9]{1,5})?"
)
# that Twisted does not know
REASONS = {421: b"Misdirected Request", 429: b"Too Many Requests"}
TOO_LARGE = b"HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

log = structlog.get_logger()

Query = Mapping[bytes, Sequence[bytes]]


class HttpReply(NamedTuple):
    """Status, body and content type of a reply. `headers` are more, or others than
    `HEADERS`.
    """

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = {}


class HttpForm(NamedTuple):
    """A form that was sent: the path, the body, a cookie by its name, and whether a
    script asks for a part of a page.
    """

    path: str
    body: bytes
    cookie: Callable[[str], str]
    part: bool


class Sink(Protocol):
    """The open end of a reply that goes on."""

    @property
    def is_full(self) -> bool: ...
    def write(self, data: bytes) -> object: ...
    def end(self) -> None: ...


class Source(Protocol):
    """What fills a reply that goes on; `closed` is called once, whoever ends it."""

    def opened(self, sink: Sink) -> None: ...
    def closed(self) -> None: ...


class HttpStream(NamedTuple):
    """A reply that goes on until one side ends it. `make` gets the client's host, as
    `network_of` has it; None = there is no place for another one.
    """

    content_type: str
    make: Callable[[str], Source | None]


NO_PLACE = HttpReply(503, b"too many live pages are open\n")
Respond = Callable[["HttpReply | HttpStream"], None]
# path and query, and the rights of a user where there are users; it may respond later
Handle = Callable[..., None]
Act = Callable[[HttpForm, Respond, Any], None]  # a form, and such rights or None


def json_reply(value: object, status: int = 200) -> HttpReply:
    """Return a reply with JSON."""
    return HttpReply(status, dump(value), "application/json")


def error_reply(status: int, error: str, message: str, hint: str = "") -> HttpReply:
    """Return an error, with the fields of an error of the command line."""
    return json_reply({"error": error, "message": message, "hint": hint}, status)


class HttpAccess(NamedTuple):
    """Who may send requests: the hosts that a Host header may name beside this machine,
    the scheme of our own origin, and the login.

    `log_in` gets the peer's host and the Authorization header, and returns the rights
    of a user, None where the broker has no users. It raises LoginFailed and Throttled.
    """

    log_in: Callable[[str, str | None], object | None]
    hosts: frozenset[str] = frozenset()
    scheme: str = "http"


OPEN_ACCESS = HttpAccess(lambda _peer, _authorization: None)
OPEN_PATHS = frozenset({b"/healthz", b"/readyz"})  # they say nothing but yes or no


class _Pressure:
    """A producer that notes whether the connection takes more. Twisted calls it."""

    paused = False

    def pauseProducing(self) -> None:
        self.paused = True

    def resumeProducing(self) -> None:
        self.paused = False

    def stopProducing(self) -> None:
        """The connection is gone: the request hears of that, too."""


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
        self._pressure = _Pressure()
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
        access: HttpAccess = factory.access
        is_form = factory.act is not None and self._is_form
        error = self._check(access, is_form=is_form)
        rights = None
        if error is None and self.path not in OPEN_PATHS:
            try:
                rights = self._log_in(access)
            except LoginFailed as failed:
                self.responseHeaders.setRawHeaders(
                    "WWW-Authenticate",
                    ['Basic realm="txmq", charset="UTF-8"', 'Bearer realm="txmq"'],
                )
                error = error_reply(401, "LoginFailed", failed.message, failed.hint)
            except Throttled as throttled:
                wait_s = max(1, ceil(throttled.retry_after_s))
                self.responseHeaders.setRawHeaders("Retry-After", [str(wait_s)])
                error = error_reply(429, "Throttled", throttled.message, throttled.hint)
        if error is None and not self._begin_work(factory, getattr(rights, "user", None)):
            self.responseHeaders.setRawHeaders("Retry-After", ["1"])
            message = f"{MAX_OF_USER} requests of this user have no reply yet"
            error = error_reply(429, "Throttled", message, "wait for their replies")
        if error is not None:
            self._respond(error)
        elif is_form and factory.act is not None:
            factory.act(self._form(), self._respond, rights)
        elif rights is None:
            factory.handle(self.path.decode("latin-1"), self.args, self._respond)
        else:
            factory.handle(self.path.decode("latin-1"), self.args, self._respond, rights)

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

    def _log_in(self, access: HttpAccess) -> object | None:
        headers = self._fields("Authorization")
        peer: Any = self.client
        rights = access.log_in(
            str(getattr(peer, "host", peer)), headers[0] if len(headers) == 1 else None
        )
        if rights is not None and self.path == LOGOUT:
            raise LoginFailed("you are logged out", hint="log in again, or leave the page")
        return rights

    def _fields(self, name: str) -> list[str]:
        """Return the values of a header: any bytes, as HTTP has them."""
        values = self.requestHeaders.getRawHeaders(name.encode(), [])
        return [value.decode("latin-1") for value in values]

    def _form(self) -> HttpForm:
        content: Any = self.content
        part = self.requestHeaders.hasHeader(PART_HEADER)

        def cookie(name: str) -> str:
            cookies: dict[bytes, bytes] = self.received_cookies
            return cookies.get(name.encode(), b"").decode("latin-1")

        return HttpForm(self.path.decode("latin-1"), content.read(), cookie, part)

    def _check(self, access: HttpAccess, *, is_form: bool) -> HttpReply | None:
        hosts = self._fields("Host")
        if len(hosts) != 1 or not is_known_host(hosts[0], access.hosts):
            return error_reply(
                421,
                "WrongHost",
                "the Host header does not name this machine",
                "use 127.0.0.1 or localhost",
            )
        schemes = {access.scheme}
        if not is_known_host(hosts[0], ()):  # a name of the settings: perhaps of a proxy with TLS
            schemes.add("https")
        origins = self._fields("Origin")
        if any(origin not in {f"{one}://{hosts[0]}" for one in schemes} for origin in origins):
            return error_reply(403, "WrongOrigin", "requests from other origins are refused")
        if is_form:
            return self._check_form()
        if self._is_loaded_by_another_site():
            message = "pages of other sites load nothing of the console"
            return error_reply(403, "WrongOrigin", message, "open the console itself")
        if self.method not in (b"GET", b"HEAD"):
            self.responseHeaders.setRawHeaders("Allow", ["GET, HEAD"])
            return error_reply(
                405,
                "ReadOnly",
                "only forms of the console change anything",
                "use the console, or the command line: txmq --help",
            )
        return None

    def _is_loaded_by_another_site(self) -> bool:
        """Return whether a page of another site loads this, as an image for instance:
        the browser adds the reader's password, and a search costs the broker time. A
        link to the console may be anywhere.
        """
        sites, modes, places = (
            self._fields(f"Sec-Fetch-{name}") for name in ("Site", "Mode", "Dest")
        )
        is_link = modes == ["navigate"] and places == ["document"]
        return any(site not in ("same-origin", "none") for site in sites) and not is_link

    def _check_form(self) -> HttpReply | None:
        headers = self.requestHeaders
        sites = self._fields("Sec-Fetch-Site")
        # of old browsers, one of the two; what is no browser has the command line
        if any(site != "same-origin" for site in sites) or not (
            sites or headers.hasHeader("Origin")
        ):
            message = "a form has to come from a page of this console"
            return error_reply(403, "WrongOrigin", message, "use the console, or txmq --help")
        types = self._fields("Content-Type")
        if [one.partition(";")[0].strip().lower() for one in types] != [FORM]:
            return error_reply(415, "BadRequest", "this is not a form", f"send {FORM}")
        return None

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
        self.registerProducer(self._pressure, True)  # type: ignore[no-untyped-call] # Twisted's
        source.opened(self)

    @property
    def is_full(self) -> bool:
        """Return whether the client has not read what was sent."""
        return self._pressure.paused

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


def is_known_host(host: str, known: Collection[str]) -> bool:
    """Return whether a Host header names this machine, or one of the known names."""
    match = HOST_HEADER.fullmatch(host)
    if match is None:
        return False
    name = (match["bracketed"] or match["plain"]).lower()
    return is_loopback(name) or name in known


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
        # an event stream writes little, and would not notice that its reader is gone
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
