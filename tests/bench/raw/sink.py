"""Yardstick: a minimal Twisted server that stores framed requests before it answers.

    python -m tests.bench.raw.sink FILE MIB none|inline|thread

Request: u32 length of the rest, u32 CRC32C of the bytes from 8, 4 bytes, u32
correlation, body. Reply: u32 12, u32 correlation, i64 place in FILE (MIB of zeros).
"""

from __future__ import annotations

import struct
import sys
from functools import partial
from typing import Any, cast

from google_crc32c import value as crc32c
from twisted.internet import protocol, reactor

from tests.bench.raw.group_sync import GroupSync

REQUEST = struct.Struct("<II4xI")
REPLY = struct.Struct("<IIq")


class Sink(protocol.Protocol):
    """A connection whose frames are checked one by one and written as received."""

    def __init__(self, log: GroupSync) -> None:
        self.log, self.rest = log, b""

    def connectionMade(self) -> None:
        self.socket = cast(Any, self.transport)
        self.socket.setTcpNoDelay(True)
        self.socket.bufferSize = 1 << 18  # 64 requests of 1 KiB in one turn

    def dataReceived(self, data: bytes) -> None:
        data = self.rest + data
        at, size, replies = 0, len(data), []
        while at + 16 <= size:
            length, crc, correlation = REQUEST.unpack_from(data, at)
            if (end := at + 4 + length) > size:
                break
            if crc32c(data[at + 8 : end]) != crc:
                self.socket.abortConnection()
                return
            replies.append(REPLY.pack(12, correlation, self.log.end + at))
            at = end
        if at:
            self.log.append(data[:at], self, replies)
        self.rest = data[at:]


if __name__ == "__main__":
    sys.setswitchinterval(0.0005)  # otherwise the reactor may notice a finished sync 5 ms late
    loop = cast(Any, reactor)
    sync = GroupSync(sys.argv[1], int(sys.argv[2]) << 20, sys.argv[3])
    factory = protocol.Factory.forProtocol(partial(Sink, sync))
    port = loop.listenTCP(0, factory, interface="127.0.0.1").getHost().port
    print(f"ready 127.0.0.1:{port}", flush=True)
    loop.run()
