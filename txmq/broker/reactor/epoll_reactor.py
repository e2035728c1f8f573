"""The broker's reactor: Twisted's on epoll, with a callback after each turn's reads.

What arrived together is then written and answered together. A timer of zero seconds
would do the same, for the price of the timer and of another turn: a tenth of the
broker's work, with one frame in each turn.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from twisted.internet.epollreactor import EPollReactor
from twisted.internet.main import installReactor
from twisted.internet.tcp import Port

if TYPE_CHECKING:
    from collections.abc import Callable


ACCEPTS = 8  # of one port in a turn: with TLS each takes half a millisecond (2026-11-28)


class TurnPort(Port):
    """A port that accepts few connections a turn. Twisted's accepts as many as wait,
    and all requests wait behind them.
    """

    @property
    def numberAccepts(self) -> int:  # noqa: N802  # Twisted's
        """The connections of the next turn."""
        return ACCEPTS

    @numberAccepts.setter
    def numberAccepts(self, wanted: int) -> None:  # noqa: N802
        """Leave the number as it is: Twisted raises it while connections wait."""


class TurnReactor(EPollReactor):
    """`after_reads` calls functions when this turn's reads are done. Those that a timer
    asks for come after the next turn's.
    """

    def __init__(self) -> None:
        self._callbacks: deque[Callable[[], object]] = deque()
        super().__init__()  # type: ignore[no-untyped-call]  # Twisted's

    def after_reads(self, function: Callable[[], object]) -> None:
        """Call a function once. Belongs to the reactor's thread."""
        self._callbacks.append(function)

    def listenTCP(  # noqa: N802  # Twisted's
        self,
        port: int,
        factory: Any,  # noqa: ANN401  # Twisted's
        backlog: int = 50,
        interface: str = "",
    ) -> TurnPort:
        """Listen, and accept few connections a turn."""
        listening = TurnPort(port, factory, backlog, interface, self)
        listening.startListening()
        return listening

    def doPoll(self, timeout: float | None) -> None:  # noqa: N802  # Twisted's
        super().doPoll(0 if self._callbacks else timeout)  # type: ignore[no-untyped-call]  # Twisted's
        # callbacks added meanwhile wait for the next reads
        for _ in range(len(self._callbacks)):
            self._callbacks.popleft()()

    doIteration = doPoll  # noqa: N815  # Twisted's


def install() -> Any:  # noqa: ANN401  # several interfaces of Twisted's
    """Install and return this process's reactor: the broker's own, unless another one
    is installed already.
    """
    if "twisted.internet.reactor" not in sys.modules:
        installReactor(TurnReactor())
    from twisted.internet import reactor  # noqa: PLC0415  # not before it is chosen

    return reactor
