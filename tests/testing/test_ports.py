"""Ports of servers that are started again."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

from txmq.testing.ports import PORTS, kept_port


def test_a_server_keeps_its_port_unless_it_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "port"
    port = kept_port(file)
    assert port in PORTS
    assert kept_port(file) == port
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert kept_port(file) != port
    for damaged in ("", "x", "99999999", "80"):
        file.write_text(damaged)
        assert kept_port(file) in PORTS
