"""Requests in flight: sent, and kept until their replies are there.

The sequences of a producer session have no gaps. A broker that refuses a batch
therefore refuses all later ones, too. The sender then awaits all replies, and sends the
refused batches again in order:

- unchanged, where an earlier attempt may have stored the first of them: its sequence
  shows the broker the repetition;
- under a new session otherwise, because then none of them is stored.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from txmq.client.protocol.conversation import Conversation, reply_payload
from txmq.client.protocol.sender.accumulator import (
    IN_TURN,
    Accumulator,
    PendingBatch,
    SideRequest,
)
from txmq.client.protocol.sender.batcher import Batcher, SequencedBatch
from txmq.client.protocol.sender.batches import (
    DEFINITELY_NOT_STORED,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
)
from txmq.client.protocol.sender.multi_send import (
    SenderStats,
    SendQueue,
    SendRequest,
    batch_receipts,
)
from txmq.client.protocol.sender.rows import BATCH_BYTES, estimated_size
from txmq.client.protocol.sender.side_requests import CombinedRequest, SideRequestQueue
from txmq.client.protocol.sender.topics import TopicCache
from txmq.errors import (
    BrokerUnavailable,
    ConnectionLost,
    RequestTimeout,
    SequenceGap,
    StaleTopic,
    Throttled,
    TxmqError,
    UnknownProducer,
    UnknownTopic,
)
from txmq.wire.frames import Frame

MAX_BATCHES_IN_FLIGHT = 256  # the broker remembers the receipts of so many
WRITE_BYTES = 1 << 20  # of one write; the next frames fill up meanwhile
EMPTY_BATCH_BYTES = 128
SLOW_RECEIPT_S = 1.0  # since a message was appended; batches are small then
InFlightRequest = SendRequest | SideRequest[Any] | CombinedRequest


class InFlightRequests:
    """The sender's protocol: requests from an accumulator out, replies in.

    For one thread at a time.
    """

    def __init__(self, topics: TopicCache, accumulator: Accumulator) -> None:
        self._topics, self._accumulator = topics, accumulator
        self.stats = SenderStats()
        self.stale_topics: set[str] = set()  # to be refreshed before anything more is sent
        self.paused_until = 0.0  # the broker asked for a pause
        self._throttled: Throttled | None = None  # why, until something is stored
        self.held = False  # batches wait for those of a spool
        self._pause = FIRST_PAUSE_S
        self._batcher = Batcher(topics, self._fail)
        self._side_requests = SideRequestQueue(accumulator, self.stale_topics)
        self._send_queue = SendQueue(self._batcher, accumulator, self.stats)
        self._requests: dict[int, InFlightRequest] = {}  # by correlation
        self._batches = 0  # in them
        self._refused: list[SequencedBatch] = []
        self.deferred_replies: list[Frame] = []  # left to the sender's own thread

    @property
    def awaits_replies(self) -> bool:
        """True while any request is in flight."""
        return bool(self._requests)

    @property
    def can_send(self) -> bool:
        """True where more batches may be sent now."""
        return (
            not (self._refused or self.stale_topics or self.held)
            and self._batches < MAX_BATCHES_IN_FLIGHT
            and time.monotonic() >= self.paused_until
        )

    @property
    def has_more(self) -> bool:
        """True where a drained batch may be sent now."""
        if self.can_send and not self._send_queue.empty:
            return True
        return self._side_requests.has_throttled and not self.paused_s

    def pause(self, throttled: Throttled | None = None) -> None:
        """Send nothing for a while, longer each time until a receipt comes, and as long
        as a broker asks that has too much to do.
        """
        pause = self._pause
        if throttled is not None:
            self._throttled, pause = throttled, max(pause, throttled.retry_after_s)
        self.paused_until = time.monotonic() + pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    @property
    def paused_s(self) -> float:
        """The seconds that are left of a pause."""
        return max(0.0, self.paused_until - time.monotonic())

    def next_writes(self, conversation: Conversation) -> list[bytes]:
        """Return the bytes to write next, about as many as one write takes."""
        writes: list[bytes] = []
        paused = self._throttled is not None and self.paused_s > 0
        for side in self._side_requests.drain(stores=not paused):
            self._add(conversation, side, writes)
        size = 0
        while (
            size < WRITE_BYTES
            and self.can_send
            and (
                request := self._send_queue.next(
                    conversation, MAX_BATCHES_IN_FLIGHT - self._batches
                )
            )
        ):
            self._add(conversation, request, writes)
            size += request.size
        return writes

    def _add(
        self, conversation: Conversation, request: InFlightRequest, writes: list[bytes]
    ) -> None:
        try:
            correlation, own = conversation.request(request.opcode, request.payload)
        except TxmqError as error:  # a side request too large for a frame; batches are split
            self._fail(request, error)
            return
        except BaseException:
            if isinstance(request, SendRequest):  # an interrupt must not lose it
                self._send_queue.requeue(request.batches)
            raise
        self._requests[correlation] = request
        if isinstance(request, SendRequest):
            self._batches += len(request.batches)
        elif isinstance(request, CombinedRequest):
            self.stats.bundles += 1
            self.stats.requests += len(request.requests)
        writes += own

    def withdraw(self, future: object) -> bool:
        """Take a message back that certainly is not stored; return False for others."""
        if self._accumulator.withdraw(future):
            return True
        for pending in self._batcher.queue:
            if future in pending.futures:
                row = pending.futures.index(future)
                self._accumulator.forget(pending.drop_row(row))
                if not pending.futures:
                    self._batcher.queue.remove(pending)
                return True
        return False

    def receive(self, replies: Iterable[Frame]) -> None:
        """Handle the deferred replies, and then these."""
        deferred, self.deferred_replies = self.deferred_replies, []
        for reply in (*deferred, *replies):
            self._handle_reply(reply)
        if self._refused and not self._batches:
            self._retry_refused()

    def receive_for_caller(self, replies: Iterable[Frame]) -> bool:
        """Handle replies on the thread of a caller that waits, and return whether all
        are done.

        The first refusal, or an observed promise, defers the remaining replies to
        `receive`.
        """
        for reply in replies:
            if self.deferred_replies or not self._handle_reply(reply, for_caller=True):
                self.deferred_replies.append(reply)
        return not self.owes_work

    @property
    def owes_work(self) -> bool:
        """True where `receive` has something to do, also without further replies."""
        return bool(self.deferred_replies or (self._refused and not self._batches))

    def _handle_reply(self, reply: Frame, *, for_caller: bool = False) -> bool:
        """Complete a request. With `for_caller`, return False where that has to be
        deferred.
        """
        request = self._requests.get(reply.correlation)
        if request is None:  # it has failed meanwhile
            return True
        try:
            payload = reply_payload(reply)
            answers: list[Any] | None = request.answers(payload)
        except TxmqError as error:
            if not for_caller:
                self._remove(reply.correlation)
                self._refuse_request(request, error)
            return not for_caller
        if answers is None:
            if not for_caller:
                self._complete_each(self._remove(reply.correlation), payload)
            return not for_caller
        if not for_caller:
            self._count_stored(self._remove(reply.correlation))
        done = self._accumulator.complete(request, answers, unobserved_only=for_caller)
        # Not earlier: after an interrupt, an incomplete request is still in flight.
        if for_caller and done:
            self._count_stored(self._remove(reply.correlation))
        return done

    def _remove(self, correlation: int) -> InFlightRequest:
        request = self._requests.pop(correlation)
        self._batches -= len(request.batches) if isinstance(request, SendRequest) else 0
        return request

    def _count_stored(self, stored: InFlightRequest | SequencedBatch) -> None:
        if isinstance(stored, SendRequest | SequencedBatch):
            self.stats.messages += len(stored.futures)
            self._pause, self._throttled = FIRST_PAUSE_S, None
            if time.monotonic() - stored.appended_at > SLOW_RECEIPT_S:
                self._batcher.shrink_batches()
            else:
                self._batcher.grow_batches(stored.size)

    def _complete_each(self, request: InFlightRequest, payload: bytes) -> None:
        """Complete or refuse each part of a frame by its own answer."""
        if isinstance(request, CombinedRequest):
            throttled = self._side_requests.complete_each(request, payload)
            if throttled is not None:
                self.pause(throttled)
        elif isinstance(request, SendRequest):
            for batch, answer in request.batch_answers(payload):
                try:
                    receipts = batch_receipts(batch, answer)
                except TxmqError as error:
                    self._refuse(batch, error)
                else:
                    self._count_stored(batch)
                    self._accumulator.complete(batch.pending, receipts)

    def _refuse_request(self, request: InFlightRequest, error: TxmqError) -> None:
        if isinstance(request, SendRequest):
            for batch in request.batches:
                self._refuse(batch, error)
        elif self._side_requests.handle_refusal(request, error):
            assert isinstance(error, Throttled), "nothing else is repeated after a pause"
            self.pause(error)

    def _refuse(self, batch: SequencedBatch, error: TxmqError) -> None:
        batch.refusal = error
        self._refused.append(batch)
        self.stats.refused += 1

    def _retry_refused(self) -> None:
        """Send refused batches again, or fail them, once all replies are there."""
        refused, self._refused = sorted(self._refused, key=lambda batch: batch.sequence), []
        first = refused[0]
        not_stored = not first.doubtful or isinstance(first.refusal, DEFINITELY_NOT_STORED)
        retries = [batch for batch in refused if self._prepare_retry(batch, not_stored=not_stored)]
        if not_stored:
            self._batcher.renew_session()
            self._batcher.requeue(batch.pending for batch in (*retries, *self._send_queue.retries))
            self._send_queue.retries.clear()
        else:
            self._send_queue.requeue(retries)

    def _prepare_retry(self, batch: SequencedBatch, *, not_stored: bool) -> bool:
        """Prepare another attempt where it can succeed, or else fail the batch."""
        match batch.refusal:
            case StaleTopic():
                self.stale_topics.add(batch.pending.destination.topic)
                return True
            case SequenceGap() | ConnectionLost():
                return True
            case UnknownProducer() if not batch.doubtful:
                return True
            case Throttled() as throttled:
                self.pause(throttled)
                self._batcher.shrink_batches()
                return True
            case UnknownTopic():
                self._topics.forget(batch.pending.destination.topic)
        error = batch.refusal or ConnectionLost("given up")
        if batch.doubtful and not not_stored:
            error.outcome = "unknown"
        self._fail(batch, error)
        return False

    def connection_lost(self) -> None:
        """Send all requests in flight again, with the same sequences."""
        lost, self._requests, self._batches = list(self._requests.values()), {}, 0
        self.deferred_replies.clear()  # they will come again
        self._side_requests.requeue(
            request for request in lost if not isinstance(request, SendRequest)
        )
        batches = [
            batch
            for request in lost
            if isinstance(request, SendRequest)
            for batch in request.batches
        ]
        for batch in batches:
            batch.doubtful = True
        if self._refused:
            for batch in batches:
                batch.refusal = ConnectionLost("the connection was lost")
            self._refused += batches
            self._retry_refused()
        else:
            self._send_queue.requeue(batches)

    def next_to_store(self) -> SequencedBatch | None:
        """Return the next batch that has no receipt, to store it on disk instead, or
        None without one. For use without a connection, or while batches are `held`.
        """
        if self._send_queue.retries:
            return self._send_queue.retries.popleft()
        return self._batcher.next_to_store()

    def size_to_store(self) -> int:
        """Return an upper bound of the bytes of that batch, 0 without one."""
        if self._send_queue.retries:
            return len(self._send_queue.retries[0].payload[1])
        if not self._batcher.queue:
            self._batcher.queue.extend(self._accumulator.drain())
        if not self._batcher.queue:
            return 0
        first = self._batcher.queue[0]
        largest = estimated_size(first.messages[0]) if first.messages else 0
        return min(first.size, max(BATCH_BYTES, largest)) + EMPTY_BATCH_BYTES

    @property
    def has_doubtful(self) -> bool:
        """True while batches are to be sent again, unchanged."""
        return bool(self._send_queue.retries)

    def renew_session(self) -> None:
        """Begin a new producer session, for all batches that have no sequence yet."""
        self._batcher.renew_session()

    def fail_waiting(self, error: TxmqError) -> None:
        """Fail all messages that are not in flight; those sent before, with an unknown
        outcome.
        """
        self._batcher.queue.extend(self._accumulator.drain())
        waiting, self._batcher.queue = self._batcher.queue, deque()
        for pending in waiting:
            self._fail(pending, error)
        retries, self._send_queue.retries = self._send_queue.retries, deque()
        for batch in retries:
            self._fail(batch, ConnectionLost(f"no receipt came: {error.message}"))

    def fail_older(self, before: float, error: TxmqError, *, in_turn_only: bool = False) -> None:
        """Fail messages that were appended before that moment and never sent;
        `in_turn_only`: those that could go to another broker.
        """
        if self._accumulator.has_older(before):
            self._batcher.queue.extend(self._accumulator.drain())
        left: deque[PendingBatch] = deque()
        for pending in self._batcher.queue:
            stays = in_turn_only and pending.destination.partition != IN_TURN
            end = 0 if stays else bisect(pending.append_times, before)
            if end:
                self._fail(pending.slice_rows(0, end), error)
            if end < len(pending.append_times):
                rest = pending.slice_rows(end, len(pending.append_times)) if end else pending
                left.append(rest)
        self._batcher.queue = left

    def expire(self, before: float, connection_error: str) -> None:
        """Fail all unanswered requests that were appended before that moment.

        `connection_error` explains the lack of a connection, if there is none.
        """
        for correlation, request in list(self._requests.items()):
            if request.appended_at < before:
                self._fail(self._remove(correlation), _expired(connection_error))
        retries = self._send_queue.retries
        for batch in [batch for batch in retries if batch.appended_at < before]:
            retries.remove(batch)
            self._fail(batch, _expired(connection_error))
        for side in self._side_requests.drain_older(before):
            self._fail(side, side.throttled or _expired(connection_error))
        self.fail_older(before, self._not_sent(connection_error))

    def fail_unsent(self, before: float) -> None:
        """Fail messages that were appended before that moment and never sent, and that
        could go to another broker.
        """
        self.fail_older(before, self._not_sent("no connection"), in_turn_only=True)

    def _not_sent(self, connection_error: str) -> TxmqError:
        if self._throttled is not None and not connection_error:
            throttled = self._throttled
            message = f"not sent in time: {throttled.message}"
            return Throttled(message, hint=throttled.hint, detail=throttled.detail)
        reason = connection_error or "the broker accepts no more"
        return BrokerUnavailable(f"not sent in time: {reason}")

    def fail_all(self, cause: TxmqError) -> Counter[str]:
        """Fail everything with `cause`; what may be stored, with an unknown outcome.

        Return the numbers of its messages by topic.
        """
        self._batcher.queue.extend(self._accumulator.drain())
        doubtful = [*self._requests.values(), *self._send_queue.retries]
        self._requests, self._batches = {}, 0
        for request in doubtful:
            self._fail(request, ConnectionLost(f"no receipt came: {cause.message}"))
        rest: list[SequencedBatch | PendingBatch | SideRequest[Any]] = [
            *self._refused,
            *self._batcher.queue,
            *self._side_requests.drain_all(),
        ]
        for waiting in rest:
            self._fail(waiting, cause)
        messages: Counter[str] = Counter()
        for batch in itertools.chain.from_iterable(map(_batches_of, (*doubtful, *rest))):
            messages[batch.destination.topic] += len(batch.futures)
        for done in (self._send_queue.retries, self._refused, self._batcher.queue):
            done.clear()
        return messages

    def _fail(
        self, failed: InFlightRequest | SequencedBatch | PendingBatch, error: TxmqError
    ) -> None:
        entry = failed.pending if isinstance(failed, SequencedBatch) else failed
        if isinstance(entry, SendRequest | PendingBatch):
            self.stats.failed += len(entry.futures)
        self._accumulator.fail(entry, error)


def _batches_of(
    entry: InFlightRequest | SequencedBatch | PendingBatch,
) -> Iterable[PendingBatch]:
    match entry:
        case SendRequest():
            return [batch.pending for batch in entry.batches]
        case SequencedBatch():
            return [entry.pending]
        case PendingBatch():
            return [entry]
        case _:
            return []


def _expired(connection_error: str) -> RequestTimeout:
    reason = f": {connection_error}" if connection_error else ""
    return RequestTimeout(
        f"no answer came in time{reason}", hint="the request may have been carried out"
    )
