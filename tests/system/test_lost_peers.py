"""Both sides of a connection notice a peer that has vanished: a real broker, and both
faces of the client.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from txmq import connect
from txmq.testing.own_broker import OwnBroker
from txmq.testing.ports import free_port
from txmq.testing.wait import wait_until
from txmq.wire.lost_peers import IDLE_S, PROBE_S, PROBES, UNACKNOWLEDGED_MS

ESTABLISHED, KEEPALIVE_TIMER = "01", "02"
TICKS_PER_S = 100  # of /proc/net/tcp
MINUTE_S = 60


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[OwnBroker]:
    with OwnBroker(tmp_path) as broker:
        yield broker


def timers(port: int) -> list[tuple[str, float]]:
    """Return kind and remaining seconds of the timers of all connections to and from a
    port of this machine: those of both ends.
    """
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = f":{port:04X}"
    return [
        (kind, int(left, 16) / TICKS_PER_S)
        for row in rows
        for kind, left in [row[5].split(":")]
        if row[3] == ESTABLISHED and (row[1].endswith(ends) or row[2].endswith(ends))
    ]


def test_fault_139_both_ends_probe_an_idle_connection_within_a_minute(broker: OwnBroker) -> None:
    assert IDLE_S + PROBES * PROBE_S < MINUTE_S
    assert UNACKNOWLEDGED_MS < MINUTE_S * 1_000
    port = int(broker.url.rpartition(":")[2])
    with connect(broker.url) as client:
        client.send("t", b"m")

        def all_probe() -> bool:
            found = timers(port)
            return len(found) >= 2 and all(
                kind == KEEPALIVE_TIMER and left <= IDLE_S + 1 for kind, left in found
            )

        wait_until(all_probe, what="nothing is unacknowledged, and probes follow")


def test_a_browser_that_vanishes_is_noticed_within_a_minute(tmp_path: Path) -> None:
    port = free_port()
    request = f"GET /live/topics HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
    with (
        OwnBroker(tmp_path, f'[broker]\nhttp = "127.0.0.1:{port}"\n'),
        socket.create_connection(("127.0.0.1", port)) as browser,
    ):
        browser.sendall(request.encode())
        assert b"200" in browser.recv(4_096)

        def probes() -> bool:
            return any(kind == KEEPALIVE_TIMER for kind, _left in timers(port))

        wait_until(probes, what="the broker probes the connection")
