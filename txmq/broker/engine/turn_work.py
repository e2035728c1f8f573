"""Long reads for replies: a few milliseconds in each turn of the reactor.

A read is a generator that yields often and returns the reply. Readers take turns: the
connections, and the users of the console. So one with a thousand long reads delays
another by one step only.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.engine.engine import Engine, Requester
    from txmq.broker.reactor.interfaces import Clock, Timer
    from txmq.core.steps import Steps

TURN_S = 0.002
STEP_S = 0.001  # of one reader, before the next one's


class _Read(NamedTuple):
    steps: Steps[Any]
    answer: Callable[[Any], None]
    requester: Requester


class TurnWork:
    """Carries out long reads. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._reads: dict[object, deque[_Read]] = {}  # by reader
        self._timer: Timer | None = None

    def run(self, reader: object, steps: Steps[Any], answer: Callable[[Any], None]) -> None:
        """Answer with what `steps` returns, once all that it rests on is durable. A
        short read is answered at once.
        """
        read = _Read(steps, answer, self._engine.requester)
        self._reads.setdefault(reader, deque()).append(read)
        if self._timer is None:
            self._work()

    def _work(self) -> None:
        self._timer = None
        until = self._clock.seconds() + TURN_S
        while self._reads:
            reader = next(iter(self._reads))
            reads = self._reads.pop(reader)
            self._advance(reads)
            if reads:
                self._reads[reader] = reads  # behind the others
            if self._reads and self._clock.seconds() >= until:
                self._timer = self._clock.callLater(0, self._work)
                return

    def _advance(self, reads: deque[_Read]) -> None:
        """Advance the first read of a reader by a step."""
        read = reads[0]
        ended = self._engine.carry_out(read.requester, self._step, read)
        if ended is not False:
            reads.popleft()

    def _step(self, read: _Read) -> bool:
        until = self._clock.seconds() + STEP_S
        try:
            while True:
                next(read.steps)
                if self._clock.seconds() >= until:
                    return False
        except StopIteration as end:
            self._engine.answer_when_durable(read.answer, end.value)
        except RequestRejected as refused:
            self._engine.answer_when_durable(read.answer, refused)
        return True
