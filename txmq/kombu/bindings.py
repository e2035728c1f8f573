"""The exchanges of a virtual host and the queues bound to them, as all of its programs
know them: a fold of a topic that each of them reads and adds to.

A record says that a queue is bound to an exchange, or is not any more. The queue "" is
that of all who listen now: where it is bound, messages of the exchange go to its topic
as well. Retention removes records, so that whoever reads old ones writes them anew.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from contextlib import suppress
from typing import Final, NamedTuple

from kombu.transport.virtual.exchange import STANDARD_EXCHANGE_TYPES
from kombu.utils.json import dumps, loads

import txmq
from txmq.errors import (
    BrokerUnavailable,
    ConnectionLost,
    OffsetOutOfRange,
    RequestTimeout,
    TopicExists,
    UnknownTopic,
)

DAY_S: Final = 86_400
KEPT_S, RENEWED_S = 7 * DAY_S, DAY_S  # how long records are there, and good
LOOK_S: Final = 1.0
LISTENERS: Final = ""


class Binding(NamedTuple):
    """A binding of an exchange of this type, as Kombu's tables have it.

    The one without a queue says that the exchange was declared.
    """

    exchange: str
    type: str
    routing_key: str = ""
    pattern: str | None = None
    queue: str | None = None


class Bindings:
    """The bindings of a virtual host."""

    def __init__(self, client: txmq.Client, topic: str) -> None:
        self._client, self._topic = client, topic
        self._next = 0  # the offset of the next record to read
        self._looked_at = float("-inf")
        self._stored_at = dict[Binding, float]()  # in seconds since 1970
        self._of = defaultdict[str, list[Binding]](list)  # by exchange

    def table(self, exchange: str) -> list[tuple[str, str | None, str]]:
        """Return the bindings of queues to an exchange, as Kombu has them."""
        found = self._of.get(exchange, ())
        return [(one.routing_key, one.pattern, one.queue) for one in found if one.queue]

    def is_listened(self, exchange: str) -> bool:
        """Return whether somebody has listened to an exchange."""
        return any(one.queue == LISTENERS for one in self._of.get(exchange, ()))

    def type_of(self, exchange: str) -> str | None:
        """Return the type of an exchange; None: nobody has declared it."""
        if not self._of.get(exchange):
            self.refresh()
        found = self._of.get(exchange)
        return found[0].type if found else None

    def add(self, *bindings: Binding) -> None:
        """Add what is not known yet."""
        self.refresh()
        for binding in bindings:
            if binding not in self._stored_at:
                self._write(binding, bound=True)

    def remove(self, *, queue: str | None = None, exchange: str | None = None) -> None:
        """Remove the bindings of a queue, of an exchange, or of both to one another."""
        self.refresh()
        for binding in list(self._stored_at):
            if queue in (None, binding.queue) and exchange in (None, binding.exchange):
                self._write(binding, bound=False)

    def unbind(self, binding: Binding) -> None:
        """Remove one binding."""
        self.refresh()
        if binding in self._stored_at:
            self._write(binding, bound=False)

    def look(self) -> None:
        """Refresh, where that was not tried within a second. What is known counts while
        the broker is away.
        """
        if time.monotonic() - self._looked_at >= LOOK_S:
            with suppress(BrokerUnavailable, ConnectionLost, RequestTimeout):
                self.refresh()
            self._looked_at = time.monotonic()

    def refresh(self) -> None:
        """Read what others have written, and write old records anew."""
        with suppress(UnknownTopic):
            while self._read():
                pass
        good_from = time.time() - RENEWED_S
        for binding in [one for one, at in self._stored_at.items() if at < good_from]:
            self._write(binding, bound=True)

    def _read(self) -> bool:
        """Read the next records; return whether there may be more."""
        try:
            found = self._client.read(self._topic, 0, self._next)
        except OffsetOutOfRange as error:  # removed, or the topic was made anew
            first = error.detail["first"]
            assert isinstance(first, int)
            self._next = first
            return True
        for message in found.messages:
            with suppress(ValueError, RecursionError, re.error):  # somebody else's
                binding, bound = _read(message.body)
                self._apply(binding, message.stored_at / 1e6, bound=bound)
        self._next = max(self._next, found.next_offset)
        return bool(found.messages)

    def _apply(self, binding: Binding, stored_at: float, *, bound: bool) -> None:
        known = self._stored_at.pop(binding, None)
        if bound:
            self._stored_at[binding] = stored_at
        if bound and known is None:
            self._of[binding.exchange].append(binding)
        elif known is not None and not bound:
            self._of[binding.exchange].remove(binding)

    def _write(self, binding: Binding, *, bound: bool) -> None:
        body = dumps({"binding": list(binding), "bound": bound}).encode()
        if not self._next:
            with suppress(TopicExists):
                self._client.call(
                    "topic.create", name=self._topic, partitions=1, retention_ms=KEPT_S * 1_000
                )
        self._client.send(self._topic, body)
        self._apply(binding, time.time(), bound=bound)


def _read(body: bytes) -> tuple[Binding, bool]:
    """Return what a record says. Raises ValueError, RecursionError and re.error."""
    match loads(body):
        case {
            "binding": [str(exchange), str(kind), str(key), str() | None as pattern, queue],
            "bound": bool(bound),
        } if kind in STANDARD_EXCHANGE_TYPES and isinstance(queue, str | None):
            re.compile(pattern or "")
            return Binding(exchange, kind, key, pattern, queue), bound
    raise ValueError("it is no record of a binding")
