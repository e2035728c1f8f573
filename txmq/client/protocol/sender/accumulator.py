"""Messages and other requests that wait to be sent, with the futures of their replies.

Messages gather in one batch for each partition, until the sender drains all of them.
The accumulator is bounded: a caller waits while the window is full.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Lock, RLock, get_ident
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from txmq.client.protocol.conversation import Payload, client_closed
from txmq.client.protocol.sender.promise import FutureKind, Promise, PromiseContext, Promises
from txmq.client.protocol.sender.rows import estimated_size, frozen_with_size
from txmq.client.protocol.sender.topics import TopicCache
from txmq.errors import Throttled, TxmqError
from txmq.model.causation import current_cause, with_cause
from txmq.model.measures import counted
from txmq.model.message import Message, Receipt
from txmq.wire.data_requests import Opcode

T = TypeVar("T")
MAX_THRESHOLD = 256  # messages that are always worth a frame
IN_TURN = -1  # the partition of messages without a key, until they are sent
UNROUTED = -2  # of messages of a topic that is not known yet, of a client with a spool
# Requests that share a frame, and the opcodes of that frame, in the order of sending.
COMBINED_OPCODES = {Opcode.GROUP: Opcode.GROUPS, Opcode.DECIDE: Opcode.DECISIONS}


class Destination(NamedTuple):
    """The partition of a batch, chosen with the topic's metadata of that epoch.

    `explicit`: the caller named the partition.
    """

    topic: str
    partition: int
    epoch: int
    explicit: bool


@dataclass(slots=True)
class PendingBatch:
    """Messages for one destination, in order.

    Each has the time of its birth, the time at which it was appended, and its future.
    """

    destination: Destination
    messages: list[Message] = field(default_factory=list)
    births: list[int] = field(default_factory=list)
    append_times: list[float] = field(default_factory=list)
    futures: list[Promise[Receipt]] = field(default_factory=list)
    size: int = 0
    released: bool = False

    def slice_rows(self, start: int, end: int) -> PendingBatch:
        """Return the messages from `start` to before `end`."""
        messages = self.messages[start:end]
        return PendingBatch(
            self.destination,
            messages,
            self.births[start:end],
            self.append_times[start:end],
            self.futures[start:end],
            sum(map(estimated_size, messages)),
        )

    def drop_row(self, at: int) -> int:
        """Remove a message, and return its size."""
        size = estimated_size(self.messages[at])
        self.size -= size
        for column in (self.messages, self.births, self.append_times, self.futures):
            del column[at]
        return size

    def select_rows(self, destination: Destination, places: Sequence[int]) -> PendingBatch:
        """Return the messages at these places, for another destination."""
        messages = [self.messages[at] for at in places]
        return PendingBatch(
            destination,
            messages,
            [self.births[at] for at in places],
            [self.append_times[at] for at in places],
            [self.futures[at] for at in places],
            sum(map(estimated_size, messages)),
        )


@dataclass(slots=True)
class SideRequest(Generic[T]):
    """A request of another kind, which may be repeated: a repetition must do no harm.

    `decode` makes the future's result of the reply's payload, or raises. `rebuild`
    encodes the payload again once the metadata of a topic has changed.
    """

    opcode: int
    payload: Payload
    decode: Callable[[bytes], T] = bytes  # type: ignore[assignment]  # mypy takes no default for a variable type
    rebuild: Callable[[], bytes] | None = None
    appended_at: float = 0.0
    future: Promise[Any] = field(init=False)  # from `append_request` on
    size: int = 0  # bytes that the request occupies in the window
    released: bool = False
    throttled: Throttled | None = None  # why the broker has not taken it

    @property
    def futures(self) -> list[Promise[Any]]:
        return [self.future]

    @property
    def needs_rebuild(self) -> bool:
        """True while the payload waits to be encoded again."""
        return not self.payload and self.rebuild is not None

    def answers(self, payload: bytes) -> list[Any]:
        """Return the result of its future."""
        return [self.decode(payload)]


class Accepted(Protocol):
    """Anything drained that occupies the window until it is released."""

    released: bool

    @property
    def futures(self) -> list[Promise[Any]]: ...
    @property
    def size(self) -> int: ...


class Accumulator:
    """The link between the callers' threads and the thread that drains it.

    `wake` is called for a new entry while that thread sleeps.
    """

    def __init__(
        self,
        topics: TopicCache,
        *,
        messages: int,
        size: int,
        wake: Callable[[], None],
        futures: FutureKind | None = None,
    ) -> None:
        """`futures`: their kind where they are no promises."""
        self._topics = topics
        self._max_messages, self._max_bytes = messages, size
        self._wake = wake
        self._lock = Lock()
        # A lock of its own would cost each message half a microsecond.
        self._changed = Condition(self._lock)
        self.promises = PromiseContext(RLock(), self.expedite)
        self._futures = futures or Promises(self.promises)
        self._promise = self._futures.create
        self._batches: dict[tuple[str, int, int, bool], PendingBatch] = {}  # by destination
        self._requests: list[SideRequest[Any]] = []
        self._combinable: list[SideRequest[Any]] = []  # those that share frames
        self._messages = self._bytes = 0  # in the window
        self._waiting = 0  # callers that wait for room or for a flush
        self._pending = 0  # messages in batches, and combinable requests
        self._threshold = 1  # the number of pending entries that is worth a frame
        self._asleep = False
        self._closed: TxmqError | None = None
        self.draining_thread = 0  # it must not wait for room that only it can make

    def append(
        self, topic: str, message: Message, partition: int | None, timeout: float
    ) -> Promise[Receipt]:
        """Append a message and return the future of its receipt.

        Raises Throttled where the window stays full for `timeout` seconds,
        ClientClosed, and the errors of a send for an invalid message.
        """
        if current_cause.get() is not None:
            message = with_cause(message)
        message, size = frozen_with_size(message)
        destination = self._destination(topic, message[1], partition)
        born_at, now = time.time_ns() // 1_000, time.monotonic()
        future: Promise[Receipt] = self._promise()
        with self._lock:
            if (
                self._messages >= self._max_messages
                or self._bytes >= self._max_bytes
                or self._closed
            ):
                self._wait_for_room(now + timeout)
            batch = self._batches.get(destination)
            if batch is None:
                batch = self._batches[destination] = PendingBatch(Destination(*destination))
            batch.messages.append(message)
            batch.births.append(born_at)
            batch.append_times.append(now)
            batch.futures.append(future)
            batch.size += size
            self._messages += 1
            self._bytes += size
            self._pending += 1
            if wake := self._asleep and self._pending >= self._threshold:
                self._asleep = False
        if wake:
            self._wake()
        return future

    def append_request(self, request: SideRequest[T], timeout: float | None = None) -> Future[T]:
        """Append a request of another kind and return the future of its decoded reply.

        With a `timeout` it occupies the window as a message does, and raises as
        `append`.
        """
        request.appended_at = now = time.monotonic()
        request.future = self._promise()
        request.size = size = 0 if timeout is None else len(request.payload)
        with self._lock:
            if timeout is not None and (
                self._messages >= self._max_messages or self._bytes >= self._max_bytes
            ):
                self._wait_for_room(now + timeout)
            if self._closed:
                raise self._closed
            self._messages += 1
            self._bytes += size
            if request.opcode in COMBINED_OPCODES:
                self._combinable.append(request)
                self._pending += 1
                wake = self._asleep and self._pending >= self._threshold
            else:
                self._requests.append(request)
                wake = self._asleep
            if wake:
                self._asleep = False
        if wake:
            self._wake()
        return request.future

    def drain(self, *, ready_only: bool = False) -> list[PendingBatch]:
        """Return all batches; callers begin new ones.

        With `ready_only`, return none while too few messages are pending.
        """
        with self._lock:
            if ready_only and self._pending < self._threshold:
                return []
            batches, self._batches = list(self._batches.values()), {}
            self._pending = len(self._combinable)
            self._threshold = self._next_threshold() if ready_only else 1
        return batches

    def _next_threshold(self) -> int:
        """Return how many messages are worth the next frame.

        That is half of those without a receipt, so that two frames are in flight. It
        falls by at most a quarter, because many receipts may just have come. It is 1
        while a caller waits for room.
        """
        if self._waiting or self._closed:
            return 1
        return min(max(1, self._messages // 2, self._threshold * 3 // 4), MAX_THRESHOLD)

    def expedite(self) -> None:
        """Have pending messages sent now, however few, because a caller waits."""
        if self._pending:
            self.stop_lingering()

    def expedite_silently(self) -> None:
        """Do the same without waking the sender: the caller sends them itself."""
        if self._pending:
            self._threshold = 1

    def stop_lingering(self) -> None:
        """Have pending messages sent now, and the next message as soon as it comes.

        This takes no lock, because promises are observed anywhere, even by a signal
        handler. At worst the sender does not notice, and calls this itself a moment
        later.
        """
        self._threshold = 1
        if self._pending and self._asleep:
            self._asleep = False
            self._wake()

    @property
    def lingering(self) -> bool:
        """True while messages wait for others to share a frame with."""
        return self._threshold > 1

    def drain_requests(self, *, ready_only: bool = False) -> list[SideRequest[Any]]:
        """Return all side requests.

        With `ready_only`, leave out combinable ones while too few entries are pending.
        """
        # Without the lock: a caller wakes the sender after appending to either list.
        if not (self._requests or self._combinable):
            return []
        with self._lock:
            requests, self._requests = self._requests, []
            if self._combinable and not (ready_only and self._pending < self._threshold):
                requests += self._combinable
                self._pending -= len(self._combinable)
                self._combinable = []
                # Messages that were ready go out with this frame.
                self._threshold = 1 if self._pending or not ready_only else self._next_threshold()
        return requests

    def has_older(self, before: float) -> bool:
        """Return whether anything was appended before that moment."""
        with self._lock:
            return any(batch.append_times[0] < before for batch in self._batches.values()) or any(
                request.appended_at < before for request in (*self._requests, *self._combinable)
            )

    def sleep_if_idle(self, *, can_send: bool) -> bool:
        """Let the sender sleep if there is nothing to send, and return whether it may.

        The next entry then calls `wake`. `can_send`: batches could go out now.
        """
        with self._lock:
            ready = self._pending >= self._threshold and (can_send or bool(self._combinable))
            self._asleep = not (self._requests or ready)
        return self._asleep

    def complete(
        self, entry: Accepted, answers: Sequence[Any], *, unobserved_only: bool = False
    ) -> bool:
        """Give the futures of an entry their answers, and return whether that is done.

        See `resolve_promises` for `unobserved_only`.
        """
        if not unobserved_only:  # before the callbacks, which may append messages
            self._release(entry)
        done = self._futures.resolve(entry.futures, answers, unobserved_only=unobserved_only)
        if done:
            self._release(entry)
        return done

    def fail(self, entry: Accepted, error: TxmqError) -> None:
        """Fail the futures of an entry."""
        self._release(entry)
        self._futures.fail(entry.futures, error)

    def withdraw(self, future: object) -> bool:
        """Take a message back; return False where it has been drained."""
        with self._lock:
            for destination, batch in self._batches.items():
                if future in batch.futures:
                    self._forget(batch.drop_row(batch.futures.index(future)))
                    self._pending -= 1
                    if not batch.futures:
                        del self._batches[destination]
                    return True
        return False

    def forget(self, size: int) -> None:
        """Free the room of a drained message that was taken back."""
        with self._lock:
            self._forget(size)

    def _forget(self, size: int) -> None:
        self._messages -= 1
        self._bytes -= size

    def _release(self, entry: Accepted) -> None:
        """Free an entry's room, once: it comes here again after an interrupt."""
        count, size = len(entry.futures), entry.size
        with self._lock:
            if entry.released:
                return
            entry.released = True
            self._messages -= count
            self._bytes -= size
            if self._waiting:
                self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until every entry has its answer. Return False after `timeout`
        seconds.
        """
        with self._lock:
            self._waiting += 1
            self.expedite()
            try:
                return self._changed.wait_for(lambda: not self._messages, timeout)
            finally:
                self._waiting -= 1

    def close(self, refusal: TxmqError | None = None) -> None:
        """Refuse new entries, and have the pending ones sent."""
        with self._lock:
            self._closed = self._closed or refusal or client_closed()
            self.expedite()
            self._changed.notify_all()

    @property
    def empty(self) -> bool:
        """True where every entry has its answer."""
        return not self._messages

    @property
    def full(self) -> bool:
        """True where a caller would have to wait for room."""
        return self._messages >= self._max_messages or self._bytes >= self._max_bytes

    @property
    def unanswered(self) -> int:
        """The number of entries without an answer."""
        return self._messages

    def _destination(
        self, topic: str, key: str | None, partition: int | None
    ) -> tuple[str, int, int, bool]:
        """Return the fields of a Destination; most messages find their batch with
        them.
        """
        topics = self._topics
        metadata = topics.for_send(topic)
        if partition is None and not key and not topics.has_partitioner:
            return topic, IN_TURN, metadata.epoch, False
        chosen = topics.choose_partition(metadata, key, partition)
        return topic, chosen, metadata.epoch, partition is not None

    def _wait_for_room(self, deadline: float) -> None:
        if get_ident() == self.draining_thread:  # in a callback of a future
            return
        self._waiting += 1
        self.expedite()
        try:
            while not self._closed and (
                self._messages >= self._max_messages or self._bytes >= self._max_bytes
            ):
                if not self._changed.wait(deadline - time.monotonic()):
                    raise Throttled(
                        f"{counted(self._messages, 'message')} without a receipt",
                        hint="wait for receipts before sending on, or raise `window`",
                    )
        finally:
            self._waiting -= 1
        if self._closed:
            raise self._closed
