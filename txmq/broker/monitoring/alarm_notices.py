"""Notices about alarms: what a receiver is sent, in its form, and the sending.

`send` blocks, and runs in a thread.
"""

from __future__ import annotations

import json
import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from smtplib import SMTP, SMTP_SSL, SMTPException
from socket import SHUT_RDWR, socket
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.request import (
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    Request,
    build_opener,
)

from txmq.config.broker import MailSettings, WebhookSettings
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from http.client import HTTPResponse

    from txmq.broker.monitoring.alarm import Alarm

TIMEOUT_S = 5.0  # of each step of a receiver
EXCHANGE_S = 30.0  # of all steps: an answer may come byte by byte
MAX_TOLD = 20  # alarms that a text names
MAX_SUMMARY = 1_024  # characters, of PagerDuty
MAX_DEDUP = 255


class Notice(NamedTuple):
    """Alarms that are raised, and others that have ended, at a time (µs). The receiver
    is told of the raised ones again before `repeat_s` have passed.
    """

    broker: str
    at: int
    repeat_s: float
    raised: tuple[Alarm, ...]
    resolved: tuple[Alarm, ...]


class Exchange:
    """A request to a receiver and its answer, in the thread of `send`. Another thread
    bounds it.
    """

    def __init__(self) -> None:
        self._connection: HTTPConnection | SMTP | None = None
        self._encrypted: ssl.SSLSocket | None = None
        self._since = 0
        self.is_over = False

    def take(self, connection: HTTPConnection | SMTP) -> None:
        """Begin anew with a connection, which may not be open yet."""
        self._connection, self._encrypted, self._since = connection, None, 0

    def tls(self) -> ssl.SSLContext:
        """Return the context of a connection, which has no socket while it shakes
        hands.
        """
        exchange = self

        class Encrypted(ssl.SSLSocket):
            def do_handshake(self, block: bool = False) -> None:  # noqa: FBT001, FBT002  # ssl's
                exchange._encrypted = self  # of this class
                super().do_handshake(block)

        context = ssl.create_default_context()
        context.sslsocket_class = Encrypted
        return context

    def bound(self, now: int) -> None:
        """End it where it was begun too long ago: its thread fails. Called from time to
        time.
        """
        if self._connection is None:
            return
        self._since = self._since or now
        # Its thread may take it away at any time.
        sock = self._encrypted or self._connection.sock
        if now - self._since >= EXCHANGE_S * SECOND and sock is not None:
            self.is_over = True
            with suppress(OSError):  # it has ended by itself
                socket.shutdown(sock, SHUT_RDWR)  # and leave TLS to its thread


def send(receiver: WebhookSettings | MailSettings, notice: Notice, exchange: Exchange) -> None:
    """Send a notice to a receiver. Raises OSError, HTTPException and SMTPException."""
    deliver: Callable[..., None] = _mail if isinstance(receiver, MailSettings) else _post
    try:
        deliver(receiver, notice, exchange)
    except (OSError, HTTPException, SMTPException) as error:
        if exchange.is_over:
            raise TimeoutError(f"no whole answer within {EXCHANGE_S:.0f} s") from error
        raise


def _post(receiver: WebhookSettings, notice: Notice, exchange: Exchange) -> None:
    headers = {"Content-Type": "application/json"}
    if receiver.key is not None and receiver.form != "pagerduty":
        headers["Authorization"] = f"Bearer {receiver.key}"
    opener = build_opener(_Refused, _Http(exchange))
    for body in bodies(receiver, notice):
        request = Request(receiver.url, json.dumps(body).encode(), headers)  # noqa: S310  # http, as checked
        with opener.open(request, timeout=TIMEOUT_S):
            pass


class _Http(HTTPHandler, HTTPSHandler):
    """Opens the connections of an exchange."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def http_open(self, req: Request) -> HTTPResponse:
        return self._open(HTTPConnection, req)

    def https_open(self, req: Request) -> HTTPResponse:
        return self._open(partial(HTTPSConnection, context=self._exchange.tls()), req)

    def _open(self, kind: Callable[..., HTTPConnection], req: Request) -> HTTPResponse:
        def opened(host: str, **options: Any) -> HTTPConnection:  # noqa: ANN401  # urllib's
            connection = kind(host, **options)
            self._exchange.take(connection)
            return connection

        return self.do_open(opened, req)


class _Server(SMTP):
    """A mail server, of which its exchange knows before it says anything."""

    def __init__(self, exchange: Exchange, *place: Any, **options: Any) -> None:  # noqa: ANN401  # smtplib's
        exchange.take(self)
        super().__init__(*place, **options)


class _TlsServer(_Server, SMTP_SSL):
    """A mail server that speaks TLS from the beginning."""


class _Refused(HTTPRedirectHandler):
    """Takes no redirection for an answer: it would be followed without the body."""

    def redirect_request(self, *_args: object) -> None:
        return None


def bodies(receiver: WebhookSettings, notice: Notice) -> Iterator[Any]:
    """Yield what a webhook is sent, in JSON values."""
    return FORMS[receiver.form](receiver, notice)


def _as_json(_receiver: WebhookSettings, notice: Notice) -> Iterator[Any]:
    yield {
        "broker": notice.broker,
        "at": notice.at,
        "raised": [alarm._asdict() for alarm in notice.raised],
        "resolved": [alarm._asdict() for alarm in notice.resolved],
    }


def _for_slack(_receiver: WebhookSettings, notice: Notice) -> Iterator[Any]:
    text = "\n".join((f"{subject(notice)}:", *lines(notice)))
    yield {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}


def _for_pagerduty(receiver: WebhookSettings, notice: Notice) -> Iterator[Any]:
    for action, alarms in (("trigger", notice.raised), ("resolve", notice.resolved)):
        for alarm in alarms:
            yield {
                "routing_key": receiver.key,
                "event_action": action,
                "dedup_key": f"{notice.broker}/{alarm.key}"[:MAX_DEDUP],
                "payload": {
                    "summary": f"{alarm.name}: {alarm.text}"[:MAX_SUMMARY],
                    "source": notice.broker,
                    "severity": alarm.severity,
                    "component": alarm.about,
                    "custom_details": {"action": alarm.action, "since": _moment(alarm.since)},
                },
            }


def _for_alertmanager(_receiver: WebhookSettings, notice: Notice) -> Iterator[Any]:
    """Yield the body of its API v2. It ends an alarm by itself that is not repeated."""
    until = notice.at + round(4 * notice.repeat_s * SECOND)
    yield [
        {
            "labels": {
                "alertname": alarm.name,
                "severity": alarm.severity,
                "broker": notice.broker,
                **alarm.told_apart,
            },
            "annotations": {"summary": alarm.text, "action": alarm.action},
            "startsAt": _moment(alarm.since),
            "endsAt": _moment(end),
        }
        for alarms, end in ((notice.raised, until), (notice.resolved, notice.at))
        for alarm in alarms
    ]


FORMS: dict[str, Callable[[WebhookSettings, Notice], Iterator[Any]]] = {
    "json": _as_json,
    "slack": _for_slack,
    "pagerduty": _for_pagerduty,
    "alertmanager": _for_alertmanager,
}


def subject(notice: Notice) -> str:
    """Return a notice in a line."""
    counts = ((len(notice.raised), "raised"), (len(notice.resolved), "resolved"))
    return f"txmq {notice.broker}: " + ", ".join(f"{n} {what}" for n, what in counts if n)


def lines(notice: Notice) -> Iterator[str]:
    """Yield a notice as lines for people."""
    for alarm in notice.raised[:MAX_TOLD]:
        yield f"{alarm.severity} {alarm.name}, since {_moment(alarm.since)}: {alarm.text}"
        yield f"  -> {alarm.action}"
    for alarm in notice.resolved[:MAX_TOLD]:
        yield f"resolved {alarm.name} {alarm.about}".rstrip()
    if max(len(notice.raised), len(notice.resolved)) > MAX_TOLD:
        yield "and more: txmq alarms"


def _moment(micros: int) -> str:
    at = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=micros)
    return at.isoformat(timespec="seconds")


def _mail(receiver: MailSettings, notice: Notice, exchange: Exchange) -> None:
    message = EmailMessage()
    message["Subject"] = subject(notice)
    message["From"], message["To"] = receiver.sender, ", ".join(receiver.to)
    message.set_content("\n".join(lines(notice)) + "\n")
    secure = exchange.tls()
    with (
        _TlsServer(exchange, receiver.host, receiver.port, timeout=TIMEOUT_S, context=secure)
        if receiver.encryption == "tls"
        else _Server(exchange, receiver.host, receiver.port, timeout=TIMEOUT_S)
    ) as server:
        if receiver.encryption == "starttls":
            server.starttls(context=secure)
        if receiver.user is not None:
            server.login(receiver.user, receiver.password or "")
        server.send_message(message)
