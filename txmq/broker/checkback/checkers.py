"""Which process of a service is asked about a transaction whose producer did not tell:
its origin before all others.

The process that stored a transaction knows best what became of it. So as long as a
connection of that process is open that takes check-backs of the checker, the first one
is kept for it, for a while; what it leaves, and what it was asked about in vain, goes
to whichever process of the service has registered the checker and asks next. Nothing of
this is in the log: after a restart of the broker, or of the origin, there is no first
one, and whoever asks is as good.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from txmq.broker.protocol import Session
    from txmq.core.transactions.model import Transaction

KEPT = (
    1_000_000  # microseconds that an offer is kept for its origin, which may be at work on others
)
ANYBODY = b""  # in place of an origin


class Taker(NamedTuple):
    """Who asks for work: a process (empty = unknown) of a service, and the checkers it
    has (none = all).
    """

    service: str
    checkers: Collection[str] = ()
    origin: bytes = ANYBODY

    def has(self, checker: str) -> bool:
        """Whether it may be asked in place of this checker."""
        return not self.checkers or checker in self.checkers


class Waiting(NamedTuple):
    """A transaction that waits to be taken, since when."""

    token: bytes
    since: int


Place = tuple[str, bytes]  # checker, origin


class Offers:
    """What waits for the processes of services, and who of them listens."""

    def __init__(self) -> None:
        self._queues: defaultdict[str, dict[Place, deque[Waiting]]] = defaultdict(dict)
        self._counts: Counter[str] = Counter()  # of all queues of a service
        self._listening: dict[Session, Taker] = {}
        self._tried: set[bytes] = set()  # tokens whose origin was asked

    def __len__(self) -> int:
        return self._counts.total()

    def count(self, service: str) -> int:
        """How many wait for processes of a service."""
        return self._counts[service]

    def listen(self, session: Session, taker: Taker) -> None:
        """Until its connection is lost, this process takes what is offered to its
        checkers.
        """
        self._listening[session] = taker
        session.lost[self] = partial(self._listening.__delitem__, session)

    def add(self, token: bytes, row: Transaction, now: int) -> None:
        """Offer a transaction: to its origin, if that listens and was not asked yet."""
        checker = str(row.decider[1])
        first = token not in self._tried and self._listens(row.service, checker, row.origin)
        self._put(row.service, (checker, row.origin if first else ANYBODY), Waiting(token, now))
        self._counts[row.service] += 1

    def _put(self, service: str, place: Place, waiting: Waiting) -> None:
        self._queues[service].setdefault(place, deque()).append(waiting)

    def _listens(self, service: str, checker: str, origin: bytes) -> bool:
        return origin != ANYBODY and any(
            taker.origin == origin and taker.service == service and taker.has(checker)
            for taker in self._listening.values()
        )

    def take(self, taker: Taker) -> Iterator[bytes]:
        """What this process may be asked about, its own first; each is no longer
        offered once it is yielded.
        """
        queues = self._queues.get(taker.service, {})
        for origin in dict.fromkeys((taker.origin, ANYBODY)):
            for place in [p for p in queues if p[1] == origin and taker.has(p[0])]:
                yield from self._emptied(taker, place)

    def _emptied(self, taker: Taker, place: Place) -> Iterator[bytes]:
        queue = self._queues[taker.service][place]
        while queue:
            token = queue.popleft().token
            self._counts[taker.service] -= 1
            if place[1] != ANYBODY:
                self._tried.add(token)
            yield token
        self._drop(taker.service, place)

    def _drop(self, service: str, place: Place) -> None:
        del self._queues[service][place]
        if not self._queues[service]:
            del self._queues[service], self._counts[service]

    def forget(self, token: bytes) -> None:
        """The transaction is decided."""
        self._tried.discard(token)

    def tick(self, now: int) -> None:
        """What its origin did not take in time, or is gone from, is anybody's."""
        for service, queues in list(self._queues.items()):
            for place in [p for p in queues if p[1] != ANYBODY]:
                self._release(service, place, now)

    def _release(self, service: str, place: Place, now: int) -> None:
        queue = self._queues[service][place]
        here = self._listens(service, *place)
        while queue and (not here or queue[0].since + KEPT <= now):
            self._put(service, (place[0], ANYBODY), queue.popleft())
        if not queue:
            self._drop(service, place)
