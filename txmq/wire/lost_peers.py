"""Sockets that notice a peer which has vanished without closing its connection.

The kernel's own times are two hours for an idle connection, and 15 minutes for one with
unacknowledged data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Protocol

    class Socket(Protocol):
        """The part of a socket that is used here."""

        def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


IDLE_S, PROBE_S, PROBES = 15, 5, 4  # 35 s on an idle connection
UNACKNOWLEDGED_MS = 50_000  # on one with data under way


def notice_lost_peer(sock: Socket, module: ModuleType) -> None:
    """Have the kernel end a connection within a minute after its peer has vanished.
    Systems without these options keep their own times. `module` is Python's `socket`.
    """
    sock.setsockopt(module.SOL_SOCKET, module.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", IDLE_S),
        ("TCP_KEEPINTVL", PROBE_S),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS),
    ):
        option = getattr(module, name, None)
        if option is not None:
            sock.setsockopt(module.IPPROTO_TCP, option, value)
