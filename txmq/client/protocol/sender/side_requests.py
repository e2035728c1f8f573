"""Requests of other kinds in the sender's stream: bundles and decisions, which share
frames, and the rest, one in each frame.

Each request keeps its own answer. All of them may be repeated. After a lost connection
they are sent again, possibly in other frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from txmq.client.protocol.conversation import Payload, reply_payload
from txmq.client.protocol.sender.accumulator import COMBINED_OPCODES, Accumulator, SideRequest
from txmq.client.protocol.sender.promise import Promise
from txmq.errors import StaleTopic, Throttled, TxmqError
from txmq.wire.batched import pack_requests, unpack_replies
from txmq.wire.data_requests import Opcode

MAX_REQUESTS = 256  # in one frame
MAX_BYTES = 1 << 20  # of one frame; a larger request goes alone


@dataclass(slots=True)
class CombinedRequest:
    """Several side requests in one frame."""

    opcode: int
    requests: list[SideRequest[Any]]
    released: bool = False

    @property
    def futures(self) -> list[Promise[Any]]:
        return [request.future for request in self.requests]

    @property
    def payload(self) -> Payload:
        return pack_requests([_joined(request) for request in self.requests])

    @property
    def size(self) -> int:
        return sum(request.size for request in self.requests)

    @property
    def appended_at(self) -> float:
        """The time at which the last of them was appended."""
        return max(request.appended_at for request in self.requests)

    def answers(self, payload: bytes) -> list[Any] | None:
        """Return the results of the futures, or None where any request is refused."""
        answers = unpack_replies(payload, len(self.requests))
        try:
            return [
                request.decode(reply_payload(answer))
                for request, answer in zip(self.requests, answers, strict=True)
            ]
        except TxmqError:
            return None


class SideRequestQueue:
    """Side requests that were drained and are not in flight.

    `stale_topics` have to be refreshed before a request is encoded again.
    """

    def __init__(self, accumulator: Accumulator, stale_topics: set[str]) -> None:
        self._accumulator, self._stale_topics = accumulator, stale_topics
        self._waiting: list[SideRequest[Any]] = []

    @property
    def has_throttled(self) -> bool:
        """True while bundles wait until the broker takes them."""
        return any(request.throttled is not None for request in self._waiting)

    def drain(self, *, stores: bool = True) -> list[SideRequest[Any] | CombinedRequest]:
        """Return what may be sent now, in frames. Unless `stores`, bundles wait, and
        the rest goes on.
        """
        drained = [*self._waiting, *self._accumulator.drain_requests(ready_only=True)]
        self._waiting = []
        if not drained:
            return []
        ready: list[SideRequest[Any]] = []
        for request in drained:
            if not stores and request.opcode == Opcode.GROUP:
                if not request.released:
                    self._waiting.append(request)
            elif not request.needs_rebuild or (not self._stale_topics and self._rebuild(request)):
                ready.append(request)
            elif not request.released:
                self._waiting.append(request)
        return _frames(ready)

    def _rebuild(self, request: SideRequest[Any]) -> bool:
        """Encode the payload again. Fail the request where that is impossible."""
        assert request.rebuild is not None, "a request that needs a rebuild can be rebuilt"
        try:
            request.payload = request.rebuild()
        except TxmqError as error:
            self._accumulator.fail(request, error)
        return not request.needs_rebuild

    def requeue(self, requests: Iterable[SideRequest[Any] | CombinedRequest]) -> None:
        """Send requests again after a lost connection."""
        for request in requests:
            self._waiting += request.requests if isinstance(request, CombinedRequest) else [request]

    def complete_each(self, combined: CombinedRequest, payload: bytes) -> Throttled | None:
        """Complete or refuse each request by its own answer. Return why some are to be
        sent again after a pause.
        """
        throttled = None
        for request, answer in zip(combined.requests, unpack_replies(payload), strict=True):
            try:
                decoded = request.decode(reply_payload(answer))
            except TxmqError as error:
                if self.handle_refusal(request, error):
                    throttled = request.throttled
            else:
                self._accumulator.complete(request, [decoded])
        return throttled

    def handle_refusal(self, request: SideRequest[Any] | CombinedRequest, error: TxmqError) -> bool:
        """Fail the request, or encode and send it again where the topic's metadata was
        stale: a refused bundle is not stored. Return True for a bundle that goes again
        after a pause.
        """
        if isinstance(error, Throttled) and request.opcode in (Opcode.GROUP, Opcode.GROUPS):
            again = request.requests if isinstance(request, CombinedRequest) else [request]
            for one in again:
                one.throttled = error
            self._waiting += again
            return True
        if (
            isinstance(request, SideRequest)
            and isinstance(error, StaleTopic)
            and request.rebuild is not None
        ):
            self._stale_topics.add(str(error.detail.get("topic", "")))
            request.payload = b""
            self._waiting.append(request)
        else:
            self._accumulator.fail(request, error)
        return False

    def drain_older(self, before: float) -> list[SideRequest[Any]]:
        """Return the requests that were appended before that moment."""
        if self._accumulator.has_older(before):
            self._waiting += self._accumulator.drain_requests()
        older = [request for request in self._waiting if request.appended_at < before]
        self._waiting = [request for request in self._waiting if request.appended_at >= before]
        return older

    def drain_all(self) -> list[SideRequest[Any]]:
        """Return all requests that are not in flight."""
        drained = [*self._waiting, *self._accumulator.drain_requests()]
        self._waiting = []
        return drained


def _joined(request: SideRequest[Any]) -> bytes:
    payload = request.payload
    return payload if isinstance(payload, bytes) else b"".join(payload)


def _frames(requests: Sequence[SideRequest[Any]]) -> list[SideRequest[Any] | CombinedRequest]:
    """Return requests in frames, combined where they are small; bundles go before
    decisions.
    """
    frames: list[SideRequest[Any] | CombinedRequest] = []
    combinable: dict[int, list[SideRequest[Any]]] = {opcode: [] for opcode in COMBINED_OPCODES}
    for request in requests:
        small = request.size <= MAX_BYTES
        own = combinable[request.opcode] if small and request.opcode in combinable else frames
        own.append(request)
    for opcode, those in combinable.items():
        frames += _combine(COMBINED_OPCODES[Opcode(opcode)], those)
    return frames


def _combine(
    opcode: int, requests: list[SideRequest[Any]]
) -> Iterable[SideRequest[Any] | CombinedRequest]:
    start = size = 0
    for at, request in enumerate(requests):
        if at > start and (size + request.size > MAX_BYTES or at - start == MAX_REQUESTS):
            yield _frame(opcode, requests[start:at])
            start, size = at, 0
        size += request.size
    if requests:
        yield _frame(opcode, requests[start:])


def _frame(opcode: int, requests: list[SideRequest[Any]]) -> SideRequest[Any] | CombinedRequest:
    return requests[0] if len(requests) == 1 else CombinedRequest(opcode, requests)
