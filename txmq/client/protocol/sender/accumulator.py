"""Where messages pile up, per partition, until the pipeline takes them: as many as came
during its previous write.

Bounded: who puts in more than the window holds waits until receipts have come for some
of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Lock, RLock, get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from txmq.client.blocking.connections.pool import closed
from txmq.client.protocol.conversation import Payload
from txmq.client.protocol.sender.promise import Guard, Promise, fail, promises, resolve
from txmq.client.protocol.sender.rows import taken, weight
from txmq.client.protocol.sender.side_requests import TOGETHER, Bundle, Errand
from txmq.client.protocol.sender.topics import Topics
from txmq.errors import Throttled, TxmqError
from txmq.model.message import Message, Receipt

if TYPE_CHECKING:
    from txmq.client.protocol.sender.multi_send import Convoy

T = TypeVar("T")
MOST_RIPE = 256  # messages that are worth a frame, whatever else may come
IN_TURN = -1  # stands for the partition of messages without a key until they go out


class Place(NamedTuple):
    """Where messages shall go, chosen by the topic's shape of that epoch; `asked` = the
    caller named the partition.
    """

    topic: str
    partition: int
    epoch: int
    asked: bool


@dataclass(slots=True)
class PendingBatch:
    """Messages for one place, in order; with each its time of birth, when it was put
    in, and its future.
    """

    place: Place
    messages: list[Message] = field(default_factory=list)
    births: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    futures: list[Promise[Receipt]] = field(default_factory=list)
    weight: int = 0
    settled: bool = False

    def slice_rows(self, start: int, end: int) -> PendingBatch:
        """The messages from `start` up to, not including, `end`."""
        messages = self.messages[start:end]
        columns = (self.births[start:end], self.times[start:end], self.futures[start:end])
        return PendingBatch(self.place, messages, *columns, weight=sum(map(weight, messages)))

    def pick(self, place: Place, places: Sequence[int]) -> PendingBatch:
        """The messages at these places, to go to `place`."""
        messages = [self.messages[at] for at in places]
        births, times = [self.births[at] for at in places], [self.times[at] for at in places]
        futures = [self.futures[at] for at in places]
        return PendingBatch(place, messages, births, times, futures, sum(map(weight, messages)))


class Accumulator:
    """Between the callers' threads and the pipeline's. `wake` is called when something
    comes while that one sleeps.
    """

    def __init__(
        self, topics: Topics, *, messages: int, size: int, wake: Callable[[], None]
    ) -> None:
        self._topics = topics
        self._most_messages, self._most_bytes = messages, size
        self._wake = wake
        self._lock = Lock()
        self._changed = Condition(
            self._lock
        )  # a lock of its own would cost each message half a microsecond
        self.guard = Guard(RLock(), self.hurry)  # of all promises
        self._promise = promises(self.guard)
        self._piles: dict[tuple[str, int, int, bool], PendingBatch] = {}  # by their places
        self._errands: list[Errand] = []
        self._shared: list[Errand] = []  # of those that share frames
        self._messages = self._bytes = self._waiting = 0
        self._piled, self._ripe = (
            0,
            1,
        )  # in piles and to be shared, and how many of them are worth a frame
        self._asleep = False
        self._closed: TxmqError | None = None
        self.reader = 0  # the thread that takes: it must not wait for itself

    def put(
        self, topic: str, message: Message, partition: int | None, timeout: float
    ) -> Promise[Receipt]:
        """Takes a message in; its future gets the receipt.

        Raises Throttled where the window stays full for `timeout` seconds,
        ClientClosed, and what a send raises for a message that cannot be.
        """
        message, size = taken(message)
        place = self._place(topic, message[1], partition)
        born_at, now = time.time_ns() // 1_000, time.monotonic()
        future: Promise[Receipt] = self._promise()
        with self._lock:
            if (
                self._messages >= self._most_messages
                or self._bytes >= self._most_bytes
                or self._closed
            ):
                self._wait_for_room(now + timeout)
            pile = self._piles.get(place)
            if pile is None:
                pile = self._piles[place] = PendingBatch(Place(*place))
            pile.messages.append(message)
            pile.births.append(born_at)
            pile.times.append(now)
            pile.futures.append(future)
            pile.weight += size
            self._messages += 1
            self._bytes += size
            self._piled += 1
            if wake := self._asleep and self._piled >= self._ripe:
                self._asleep = False
        if wake:
            self._wake()
        return future

    def carry(
        self,
        opcode: int,
        payload: Payload,
        decode: Callable[[bytes], T] = bytes,  # type: ignore[assignment]  # mypy takes no default for a variable type
        rebuild: Callable[[], bytes] | None = None,
        timeout: float | None = None,
    ) -> Future[T]:
        """Takes a request of another kind along; it is made again after a lost
        connection, so it must bear that.

        Its future gets what `decode` makes of the reply. With a `timeout` it takes room
        as a message does, and raises as `put`; `rebuild` gives its payload anew where a
        topic has grown.
        """
        now = time.monotonic()
        size = 0 if timeout is None else len(payload)
        errand = Errand(opcode, payload, now, self._promise(), decode, rebuild, size)
        with self._lock:
            if timeout is not None and (
                self._messages >= self._most_messages or self._bytes >= self._most_bytes
            ):
                self._wait_for_room(now + timeout)
            if self._closed:
                raise self._closed
            self._messages += 1
            self._bytes += size
            if opcode in TOGETHER:
                self._shared.append(errand)
                self._piled += 1
                wake = self._asleep and self._piled >= self._ripe
            else:
                self._errands.append(errand)
                wake = self._asleep
            if wake:
                self._asleep = False
        if wake:
            self._wake()
        return errand.future

    def take_piles(self, *, ripe: bool = False) -> list[PendingBatch]:
        """Every message that is there; callers begin new piles. `ripe`: to be sent now,
        unless they are too few.
        """
        with self._lock:
            if ripe and self._piled < self._ripe:
                return []
            piles, self._piles, self._piled = list(self._piles.values()), {}, len(self._shared)
            self._ripe = self._next_ripe() if ripe else 1
        return piles

    def _next_ripe(self) -> int:
        """How many are worth the next frame: half of what has no answer, but not where
        more is waited for.
        """
        if self._waiting or self._closed:
            return 1
        return min(
            max(1, self._messages // 2, self._ripe * 3 // 4), MOST_RIPE
        )  # many may just have been answered

    def hurry(self) -> None:
        """Somebody waits: what is there shall go out, however little."""
        if self._piled:
            self.expect_no_more()

    def ripen(self) -> None:
        """As `hurry`, by who will see to it himself."""
        if self._piled:
            self._ripe = 1

    def expect_no_more(self) -> None:
        """What is there shall go out, and so shall the next message, at once.

        Without the lock, because promises are looked at anywhere, even by a handler of
        signals. In the worst case the pipeline does not notice, and calls this itself a
        moment later.
        """
        self._ripe = 1
        if self._piled and self._asleep:
            self._asleep = False
            self._wake()

    @property
    def expectant(self) -> bool:
        """Whether more is waited for before anything goes out."""
        return self._ripe > 1

    def take_errands(self, *, ripe: bool = False) -> list[Errand]:
        """Every other request that is there; `ripe`: without those that may share a
        frame, while they are too few.
        """
        if not (
            self._errands or self._shared
        ):  # without the lock: whoever puts one in looks whether to wake
            return []
        with self._lock:
            errands, self._errands = self._errands, []
            if self._shared and not (ripe and self._piled < self._ripe):
                errands += self._shared
                self._piled -= len(self._shared)
                self._shared = []
                self._ripe = (
                    1 if self._piled or not ripe else self._next_ripe()
                )  # piles that were ripe go now, too
        return errands

    def has_older(self, before: float) -> bool:
        """Whether something was put in before that moment."""
        with self._lock:
            piles = any(pile.times[0] < before for pile in self._piles.values())
            return piles or any(errand.time < before for errand in (*self._errands, *self._shared))

    def sleep(self, *, messages_too: bool) -> bool:
        """Whether there is nothing to take, of what can be sent now; then the next
        thing put in calls `wake`.
        """
        with self._lock:
            ripe = self._piled >= self._ripe and (messages_too or bool(self._shared))
            self._asleep = not (self._errands or ripe)
        return self._asleep

    def answered(
        self, what: PendingBatch | Convoy | Errand | Bundle, answers: Sequence[Any], *, alone: bool
    ) -> bool:
        """The answers to what was taken are there; `alone` as for `resolve`. Whether
        all is done.
        """
        if not alone:  # first of all there is room, for callbacks to send more
            self._settle(what)
        done = resolve(self.guard, what.futures, answers, alone=alone)
        if done:
            self._settle(what)
        return done

    def failed(self, what: PendingBatch | Convoy | Errand | Bundle, error: TxmqError) -> None:
        """There will be no answers."""
        self._settle(what)
        fail(self.guard, what.futures, error)

    def _settle(self, what: PendingBatch | Convoy | Errand | Bundle) -> None:
        """It takes no more room. Not twice: an interrupt may make somebody else begin
        anew.
        """
        count, size = len(what.futures), what.weight
        with self._lock:
            if what.settled:
                return
            what.settled = True
            self._messages -= count
            self._bytes -= size
            if self._waiting:
                self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Waits until everything is done with; whether it is."""
        with self._lock:
            self._waiting += 1
            self.hurry()
            try:
                return self._changed.wait_for(lambda: not self._messages, timeout)
            finally:
                self._waiting -= 1

    def close(self) -> None:
        """Takes nothing more in."""
        with self._lock:
            self._closed = closed()
            self.hurry()
            self._changed.notify_all()

    @property
    def empty(self) -> bool:
        """Whether everything is done with."""
        return not self._messages

    def _place(
        self, topic: str, key: str | None, partition: int | None
    ) -> tuple[str, int, int, bool]:
        """What a Place is made of: most messages find their pile there already."""
        topics = self._topics
        shape = topics.shape(topic)
        if partition is None and not key and not topics.asks_user:
            return topic, IN_TURN, shape.epoch, False
        return topic, topics.choose(shape, key, partition), shape.epoch, partition is not None

    def _wait_for_room(self, deadline: float) -> None:
        if get_ident() == self.reader:  # a future's callback: only its return makes room
            return
        self._waiting += 1
        self.hurry()
        try:
            while not self._closed and (
                self._messages >= self._most_messages or self._bytes >= self._most_bytes
            ):
                if not self._changed.wait(deadline - time.monotonic()):
                    hint = "wait for receipts before sending on, or raise `window`"
                    raise Throttled(f"{self._messages} messages wait for their receipts", hint=hint)
        finally:
            self._waiting -= 1
        if self._closed:
            raise self._closed
