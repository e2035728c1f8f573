"""Yardstick: a Twisted client with one framed 1 KiB request at a time.

    python -m tests.bench.raw.echo_twisted_client HOST:PORT COUNT

Prints {"p50_us", "p99_us"} to the 32-byte reply.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, cast

from twisted.internet import protocol, reactor

from tests.bench.raw.echo_client import REPLY_BYTES, REQUEST
from tests.bench.raw.latency import latency_us

loop = cast(Any, reactor)


class Requests(protocol.Protocol):
    """Sends the next request when the last reply is complete."""

    def __init__(self, count: int) -> None:
        self.count, self.took = count, list[float]()

    def connectionMade(self) -> None:
        cast(Any, self.transport).setTcpNoDelay(True)
        self.request()

    def request(self) -> None:
        self.began, self.missing = time.perf_counter(), REPLY_BYTES
        cast(Any, self.transport).write(REQUEST)

    def dataReceived(self, data: bytes) -> None:
        self.missing -= len(data)
        if not self.missing:
            self.took.append(time.perf_counter() - self.began)
            if len(self.took) < self.count:
                self.request()
            else:
                cast(Any, self.transport).loseConnection()

    def connectionLost(self, reason: object = protocol.connectionDone) -> None:
        loop.stop()


def main(address: str, count: int) -> None:
    requests, (host, port) = Requests(count), address.split(":")
    loop.connectTCP(host, int(port), protocol.ClientFactory.forProtocol(lambda: requests))
    loop.run()
    if len(requests.took) < count:
        sys.exit("the server left before it answered")
    print(json.dumps(latency_us(requests.took)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
