"""Memory and time for frames that are not complete, over all connections.

Small frames need no permission. A large one needs memory for all of it before more of
it is read, so a few large frames grow at a time, and complete. Whoever is too slow is
cut: at once when others wait for the memory, later when nobody does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.broker.reactor.interfaces import Clock

LARGE_FRAME = 64 << 10
LARGE_BYTES = 48 << 20  # of large frames that may grow at a time
HELD_BYTES = 32 << 20  # of all other frames
# a frame's time: for a slow line, and for one beside others who wait for its memory
SLOW_S, SLOW_BYTES_PER_S = 30.0, 4 << 10
WAITED_FOR_S, WAITED_FOR_BYTES_PER_S = 2.0, 1 << 20


class Receiver(Protocol):
    """A connection that receives frames."""

    def admit_frame(self) -> None: ...
    def cut(self, why: str) -> None: ...


@dataclass(slots=True)
class _Unfinished:
    began: float
    held: int = 0  # bytes received
    length: int = 0  # of the whole frame, 0 = not known yet
    reserved: bool = False  # memory for all of it


class FrameMemory:
    """The unfinished frames of all connections."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unfinished: dict[Receiver, _Unfinished] = {}  # the oldest first
        self._waiting: dict[Receiver, None] = {}
        self._reserved = self._held = 0

    def update(self, receiver: Receiver, held: int, length: int) -> bool:
        """Note the state of a connection's unfinished frame. False = read no more of it
        until `admit_frame`.
        """
        frame = self._unfinished.get(receiver)
        if frame is None:
            frame = self._unfinished[receiver] = _Unfinished(self._clock.seconds())
        if not frame.reserved:
            self._held += held - frame.held
        frame.held = held
        if length and not frame.length:
            frame.length = length
            if length > LARGE_FRAME:
                self._waiting[receiver] = None
                self._admit()
        if self._held > HELD_BYTES:
            self._cut_oldest()
        return frame.length <= LARGE_FRAME or frame.reserved

    def finish(self, receiver: Receiver) -> None:
        """Forget a connection's unfinished frame: it is complete, or the connection
        lost.
        """
        frame = self._unfinished.pop(receiver, None)
        if frame is None:
            return
        self._waiting.pop(receiver, None)
        if frame.reserved:
            self._reserved -= frame.length
        else:
            self._held -= frame.held
        self._admit()

    def _admit(self) -> None:
        """Admit those that wait, as far as there is memory, in their order."""
        while self._waiting:
            receiver = next(iter(self._waiting))
            frame = self._unfinished[receiver]
            if self._reserved + frame.length > LARGE_BYTES:
                return
            del self._waiting[receiver]
            self._reserved += frame.length
            self._held -= frame.held
            frame.reserved, frame.began = True, self._clock.seconds()
            receiver.admit_frame()

    def tick(self) -> None:
        """Timer: cut connections whose frame takes too long."""
        for receiver in list(self._too_slow(self._clock.seconds())):
            receiver.cut("its frame takes too long")

    def _too_slow(self, now: float) -> Iterator[Receiver]:
        for receiver, frame in self._unfinished.items():
            age = now - frame.began
            if receiver in self._waiting:
                continue
            if frame.reserved and self._waiting:
                slow = frame.held < (age - WAITED_FOR_S) * WAITED_FOR_BYTES_PER_S
            else:
                slow = age > SLOW_S + frame.length / SLOW_BYTES_PER_S
            if slow:
                yield receiver

    def _cut_oldest(self) -> None:
        for receiver, frame in self._unfinished.items():
            if not frame.reserved:
                receiver.cut("too many unfinished frames")
                return
