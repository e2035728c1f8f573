"""A console in memory: a broker, its admin site, and requests as bytes."""

from __future__ import annotations

import re
from base64 import b64encode
from html import unescape
from typing import Any, NamedTuple
from urllib.parse import urlencode

from twisted.internet.testing import StringTransport

from tests.broker.access.support import PASSWORD, BrokerWithUsers
from tests.broker.support import BrokerInMemory, parts_of
from txmq.admin.http import AdminFactory
from txmq.admin.request_checks import HttpAccess
from txmq.admin.site import AdminSite
from txmq.config.broker import SettingsFile

SETTINGS = SettingsFile.model_validate({"broker": {"data": "/data"}})
HOST = "localhost:7651"
OWN = {"Origin": f"http://{HOST}", "Sec-Fetch-Site": "same-origin"}
FORM = "application/x-www-form-urlencoded"


def _basic(user: str) -> str:
    return "Basic " + b64encode(f"{user}:{PASSWORD}".encode()).decode()


class Reply(NamedTuple):
    """A reply to a request."""

    status: int
    head: str
    body: str

    def header(self, name: str) -> str:
        found = re.search(rf"^{name}: (.*)$", self.head, re.MULTILINE | re.IGNORECASE)
        return "" if found is None else found[1].strip()

    @property
    def text(self) -> str:
        """What people read, without elements."""
        return " ".join(unescape(re.sub(r"<[^>]+>", " ", self.body)).split())


class ConsoleInMemory:
    """The console of a broker in memory; with `users` each request is of one."""

    def __init__(self, broker: BrokerInMemory | None = None, *, users: bool = False) -> None:
        if broker is not None:
            self.broker = broker
        elif users:
            self.broker = BrokerWithUsers()
        else:
            self.broker = BrokerInMemory()
            self.broker.start()
        self.parts = parts_of(self.broker, SETTINGS)
        self.restart()

    def restart(self) -> None:
        """Serve anew, as after a start of the broker."""
        site = AdminSite(self.parts)
        access = HttpAccess(self.parts.guard.log_in_by_http)
        self.factory: Any = AdminFactory(
            site.handle, self.broker.clock, access=access, act=site.act
        )

    def send(self, data: bytes) -> Reply:
        """Send bytes on a new connection, and return the reply."""
        transport, channel = StringTransport(), self.factory.buildProtocol(None)
        channel.makeConnection(transport)
        channel.dataReceived(data)
        self.broker.pass_time(0)
        raw = transport.value()
        head, _, body = raw.partition(b"\r\n\r\n")
        status = int(head.split(b" ")[1]) if head else 0
        return Reply(status, head.decode().replace("\r\n", "\n"), body.decode())

    def listen(self, path: str, user: str = "") -> tuple[Any, StringTransport]:
        """Open an event stream; return its connection."""
        transport, channel = StringTransport(), self.factory.buildProtocol(None)
        channel.makeConnection(transport)
        login = f"Authorization: {_basic(user)}\r\n" if user else ""
        channel.dataReceived(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n{login}\r\n".encode())
        self.broker.pass_time(0)
        return channel, transport

    def request(
        self, method: str, path: str, headers: dict[str, str], body: bytes = b"", user: str = ""
    ) -> Reply:
        fields = {"Host": HOST, **headers}
        if user:
            fields["Authorization"] = _basic(user)
        if body:
            fields.setdefault("Content-Length", str(len(body)))
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
        return self.send(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)

    def get(self, path: str, user: str = "") -> Reply:
        return self.request("GET", path, {}, user=user)

    def credentials(self, user: str = "") -> tuple[str, str]:
        """Return cookie and token of a page."""
        cookie = self.get("/", user).header("Set-Cookie").partition(";")[0]
        console: Any = self.factory.act.__self__._console
        return cookie, console._csrf.token(user or None)

    def act(self, call: str, user: str = "", *, sure: bool = True, **fields: object) -> Reply:
        """Send a form as a page of the console does."""
        cookie, token = self.credentials(user)
        form = {"csrf": token, "back": "", **({"sure": "yes"} if sure else {}), **fields}
        return self.request(
            "POST",
            f"/act/{call}",
            {**OWN, "Cookie": cookie, "Content-Type": FORM},
            urlencode(form, doseq=True).encode(),
            user,
        )
