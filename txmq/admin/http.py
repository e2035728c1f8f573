"""HTTP as the admin pages need it: GET and HEAD from this machine, small requests, and
no patience with slow ones.

Whoever opens the console also has pages of strangers open in the same browser. So a
request must name this machine as its host, because a stranger's name that was made to
lead here (DNS rebinding) does not; it must not come from another origin; and no request
changes anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from twisted.internet.protocol import connectionDone
from twisted.web.http import HTTPChannel, HTTPFactory, Request, datetimeToString

from txmq.config.listen import is_loopback
from txmq.wire.json import dump

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress
    from twisted.python.failure import Failure

# from one answer to the end of the next request, however its bytes trickle in; and to
# take the last
REQUEST_S = 20.0
BODY_BYTES = (
    4_096  # no request needs one; this much is read over, so that its sender gets a proper answer
)
HEADER_BYTES = 8_192
HEADER_LINES = 64
MOST_CONNECTIONS = 64  # a browser takes six

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
HOST = re.compile(
    r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+)\]|(?P<plain>[A-Za-z0-9.-]+))(?::[0-9]{1,5})?"
)
TOO_LARGE = b"HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

Query = Mapping[bytes, Sequence[bytes]]


class Reply(NamedTuple):
    """What goes back."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Respond = Callable[[Reply], None]
Handle = Callable[[str, Query, Respond], None]  # of a path and its query; may respond later


def as_json(value: object, status: int = 200) -> Reply:
    """A reply of JSON."""
    return Reply(status, dump(value), "application/json")


def refused(status: int, error: str, message: str, hint: str = "") -> Reply:
    """An error, with the fields that the command line gives it."""
    return as_json({"error": error, "message": message, "hint": hint}, status)


class Exchange(Request):
    """One request and its reply."""

    _gone = False

    def gotLength(self, length: int | None) -> None:
        """Twisted has the headers; without a known length the body has no end
        either.
        """
        if length is None or length > BODY_BYTES:
            self.channel.write(TOO_LARGE)
            self.channel.loseConnection()
            length = 0
        Request.gotLength(self, length)

    def process(self) -> None:
        """Twisted has the whole request."""
        refusal = self._refusal()
        if refusal is not None:
            self._respond(refusal)
            return
        factory: Any = self.channel.factory
        factory.handle(self.path.decode("latin-1"), self.args, self._respond)

    def _refusal(self) -> Reply | None:
        hosts = self.requestHeaders.getRawHeaders("Host", [])
        if len(hosts) != 1 or not names_this_machine(hosts[0]):
            return refused(
                421, "WrongHost", "this is no host of that name", "use 127.0.0.1 or localhost"
            )
        if any(
            origin != f"http://{hosts[0]}"
            for origin in self.requestHeaders.getRawHeaders("Origin", [])
        ):
            return refused(403, "WrongOrigin", "pages of other origins get nothing here")
        if self.method not in (b"GET", b"HEAD"):
            self.responseHeaders.setRawHeaders("Allow", ["GET, HEAD"])
            return refused(
                405,
                "ReadOnly",
                "nothing can be changed over HTTP",
                "use the command line: txmq --help",
            )
        return None

    def _respond(self, reply: Reply) -> None:
        if self._gone:
            return
        self.setResponseCode(reply.status)
        own = {
            "Date": datetimeToString().decode(),
            "Content-Type": reply.content_type,
            "Content-Length": str(len(reply.body)),
        }
        for name, value in (HEADERS | own).items():
            self.responseHeaders.setRawHeaders(name, [value])
        Request.write(self, reply.body)
        Request.finish(self)

    def connectionLost(self, reason: Failure) -> None:
        self._gone = True
        Request.connectionLost(self, reason)


def names_this_machine(host: str) -> bool:
    """Whether a Host header is one that only this machine has."""
    found = HOST.fullmatch(host)
    return found is not None and is_loopback((found["bracketed"] or found["plain"]).lower())


class Channel(HTTPChannel):
    """One connection."""

    requestFactory = Exchange
    totalHeadersSize = HEADER_BYTES
    maxHeaders = HEADER_LINES

    def connectionMade(self) -> None:
        factory: Any = self.factory
        factory.channels.add(self)
        HTTPChannel.connectionMade(self)

    def resetTimeout(self) -> None:
        """Called for each piece of data; the time runs on, so that a byte now and then
        keeps nobody here.
        """

    def requestDone(self, request: Request) -> None:
        HTTPChannel.requestDone(self, request)
        if not self.persistent:
            factory: Any = self.factory
            HTTPChannel.setTimeout(
                self, factory.timeOut
            )  # whoever does not read the answer would stay for ever

    def timeoutConnection(self) -> None:
        _abort(self)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        factory: Any = self.factory
        factory.channels.discard(self)
        HTTPChannel.connectionLost(self, reason)


def _abort(channel: Channel) -> None:
    transport: Any = channel.transport
    transport.abortConnection()


class AdminFactory(HTTPFactory):
    """Makes the connections, and ends them when it stops to listen."""

    protocol = Channel  # type: ignore[assignment]  # the base class's would speak HTTP/2, too
    noisy = False

    def __init__(self, handle: Handle, reactor: Any, *, request_s: float = REQUEST_S) -> None:  # Twisted's
        super().__init__(timeout=request_s, reactor=reactor)
        self.handle = handle
        self.channels: set[Channel] = set()

    def buildProtocol(self, addr: IAddress | None) -> Any:  # a Channel, whatever the base class says
        return super().buildProtocol(addr) if len(self.channels) < MOST_CONNECTIONS else None

    def stopFactory(self) -> None:
        for channel in tuple(self.channels):
            _abort(channel)
        super().stopFactory()

    def log(self, request: Request) -> None:
        """No line for each request: an open console asks every two seconds."""
