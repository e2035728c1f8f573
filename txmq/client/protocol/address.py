"""Addresses of a broker: `txmq://host:port`, or several that are tried in turn."""

from __future__ import annotations

from typing import NamedTuple

from txmq.errors import ConfigError

SCHEME = "txmq://"
PORT = 7650
HINT = "use txmq://127.0.0.1:7650, or txmq://a:7650,b:7650 for addresses to try in turn"


class Address(NamedTuple):
    """Host and port of a broker."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> tuple[Address, ...]:
    """Return the addresses in a URL, in their order. Raises ConfigError."""
    if not url.startswith(SCHEME):
        raise ConfigError("url", f"{url!r} does not begin with {SCHEME}", hint=HINT)
    parts = [part.removeprefix(SCHEME).rstrip("/") for part in url.removeprefix(SCHEME).split(",")]
    return tuple(_parse_address(part, url) for part in parts)


def _parse_address(text: str, url: str) -> Address:
    host, separator, digits = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, digits = text, str(PORT)
    port = int(digits) if digits.isascii() and digits.isdigit() else 0
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if (
        not host
        or not 0 < port < 1 << 16
        or (":" in host) != bracketed
        or any(c in host for c in "/@?# ")
    ):
        raise ConfigError("url", f"{text!r} in {url!r} is not a host and port", hint=HINT)
    return Address(host, port)
