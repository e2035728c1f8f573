"""HTTP of the admin pages, in memory: access, sizes and times."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from twisted.internet.address import IPv4Address
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport

from txmq.admin.http import MAX_BODY_BYTES, MAX_CONNECTIONS, MAX_OF_USER, AdminFactory
from txmq.admin.http_values import HttpReply, Query, Respond
from txmq.admin.request_checks import HttpAccess

REQUEST_S = 20.0
GET = b"GET /here?a=1 HTTP/1.1\r\nHost: localhost:7651\r\n"


class ScriptedSite:
    """A factory that replies with the path of each request, at once or (`later`) when
    the test says so.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.factory: Any = AdminFactory(self._handle, self.clock, request_s=REQUEST_S)
        self.later: list[Respond] | None = None

    def _handle(self, path: str, query: Query, respond: Respond, _rights: object) -> None:
        if self.later is None:
            respond(HttpReply(200, f"{path} {dict(query)}".encode()))
        else:
            self.later.append(respond)

    def request(self, data: bytes, host: str = "10.0.0.1") -> tuple[Any, StringTransport]:
        """Send data on a new connection."""
        address = IPv4Address("TCP", host, 1)
        transport, channel = StringTransport(), self.factory.buildProtocol(address)
        channel.makeConnection(transport)
        channel.dataReceived(data)
        self.clock.advance(0)
        return channel, transport


def status(transport: StringTransport) -> int:
    return int(transport.value().split(b" ")[1])


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:80",
        "127.0.0.1:7651",
        "127.8.9.1",
        "[::1]:7651",
        "[::1]",
        "localhost:65535",
    ],
)
def test_this_machine_is_let_in_by_its_own_names(host: str) -> None:
    _, transport = ScriptedSite().request(
        f"GET /here?a=1 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    )
    assert status(transport) == 200
    assert transport.value().endswith(b"\r\n\r\n/here {b'a': [b'1']}")


@pytest.mark.parametrize(
    "headers",
    [
        b"Host: evil.example\r\n",
        b"Host: localhost.evil.example\r\n",
        b"Host: localhost.\r\n",
        b"Host: 127.0.0.1.evil.example:7651\r\n",
        b"Host: 192.168.0.1\r\n",
        b"Host: 2130706433\r\n",
        b"Host: [::1]evil.example\r\n",
        b"Host: ::1\r\n",
        b"Host: localhost@evil.example\r\n",
        b"Host:\r\n",
        b"Host: localhost\r\nHost: evil.example\r\n",
        b"X-Forwarded-Host: localhost\r\n",
        b"Host: evil.example\r\nX-Forwarded-Host: localhost\r\n",
    ],
)
def test_a_name_that_was_made_to_lead_here_gets_nothing(headers: bytes) -> None:
    _, transport = ScriptedSite().request(b"GET / HTTP/1.1\r\n" + headers + b"\r\n")
    assert status(transport) == 421
    assert b"evil" not in transport.value()


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (b"http://localhost:7651", 200),
        (b"http://evil.example", 403),
        (b"https://localhost:7651", 403),
        (b"http://localhost:80", 403),
        (b"null", 403),
    ],
)
def test_only_its_own_pages_may_ask(origin: bytes, expected: int) -> None:
    _, transport = ScriptedSite().request(GET + b"Origin: " + origin + b"\r\n\r\n")
    assert status(transport) == expected
    assert b"Access-Control" not in transport.value()


@pytest.mark.parametrize(
    "method", [b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE", b"CONNECT", b"BREW"]
)
def test_whatever_could_change_something_is_refused(method: bytes) -> None:
    _, transport = ScriptedSite().request(
        GET.replace(b"GET", method) + b"Content-Length: 2\r\n\r\n{}"
    )
    assert status(transport) == 405
    assert b"\r\nAllow: GET, HEAD\r\n" in transport.value()


def test_a_head_is_a_get_without_the_body() -> None:
    site = ScriptedSite()
    _, whole = site.request(GET + b"\r\n")
    _, head = site.request(GET.replace(b"GET", b"HEAD") + b"\r\n")
    assert head.value() == whole.value().partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


@pytest.mark.parametrize("data", [GET + b"\r\n", GET.replace(b"localhost", b"evil") + b"\r\n"])
def test_every_answer_forbids_what_a_browser_could_do_with_it(data: bytes) -> None:
    _, transport = ScriptedSite().request(data)
    head = transport.value().partition(b"\r\n\r\n")[0].decode()
    headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:])
    assert headers["Content-Security-Policy"].startswith(
        "default-src 'none'; script-src 'self'; style-src 'self';"
    )
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Server" not in headers


@pytest.mark.parametrize(
    "length",
    [
        b"Content-Length: 2000000000\r\n",
        b"Content-Length: %d\r\n" % (MAX_BODY_BYTES + 1),
        b"Transfer-Encoding: chunked\r\n",
    ],
)
def test_a_body_without_measure_is_not_read(length: bytes) -> None:
    channel, transport = ScriptedSite().request(GET + length + b"\r\n" + b"x" * 8_192)
    assert status(transport) == 413
    assert transport.disconnecting
    assert channel.requests[0].content.getbuffer().nbytes == 0


@pytest.mark.parametrize(
    "data",
    [
        GET + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        GET + b"Content-Length: -1\r\n\r\n",
        GET + b"A: " + b"x" * 8_192 + b"\r\n\r\n",
        GET + b"A: x\r\n" * 100 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
    ],
    ids=["both lengths", "negative", "long header", "many headers", "tls", "no colon"],
)
def test_what_is_no_request_of_ours_is_hung_up_on(data: bytes) -> None:
    _, transport = ScriptedSite().request(data)
    assert status(transport) == 400
    assert transport.disconnecting


def test_a_line_without_end_is_hung_up_on() -> None:
    _, transport = ScriptedSite().request(b"GET /" + b"x" * 20_000)
    assert transport.disconnecting


@pytest.mark.parametrize("begun", [b"", b"GET /", GET, GET + b"Content-Length: 100\r\n\r\n"])
def test_slow_requests_are_cut_off(begun: bytes) -> None:
    site = ScriptedSite()
    channel, transport = site.request(begun)
    for _ in range(int(REQUEST_S) - 1):
        site.clock.advance(1)
        channel.dataReceived(b"x")
    assert not transport.disconnecting
    site.clock.advance(1)
    assert transport.disconnecting


def test_a_connection_may_ask_again_and_its_time_begins_anew() -> None:
    site = ScriptedSite()
    channel, transport = site.request(GET + b"\r\n")
    site.clock.advance(REQUEST_S - 1)
    channel.dataReceived(GET + b"\r\n")
    site.clock.advance(0)
    site.clock.advance(REQUEST_S - 1)
    assert not transport.disconnecting
    assert transport.value().count(b"200 OK") == 2
    site.clock.advance(1)
    assert transport.disconnecting


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
def test_a_client_that_does_not_read_its_reply_is_cut_off(version: bytes) -> None:
    site = ScriptedSite()
    _, transport = site.request(GET.replace(b"HTTP/1.1", version) + b"Connection: close\r\n\r\n")
    assert transport.disconnecting  # but what was written need not be out
    site.clock.advance(REQUEST_S - 1)
    assert not transport.disconnected
    site.clock.advance(1)
    assert transport.disconnected


def test_an_answer_that_comes_after_its_asker_has_gone_is_dropped(
    lost: Callable[[Any], None],
) -> None:
    site = ScriptedSite()
    site.later = []
    channel, transport = site.request(GET + b"\r\n")
    lost(channel)
    site.later[0](HttpReply(200, b"late"))
    assert transport.value() == b""


def test_a_new_connection_takes_the_place_of_the_oldest_without_a_request() -> None:
    """Slow clients hold all connections; the health check is answered."""
    site = ScriptedSite()
    slow = [site.request(GET)[1] for _ in range(MAX_CONNECTIONS)]
    _, transport = site.request(GET + b"\r\n")
    assert status(transport) == 200
    assert slow[0].disconnected
    assert not any(one.disconnected for one in slow[1:])


def test_a_host_that_connects_again_and_again_pushes_out_its_own_connections() -> None:
    """A browser's handshake of TLS takes longer than others need to connect."""
    site = ScriptedSite()
    browser, transport = site.request(b"")
    for _ in range(2 * MAX_CONNECTIONS):
        site.request(b"", "10.0.0.2")
    browser.dataReceived(GET + b"\r\n")
    site.clock.advance(0)
    assert not transport.disconnected
    assert status(transport) == 200


def test_connections_that_wait_for_replies_are_not_replaced() -> None:
    site = ScriptedSite()
    site.later = []
    for _ in range(MAX_CONNECTIONS):
        site.request(GET + b"\r\n")
    assert site.factory.buildProtocol(None) is None
    site.later[0](HttpReply(200, b""))
    _, transport = site.request(GET + b"\r\n")
    site.later[-1](HttpReply(200, b""))
    assert status(transport) == 200


def test_a_user_with_many_requests_keeps_connections_for_others() -> None:
    site = ScriptedSite()
    site.factory.access = HttpAccess(lambda _peer, name: SimpleNamespace(user=name))
    site.later = []

    def ask(user: bytes) -> tuple[Any, StringTransport]:
        return site.request(GET + b"Authorization: " + user + b"\r\n\r\n")

    ann = [ask(b"ann") for _ in range(MAX_OF_USER)]
    assert status(ask(b"ann")[1]) == 429
    _, bob = ask(b"bob")
    ann[0][0].connectionLost()  # the work for it goes on
    assert status(ask(b"ann")[1]) == 429
    for respond in site.later:
        respond(HttpReply(200, b""))
    assert status(bob) == status(ann[1][1]) == 200
    site.later = None
    assert status(ask(b"ann")[1]) == 200
    assert not site.factory.at_work


def test_of_pipelined_requests_the_first_has_a_reply_and_the_connection_ends() -> None:
    site = ScriptedSite()
    channel, transport = site.request(b"")
    channel.dataReceived((GET + b"\r\n") * 2_000)
    assert transport.value() == b""  # not in the turn in which they came
    site.clock.advance(0)
    assert transport.value().count(b"200 OK") == 1
    assert b"\r\nConnection: close\r\n" in transport.value()
    assert transport.disconnecting


def test_connections_end_when_it_stops_to_listen() -> None:
    site = ScriptedSite()
    site.factory.doStart()
    _, transport = site.request(GET + b"\r\n")
    site.factory.doStop()
    assert transport.disconnected


@pytest.fixture
def lost() -> Callable[[Any], None]:
    """A function that ends the connection of a channel."""
    from twisted.internet.error import ConnectionLost
    from twisted.python.failure import Failure

    return lambda channel: channel.connectionLost(Failure(ConnectionLost()))


# pieces of requests, right and wrong, in any order
PIECES = st.sampled_from(
    [
        *(b"GET ", b"HEAD ", b"POST ", b"TRACE ", b"get ", b"\x16\x03\x01", b"", b" "),
        *(b"/here", b"/../x", b"//", b"/%2e%2e/%00", b"/a?a=1&a=%zz&=&", b"*", b"http://evil/"),
        *(b" HTTP/1.1", b" HTTP/1.0", b" HTTP/9.9", b" HTTP/1.1 x", b"\r\n", b"\n", b"\r", b"\0"),
        *(b"Host: localhost\r\n", b"Host: evil\r\n", b"Host", b"X: y\r\n y\r\n", b": z\r\n"),
        *(b"Content-Length: 3\r\n", b"Content-Length: -1\r\n", b"Content-Length: 1e9\r\n"),
        *(b"Transfer-Encoding: chunked\r\n", b"ffffffff\r\n", b"3\r\nabc\r\n", b"0\r\n\r\n"),
        *(b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Authorization: Basic \xff\r\n"),
    ]
)


@given(st.lists(PIECES | st.binary(max_size=9), max_size=30), st.lists(st.integers(0, 400)))
def test_whatever_comes_is_answered_or_hung_up_on(pieces: list[bytes], cuts: list[int]) -> None:
    site, data = ScriptedSite(), b"".join(pieces)
    transport, channel = StringTransport(), site.factory.buildProtocol(None)
    channel.makeConnection(transport)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, end in pairwise(places):
        channel.dataReceived(data[start:end])
    site.clock.advance(0)
    answered = transport.value()
    assert not answered or answered.startswith((b"HTTP/1.1 ", b"HTTP/1.0 "))
    assert b"HTTP/1.1 5" not in answered
    site.clock.advance(REQUEST_S + 20)
    assert transport.disconnecting or transport.disconnected
    good = site.request(GET + b"\r\n")[1]
    assert status(good) == 200


@pytest.mark.parametrize(
    ("header", "expected"),
    [(b"Host", 421), (b"Origin", 403), (b"Authorization", 200), (b"Sec-Fetch-Site", 403)],
)
def test_a_header_that_is_no_text_is_answered_and_keeps_no_connection(
    header: bytes, expected: int
) -> None:
    site = ScriptedSite()
    site.factory.act = lambda _form, respond, _rights: respond(HttpReply(200, b"done"))
    is_form = header == b"Sec-Fetch-Site"
    request = b"POST /act/x HTTP/1.1\r\nContent-Length: 0\r\n" if is_form else b"GET / HTTP/1.1\r\n"
    if header != b"Host":
        request += b"Host: localhost\r\n"
    channel, transport = site.request(request + header + b": \xff\xfe\r\n\r\n")
    assert status(transport) == expected
    assert not channel.answering


def test_a_request_that_meets_a_bug_is_answered_and_keeps_no_connection() -> None:
    site = ScriptedSite()

    def fail(_path: str, _query: Query, _respond: Respond, _rights: object) -> None:
        raise ValueError("a bug")

    site.factory.handle = fail
    with capture_logs() as logged:
        channel, transport = site.request(GET + b"\r\n")
    assert status(transport) == 500
    assert not channel.answering
    assert [line["event"] for line in logged] == ["http.failed"]


def test_what_comes_behind_a_refused_request_is_not_read() -> None:
    site = ScriptedSite()
    channel, transport = site.request(b"not a request\r\n")
    channel.dataReceived(b"\r\n" + GET + b"\r\n")
    site.clock.advance(0)
    assert status(transport) == 400
    assert transport.value().count(b"HTTP/1.1") == 1
