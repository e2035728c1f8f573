"""Addresses that a server listens on."""

from __future__ import annotations

from ipaddress import ip_address
from typing import NamedTuple

PORTS = range(1 << 16)


class ListenAddress(NamedTuple):
    """Host and port that a server listens on; port 0 = any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen_address(text: str) -> ListenAddress:
    """Parse "HOST:PORT", with an IPv6 host in brackets. Raises ValueError."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if (
        not host
        or (":" in host) != bracketed
        or not (port.isascii() and port.isdigit() and int(port) in PORTS)
    ):
        raise ValueError(
            f"invalid address {text!r}: use HOST:PORT, as 127.0.0.1:7650 or [::1]:7650"
        )
    return ListenAddress(host, int(port))


def is_one_address(address: ListenAddress) -> bool:
    """Return whether others can be told the address: not that of all interfaces, and no
    port that is chosen later.
    """
    try:
        return bool(address.port) and not ip_address(address.host).is_unspecified
    except ValueError:  # a name
        return bool(address.port)


def is_loopback(host: str) -> bool:
    """Return whether `host`, an address or "localhost", is this machine only."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
