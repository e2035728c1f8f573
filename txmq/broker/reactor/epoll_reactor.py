"""The broker's reactor: Twisted's on epoll, which also says when a turn has read all
there was to read.

What came together is then written and answered together, at once. A timer of no seconds
would do the same, for the price of the timer and of another turn: with a frame each
turn, that was a tenth of the broker's work.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from twisted.internet.epollreactor import EPollReactor
from twisted.internet.main import installReactor

if TYPE_CHECKING:
    from collections.abc import Callable


class TurnReactor(EPollReactor):
    """`soon` calls functions when this turn's reads are done, those that a timer asks
    for after the next.
    """

    def __init__(self) -> None:
        self._after: deque[Callable[[], object]] = deque()
        super().__init__()  # type: ignore[no-untyped-call]  # Twisted's

    def soon(self, function: Callable[[], object]) -> None:
        """Call it once, in the reactor's thread, which is the only one that may ask for
        it.
        """
        self._after.append(function)

    def doPoll(self, timeout: float | None) -> None:  # Twisted's
        super().doPoll(0 if self._after else timeout)  # type: ignore[no-untyped-call]  # Twisted's
        for _ in range(len(self._after)):  # no more: what they ask for comes after the next reads
            self._after.popleft()()

    doIteration = doPoll  # Twisted's


def install() -> Any:  # several interfaces of Twisted's
    """The reactor of this process, which is the broker's own unless another was chosen
    before.
    """
    if "twisted.internet.reactor" not in sys.modules:
        installReactor(TurnReactor())
    from twisted.internet import reactor  # not before it is chosen

    return reactor
