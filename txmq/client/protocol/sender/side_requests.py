"""Requests of other kinds that travel along with sends: groups and decisions, which
share frames, and the rest, alone.

What shares a frame keeps its own answer. An errand may be made twice, so after a lost
connection all of them go out again, in whatever frames they then find themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from txmq.client.protocol.conversation import Payload, result
from txmq.client.protocol.sender.promise import Promise
from txmq.errors import StaleTopic, TxmqError
from txmq.wire.headers import Opcode
from txmq.wire.hello import Welcome
from txmq.wire.together import FEATURE, pack_requests, unpack_answers

if TYPE_CHECKING:
    from txmq.client.protocol.sender.accumulator import Accumulator

TOGETHER = {
    Opcode.GROUP: Opcode.GROUPS,
    Opcode.DECIDE: Opcode.DECISIONS,
}  # in their order of going out
MOST = 256  # in one frame
MOST_BYTES = 1 << 20  # and so many bytes; what is larger goes alone


@dataclass(slots=True)
class Errand:
    """A request; it may be made twice. `rebuild` makes its payload anew once a topic is
    known to have grown.
    """

    opcode: int
    payload: Payload
    time: float
    future: Promise[Any]
    decode: Callable[[bytes], Any] = bytes  # of the reply's payload, for the future; may refuse it
    rebuild: Callable[[], bytes] | None = None
    weight: int = 0  # of the room for messages
    settled: bool = False

    @property
    def futures(self) -> list[Promise[Any]]:
        """Its only one."""
        return [self.future]

    @property
    def unmade(self) -> bool:
        """Whether its payload is yet to be made anew."""
        return not self.payload and self.rebuild is not None

    def answers(self, payload: bytes) -> list[Any]:
        """What its future gets."""
        return [self.decode(payload)]


@dataclass(slots=True)
class Bundle:
    """Errands in one frame."""

    opcode: int
    errands: list[Errand]
    settled: bool = False

    @property
    def futures(self) -> list[Promise[Any]]:
        """Theirs, in order."""
        return [errand.future for errand in self.errands]

    @property
    def payload(self) -> Payload:
        """Of the frame."""
        return pack_requests([_whole(errand) for errand in self.errands])

    @property
    def weight(self) -> int:
        """Of all."""
        return sum(errand.weight for errand in self.errands)

    @property
    def time(self) -> float:
        """When the youngest was put in."""
        return max(errand.time for errand in self.errands)

    def answers(self, payload: bytes) -> list[Any] | None:
        """What their futures get; None where some are refused."""
        answers = unpack_answers(payload, len(self.errands))
        try:
            return [
                errand.decode(result(answer))
                for errand, answer in zip(self.errands, answers, strict=True)
            ]
        except TxmqError:
            return None


class Errands:
    """Those of an outbox that have been taken and are not under way. `stale` are topics
    to be asked about first.
    """

    def __init__(self, outbox: Accumulator, stale: set[str]) -> None:
        self._outbox, self._stale = outbox, stale
        self._waiting: list[Errand] = []

    def take(self, welcome: Welcome | None) -> list[Errand | Bundle]:
        """What may go out now, in frames as this broker takes them."""
        found, self._waiting = [*self._waiting, *self._outbox.take_errands(ripe=True)], []
        if not found:
            return []
        ready: list[Errand] = []
        for errand in found:
            if not errand.unmade or (not self._stale and self._made(errand)):
                ready.append(errand)
            elif not errand.settled:
                self._waiting.append(errand)
        return _frames(ready, together=welcome is not None and FEATURE in welcome.features)

    def _made(self, errand: Errand) -> bool:
        """Makes the payload anew; one that cannot be fails."""
        assert errand.rebuild is not None, "unmade, so it can be made"
        try:
            errand.payload = errand.rebuild()
        except TxmqError as error:
            self._outbox.failed(errand, error)
        return not errand.unmade

    def back(self, lost: Iterable[Errand | Bundle]) -> None:
        """The connection was lost: they go out again."""
        for errand in lost:
            self._waiting += errand.errands if isinstance(errand, Bundle) else [errand]

    def sort_out(self, bundle: Bundle, payload: bytes) -> None:
        """Some of a bundle are refused: each gets its own answer."""
        for errand, answer in zip(bundle.errands, unpack_answers(payload), strict=True):
            try:
                decoded = errand.decode(result(answer))
            except TxmqError as error:
                self.refused(errand, error)
            else:
                self._outbox.answered(errand, [decoded], alone=False)

    def refused(self, errand: Errand | Bundle, error: TxmqError) -> None:
        """Fails it; or has it made anew, if that is all it takes: a group that was
        refused is not there.
        """
        if (
            isinstance(errand, Errand)
            and isinstance(error, StaleTopic)
            and errand.rebuild is not None
        ):
            self._stale.add(str(error.detail.get("topic", "")))
            errand.payload = b""
            self._waiting.append(errand)
        else:
            self._outbox.failed(errand, error)

    def take_late(self, before: float) -> list[Errand]:
        """Those that were put in before that moment."""
        if self._outbox.has_older(before):
            self._waiting += self._outbox.take_errands()
        late = [errand for errand in self._waiting if errand.time < before]
        self._waiting = [errand for errand in self._waiting if errand.time >= before]
        return late

    def take_all(self) -> list[Errand]:
        """Every one that is not under way."""
        found, self._waiting = [*self._waiting, *self._outbox.take_errands()], []
        return found


def _whole(errand: Errand) -> bytes:
    payload = errand.payload
    return payload if isinstance(payload, bytes) else b"".join(payload)


def _frames(errands: Sequence[Errand], *, together: bool) -> list[Errand | Bundle]:
    """Those that may share frames do, as far as they are small enough; groups go before
    decisions.
    """
    frames: list[Errand | Bundle] = []
    shared: dict[int, list[Errand]] = {opcode: [] for opcode in TOGETHER}
    for errand in errands:
        small = together and errand.weight <= MOST_BYTES
        (shared[errand.opcode] if small and errand.opcode in shared else frames).append(errand)
    for opcode, those in shared.items():
        frames += _cut(TOGETHER[Opcode(opcode)], those)
    return frames


def _cut(opcode: int, errands: list[Errand]) -> Iterable[Errand | Bundle]:
    start = size = 0
    for at, errand in enumerate(errands):
        if at > start and (size + errand.weight > MOST_BYTES or at - start == MOST):
            yield _one(opcode, errands[start:at])
            start, size = at, 0
        size += errand.weight
    if errands:
        yield _one(opcode, errands[start:])


def _one(opcode: int, errands: list[Errand]) -> Errand | Bundle:
    return errands[0] if len(errands) == 1 else Bundle(opcode, errands)
