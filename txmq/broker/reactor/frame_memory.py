"""Memory and time for frames that are not complete, over all connections.

Small frames need no permission. A large one needs memory for all of it before more of
it is read, so a few large frames grow at a time, and complete. Whoever is too slow is
cut: at once when others wait for the memory, later when nobody does.

Those who share it are users, or hosts: they get memory in turn, however many
connections one has, and beyond the bound whoever holds the most loses a connection.
"""

from __future__ import annotations

from collections import Counter
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

    @property
    def owner(self) -> str: ...
    def admit_frame(self) -> None: ...
    def cut(self, why: str) -> None: ...


@dataclass(slots=True)
class _Unfinished:
    began: float
    owner: str
    held: int = 0  # bytes received
    length: int = 0  # of the whole frame, 0 = not known yet
    reserved: bool = False  # memory for all of it
    waiting: bool = False  # for that


class FrameMemory:
    """The unfinished frames of all connections."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unfinished: dict[Receiver, _Unfinished] = {}
        # of each owner, the oldest first: without memory for all of it, and those that
        # wait for that, where owners stand in their turn
        self._holding: dict[str, dict[Receiver, None]] = {}
        self._waiting: dict[str, dict[Receiver, None]] = {}
        self._held_by: Counter[str] = Counter()
        self._reserved = self._held = 0

    def update(self, receiver: Receiver, held: int, length: int) -> bool:
        """Note the state of a connection's unfinished frame. False = read no more of it
        until `admit_frame`.
        """
        frame = self._unfinished.get(receiver)
        if frame is None:
            owner = receiver.owner
            frame = self._unfinished[receiver] = _Unfinished(self._clock.seconds(), owner)
            self._holding.setdefault(owner, {})[receiver] = None
        if not frame.reserved:
            self._hold(frame.owner, held - frame.held)
        frame.held = held
        if length and not frame.length:
            frame.length = length
            if length > LARGE_FRAME:
                frame.waiting = True
                self._waiting.setdefault(frame.owner, {})[receiver] = None
                self._admit()
        if self._held > HELD_BYTES:
            self._cut_oldest(frame.owner)
        return frame.length <= LARGE_FRAME or frame.reserved

    def _hold(self, owner: str, size: int) -> None:
        """Count bytes of frames without memory for the whole, fewer if negative."""
        self._held += size
        self._held_by[owner] += size
        if not self._held_by[owner]:
            del self._held_by[owner]

    def finish(self, receiver: Receiver) -> None:
        """Forget a connection's unfinished frame: it is complete, or the connection
        lost.
        """
        frame = self._unfinished.pop(receiver, None)
        if frame is None:
            return
        if frame.waiting:
            _remove(self._waiting, frame.owner, receiver)
        if frame.reserved:
            self._reserved -= frame.length
        else:
            self._hold(frame.owner, -frame.held)
            _remove(self._holding, frame.owner, receiver)
        self._admit()

    def _admit(self) -> None:
        """Admit those that wait, as far as there is memory: of each owner the first in
        turn.
        """
        while self._waiting:
            owner, receivers = next(iter(self._waiting.items()))
            receiver = next(iter(receivers))
            frame = self._unfinished[receiver]
            if self._reserved + frame.length > LARGE_BYTES:
                return
            _remove(self._waiting, owner, receiver)
            if owner in self._waiting:  # to the end
                self._waiting[owner] = self._waiting.pop(owner)
            self._reserved += frame.length
            self._hold(owner, -frame.held)
            _remove(self._holding, owner, receiver)
            frame.reserved, frame.waiting, frame.began = True, False, self._clock.seconds()
            receiver.admit_frame()

    def tick(self) -> None:
        """Timer: cut connections whose frame takes too long."""
        for receiver in list(self._too_slow(self._clock.seconds())):
            receiver.cut("its frame takes too long")

    def _too_slow(self, now: float) -> Iterator[Receiver]:
        for receiver, frame in self._unfinished.items():
            age = now - frame.began
            if frame.waiting:
                continue
            if frame.reserved and self._waiting:
                slow = frame.held < (age - WAITED_FOR_S) * WAITED_FOR_BYTES_PER_S
            else:
                slow = age > SLOW_S + frame.length / SLOW_BYTES_PER_S
            if slow:
                yield receiver

    def _cut_oldest(self, owner: str) -> None:
        """Cut the oldest of the owner who holds more than others: that of the newest
        bytes, or else whoever holds the most.
        """
        if self._held_by[owner] * len(self._held_by) < self._held:
            owner = max(self._held_by, key=self._held_by.__getitem__)
        next(iter(self._holding[owner])).cut("too many unfinished frames")


def _remove(by_owner: dict[str, dict[Receiver, None]], owner: str, receiver: Receiver) -> None:
    receivers = by_owner[owner]
    del receivers[receiver]
    if not receivers:
        del by_owner[owner]
