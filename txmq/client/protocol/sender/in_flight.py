"""What a pipeline has under way: frames, each kept until its reply is there.

The sequences of a producing session have no gaps, so that a refused send takes all
behind it along. Then all replies are awaited, and what was refused goes out again in
order:

- as it was, where an earlier attempt may have stored the first of it: its sequence will tell the broker so;
- else under a new session, because then certainly nothing of it is stored.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections import deque
from collections.abc import Iterable
from typing import Any

from txmq.client.blocking.sender.delivery import DEFINITE, FIRST_PAUSE_S, LONGEST_PAUSE_S
from txmq.client.protocol.conversation import Conversation, result
from txmq.client.protocol.sender.accumulator import IN_TURN, Accumulator, PendingBatch
from txmq.client.protocol.sender.batcher import Flight, Loader
from txmq.client.protocol.sender.multi_send import Convoy, Dispatch, receipts_of
from txmq.client.protocol.sender.side_requests import Bundle, Errand, Errands
from txmq.client.protocol.sender.stats import Stats
from txmq.client.protocol.sender.topics import Topics
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

FRAMES_AHEAD = 256  # sends under way: of so many the broker remembers the receipts
WRITE_BYTES = 1 << 20  # handed to the kernel at once; meanwhile the next frames fill up
Cargo = Convoy | Errand | Bundle


class Flights:
    """The pipeline's side of an outbox. For one thread at a time."""

    def __init__(self, topics: Topics, outbox: Accumulator) -> None:
        self._topics, self._outbox = topics, outbox
        self.stats = Stats()
        self.stale: set[str] = set()  # topics to be asked about before anything more is sent
        self.paused_until = 0.0  # the broker asked for a pause
        self._pause = FIRST_PAUSE_S
        self._loader = Loader(topics, self._fail)
        self._errands = Errands(outbox, self.stale)
        self._dispatch = Dispatch(self._loader, outbox, self.stats)
        self._under_way: dict[int, Cargo] = {}
        self._sends = 0
        self._refused: list[Flight] = []
        self.left: list[Frame] = []  # replies that the pipeline's thread has to see to

    @property
    def awaits_replies(self) -> bool:
        """Whether anything is under way."""
        return bool(self._under_way)

    @property
    def can_send(self) -> bool:
        """Whether more sends may go out now."""
        return (
            not (self._refused or self.stale)
            and self._sends < FRAMES_AHEAD
            and time.monotonic() >= self.paused_until
        )

    @property
    def has_more(self) -> bool:
        """Whether something taken already may go out now."""
        return self.can_send and not self._dispatch.empty

    def pause(self) -> None:
        """Sends nothing for a while, longer each time until a receipt comes."""
        self.paused_until = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    def fill(self, conversation: Conversation) -> list[bytes]:
        """What to write next: about as much as one write takes."""
        pieces: list[bytes] = []
        for errand in self._errands.take(conversation.welcome):
            self._launch(conversation, errand, pieces)
        size = 0
        while size < WRITE_BYTES and self.can_send and (convoy := self._next(conversation)):
            self._launch(conversation, convoy, pieces)
            size += convoy.weight
        return pieces

    def _next(self, conversation: Conversation) -> Convoy | None:
        return self._dispatch.next(conversation, FRAMES_AHEAD - self._sends)

    def _launch(self, conversation: Conversation, cargo: Cargo, pieces: list[bytes]) -> None:
        try:
            correlation, own = conversation.request(cargo.opcode, cargo.payload)
        except TxmqError as error:  # an errand too large for a frame; for sends that was seen to
            self._fail(cargo, error)
            return
        except BaseException:
            if isinstance(cargo, Convoy):  # an interrupt must not lose it
                self._dispatch.back(cargo.flights)
            raise
        self._under_way[correlation] = cargo
        if isinstance(cargo, Convoy):
            self._sends += len(cargo.flights)
        elif isinstance(cargo, Bundle):
            self.stats.bundles += 1
            self.stats.requests += len(cargo.errands)
        pieces += own

    def received(self, replies: Iterable[Frame]) -> None:
        """Replies have come, behind those that were left."""
        left, self.left = self.left, []
        for reply in (*left, *replies):
            self._land(reply, alone=False)
        if self._refused and not self._sends:
            self._regroup()

    def received_alone(self, replies: Iterable[Frame]) -> bool:
        """As `received`, on the thread of somebody who waits; whether that was all.

        From the first reply on that is a refusal, or that somebody else looks at, they
        are left for `received`.
        """
        for reply in replies:
            if self.left or not self._land(reply, alone=True):
                self.left.append(reply)
        return not self.left

    def _land(self, reply: Frame, *, alone: bool) -> bool:
        cargo = self._under_way.get(reply.correlation)
        if cargo is None:  # given up meanwhile
            return True
        try:
            payload = result(reply)
            answers: list[Any] | None = cargo.answers(payload)
        except TxmqError as error:
            if not alone:
                self._take_off(reply.correlation)
                self._said_no(cargo, error)
            return not alone
        if answers is None:
            if not alone:
                self._sort_out(self._take_off(reply.correlation), payload)
            return not alone
        if not alone:
            self._stored(self._take_off(reply.correlation))
        done = self._outbox.answered(cargo, answers, alone=alone)
        if alone and done:  # not before: after an interrupt, what is not done is still under way
            self._stored(self._take_off(reply.correlation))
        return done

    def _take_off(self, correlation: int) -> Cargo:
        cargo = self._under_way.pop(correlation)
        self._sends -= len(cargo.flights) if isinstance(cargo, Convoy) else 0
        return cargo

    def _stored(self, cargo: Cargo | Flight) -> None:
        if isinstance(cargo, Convoy | Flight):
            self.stats.messages += len(cargo.futures)
            self._pause = FIRST_PAUSE_S

    def _sort_out(self, cargo: Cargo, payload: bytes) -> None:
        """Some of those in a frame are refused: each gets its own answer."""
        if isinstance(cargo, Bundle):
            self._errands.sort_out(cargo, payload)
        elif isinstance(cargo, Convoy):
            for flight, answer in cargo.each(payload):
                try:
                    receipts = receipts_of(flight, answer)
                except TxmqError as error:
                    self._refuse(flight, error)
                else:
                    self._stored(flight)
                    self._outbox.answered(flight.pile, receipts, alone=False)

    def _said_no(self, cargo: Cargo, error: TxmqError) -> None:
        if isinstance(cargo, Convoy):
            for flight in cargo.flights:
                self._refuse(flight, error)
        else:
            self._errands.refused(cargo, error)

    def _refuse(self, flight: Flight, error: TxmqError) -> None:
        flight.refusal = error
        self._refused.append(flight)
        self.stats.refused += 1

    def _regroup(self) -> None:
        """All replies are there: what was refused goes out again, or fails."""
        refused, self._refused = sorted(self._refused, key=lambda flight: flight.sequence), []
        first = refused[0]
        certain = not first.doubtful or isinstance(first.refusal, DEFINITE)
        kept = [flight for flight in refused if self._goes_again(flight, certain=certain)]
        if certain:
            self._loader.renew()
            self._loader.put_back(flight.pile for flight in (*kept, *self._dispatch.again))
            self._dispatch.again.clear()
        else:
            self._dispatch.back(kept)

    def _goes_again(self, flight: Flight, *, certain: bool) -> bool:
        """Whether it is worth another attempt; what that takes is prepared. If not, its
        futures fail.
        """
        match flight.refusal:
            case StaleTopic():
                self.stale.add(flight.pile.place.topic)
                return True
            case SequenceGap() | ConnectionLost():
                return True
            case UnknownProducer() if not flight.doubtful:
                return True
            case Throttled():
                self.pause()
                return True
            case UnknownTopic():
                self._topics.forget(flight.pile.place.topic)
        error = flight.refusal or ConnectionLost("given up")
        if flight.doubtful and not certain:
            error.outcome = "unknown"
        self._fail(flight, error)
        return False

    def lost(self) -> None:
        """The connection is gone: what was under way goes out again, under the same
        sequences.
        """
        lost, self._under_way, self._sends = list(self._under_way.values()), {}, 0
        self.left.clear()  # they will come again
        self._errands.back(cargo for cargo in lost if not isinstance(cargo, Convoy))
        sends = [flight for cargo in lost if isinstance(cargo, Convoy) for flight in cargo.flights]
        for flight in sends:
            flight.doubtful = True
        if self._refused:
            for flight in sends:
                flight.refusal = ConnectionLost("the connection was lost")
            self._refused += sends
            self._regroup()
        else:
            self._dispatch.back(sends)

    def expire(self, before: float, trouble: str) -> None:
        """Fails what was put in before that moment and has no answer; `trouble` is why
        there is no connection.
        """
        for correlation, cargo in list(self._under_way.items()):
            if cargo.time < before:
                self._fail(self._take_off(correlation), _too_late(trouble))
        for late in [flight for flight in self._dispatch.again if flight.time < before]:
            self._dispatch.again.remove(late)
            self._fail(late, _too_late(trouble))
        for errand in self._errands.take_late(before):
            self._fail(errand, _too_late(trouble))
        if self._outbox.has_older(before):
            self._loader.queue.extend(self._outbox.take_piles())
        young = [pile for old in self._loader.queue if (pile := self._young(old, before, trouble))]
        self._loader.queue = deque(young)

    def give_back(self, before: float) -> None:
        """Fails what was put in before that moment, was never sent, and could go to any
        broker as well.
        """
        if self._outbox.has_older(before):
            self._loader.queue.extend(self._outbox.take_piles())
        queue, self._loader.queue = self._loader.queue, deque()
        for pile in queue:
            left = (
                self._young(pile, before, "no connection")
                if pile.place.partition == IN_TURN
                else pile
            )
            if left is not None:
                self._loader.queue.append(left)

    def _young(self, pile: PendingBatch, before: float, trouble: str) -> PendingBatch | None:
        """The part of a pile that may still wait; the rest fails, and was never
        sent.
        """
        end = bisect(pile.times, before)
        if not end:
            return pile
        self._fail(
            pile.slice_rows(0, end),
            BrokerUnavailable(f"not sent in time: {trouble or 'the broker takes no more'}"),
        )
        return pile.slice_rows(end, len(pile.times)) if end < len(pile.times) else None

    def give_up(self, trouble: TxmqError) -> None:
        """Fails everything: what may have been carried out with an unknown outcome, the
        rest with `trouble`.
        """
        self._loader.queue.extend(self._outbox.take_piles())
        doubtful = [*self._under_way.values(), *self._dispatch.again]
        self._under_way, self._sends = {}, 0
        for cargo in doubtful:
            self._fail(cargo, ConnectionLost(f"no receipt came: {trouble.message}"))
        rest: list[Flight | PendingBatch | Errand] = [
            *self._refused,
            *self._loader.queue,
            *self._errands.take_all(),
        ]
        for waiting in rest:
            self._fail(waiting, trouble)
        for done in (self._dispatch.again, self._refused, self._loader.queue):
            done.clear()

    def _fail(self, what: Cargo | Flight | PendingBatch, error: TxmqError) -> None:
        waiting = what.pile if isinstance(what, Flight) else what
        if isinstance(waiting, Convoy | PendingBatch):
            self.stats.failed += len(waiting.futures)
        self._outbox.failed(waiting, error)


def _too_late(trouble: str) -> RequestTimeout:
    return RequestTimeout(
        "no answer came in time" + (f": {trouble}" if trouble else ""), hint="it may be carried out"
    )
