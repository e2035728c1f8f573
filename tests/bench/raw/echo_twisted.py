"""Yardstick: a minimal Twisted server that answers every framed request at once.

    python -m tests.bench.raw.echo_twisted ANSWERS

Frames and ANSWERS are as in `tests.bench.raw.echo`.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any, cast

from twisted.internet import protocol, reactor

from tests.bench.raw.echo import Answer, replies


class Echo(protocol.Protocol):
    """The server side of one connection."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.rest = b""

    def connectionMade(self) -> None:
        """Send small replies at once."""
        cast(Any, self.transport).setTcpNoDelay(True)

    def dataReceived(self, data: bytes) -> None:
        """Answer the whole frames."""
        out, self.rest = replies(self.rest + data, self.answer)
        cast(Any, self.transport).write(out)


def main(answers: str) -> None:
    """Serve until terminated."""
    loop = cast(Any, reactor)
    factory = protocol.Factory.forProtocol(partial(Echo, importlib.import_module(answers).answer))
    port = loop.listenTCP(0, factory, interface="127.0.0.1")
    print(f"ready 127.0.0.1:{port.getHost().port}", flush=True)
    loop.run()


if __name__ == "__main__":
    main(sys.argv[1])
