"""The broker's address and the names of topics, of a connection's URL."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from txmq.client.protocol.address import PORT

PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")


def address_of(client: Any) -> str:
    """Return the URL for txmq: with the connection's user, and TLS where `ssl` is set.

    Of its options `ca_certs` goes along; the names of txmq's own are those of its URLs.
    """
    options = dict(client.ssl) if isinstance(client.ssl, dict) else {}
    if "ca_certs" in options:
        options["ca"] = options.pop("ca_certs")
    user = quote(client.userid or "", safe="")
    if user and client.password:
        user += ":" + quote(client.password, safe="")
    host = client.hostname or "127.0.0.1"
    if ":" in host:  # an address of IPv6, which Kombu gives without its brackets
        host = f"[{host}]"
    place = f"{user}{'@' * bool(user)}{host}:{client.port or PORT}"
    query = "?" + urlencode(options) if options else ""
    return f"txmq{'s' * bool(client.ssl)}://{place}{query}"


class Names:
    """The names of a virtual host's topics; no two queues or exchanges share one."""

    def __init__(self, virtual_host: str | None = None) -> None:
        """`virtual_host`: the path of the URL; none, "" and "/" are the same."""
        host = "" if virtual_host in (None, "/") else _escaped(str(virtual_host))
        self._prefix = f"kombu-{host}." if host else "kombu."
        self.bindings = self._prefix + "bindings"

    def queue(self, name: str) -> str:
        """Return the topic of a queue, and its consumer group."""
        return f"{self._prefix}q.{_escaped(name, '.')}"

    def exchange(self, name: str) -> str:
        """Return the topic of what is said to those who listen to an exchange."""
        return f"{self._prefix}x.{_escaped(name, '.')}"


def _escaped(name: str, plain: str = "") -> str:
    """Return a name with `_` and their codes in place of other characters than letters,
    digits, '-' and those of `plain`.
    """
    return "".join(
        char
        if char in PLAIN or char in plain
        else "".join(f"_{byte:02x}" for byte in char.encode())
        for char in name
    )
