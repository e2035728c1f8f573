"""Queues of check-backs for the checkers of services, by service, checker and origin.

The origin of a transaction, the process that stored it, knows its outcome best, and
only it knows whether the local work still goes on. It is asked first, also about
checkers that it does not offer. A lost origin, and each one after a start of the
broker, has some time to connect again. Any other process of the service is asked about
what the origin passes on, or does not answer. Who is connected is not in the log; the
origin of a transaction is.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from txmq.model.units import SECOND

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from txmq.broker.reactor.protocol import ClientSession
    from txmq.core.transactions.model import Transaction

ORIGIN_US = 5 * SECOND  # reserved for a connected origin, which may be held up
RETURN_US = 10 * SECOND  # reserved for an origin that may be about to connect again
ANY_PROCESS = b""  # in place of an origin


class CheckerProcess(NamedTuple):
    """A process of a service that waits for check-backs. `checkers` are the ones it
    offers (none = all); `origin` is its identity, empty where it has none.

    `own`: it takes check-backs of its own transactions for all checkers, and offers
    none but those named.
    """

    service: str
    checkers: Collection[str] = ()
    origin: bytes = ANY_PROCESS
    own: bool = False

    def offers(self, checker: str) -> bool:
        """Return whether the process answers for this checker."""
        return checker in self.checkers or not (self.checkers or self.own)


class QueuedCheck(NamedTuple):
    """A transaction that waits for a checker, and the time since which it waits."""

    token: bytes
    since: int


QueueName = tuple[str, bytes]  # checker, origin


class CheckQueue:
    """The check-backs that wait for processes of services, and the processes that are
    connected.
    """

    def __init__(self) -> None:
        self._queues: defaultdict[str, dict[QueueName, deque[QueuedCheck]]] = defaultdict(dict)
        self._counts: Counter[str] = Counter()  # of all queues of a service
        self._processes: dict[ClientSession, CheckerProcess] = {}
        self._tried: set[bytes] = set()  # tokens whose origin was asked
        self._open: set[bytes] = set()  # tokens whose local work goes on at their origin
        self._started: int | None = None  # when the first origin could connect
        self._now = 0
        self._lost: dict[bytes, int] = {}  # when the last connection of an origin was lost

    def __len__(self) -> int:
        return self._counts.total()

    def count(self, service: str) -> int:
        """Return the number of check-backs that wait for processes of a service."""
        return self._counts[service]

    def add_process(self, session: ClientSession, process: CheckerProcess) -> None:
        """Count a process as connected until its session is lost."""
        self._processes[session] = process
        session.on_lost[self] = partial(self._remove_process, session)

    def _remove_process(self, session: ClientSession) -> None:
        origin = self._processes.pop(session).origin
        if origin != ANY_PROCESS and all(
            process.origin != origin for process in self._processes.values()
        ):
            self._lost[origin] = self._now

    def add(self, token: bytes, checker: str, row: Transaction, now: int) -> None:
        """Queue a transaction: for its origin first, if that is connected or may come
        back, and was not asked before.
        """
        to_origin = (token in self._open or token not in self._tried) and (
            self._is_connected(row.service, checker, row.origin)
            or self._may_return(row.origin, now)
        )
        name = checker, row.origin if to_origin else ANY_PROCESS
        self._put(row.service, name, QueuedCheck(token, now))
        self._counts[row.service] += 1

    def _put(self, service: str, name: QueueName, check: QueuedCheck) -> None:
        self._queues[service].setdefault(name, deque()).append(check)

    def _is_connected(self, service: str, checker: str, origin: bytes) -> bool:
        return origin != ANY_PROCESS and any(
            process.origin == origin
            and process.service == service
            and (process.own or process.offers(checker))
            for process in self._processes.values()
        )

    def _may_return(self, origin: bytes, now: int) -> bool:
        """Return whether the origin may be alive, and about to connect again."""
        if origin == ANY_PROCESS:
            return False
        started = now if self._started is None else self._started
        return 0 <= now - self._lost.get(origin, started) < RETURN_US

    def _takes(self, process: CheckerProcess, name: QueueName) -> bool:
        """Return whether a process takes check-backs of a queue."""
        checker, origin = name
        if process.offers(checker):
            return origin in (ANY_PROCESS, process.origin)
        return (
            process.own
            and origin == process.origin != ANY_PROCESS
            # Another client of the process may have the checker.
            and not any(
                other.origin == origin
                and other.service == process.service
                and other.offers(checker)
                for other in self._processes.values()
            )
        )

    def pop(self, process: CheckerProcess) -> Iterator[bytes]:
        """Yield tokens for this process, those of its own transactions first. A token
        leaves the queue as it is yielded.
        """
        queues = self._queues.get(process.service, {})
        for origin in dict.fromkeys((process.origin, ANY_PROCESS)):
            for name in [n for n in queues if n[1] == origin and self._takes(process, n)]:
                yield from self._drain(process, name)

    def _drain(self, process: CheckerProcess, name: QueueName) -> Iterator[bytes]:
        queue = self._queues[process.service][name]
        while queue:
            token = queue.popleft().token
            self._counts[process.service] -= 1
            if name[1] != ANY_PROCESS:
                self._tried.add(token)
            yield token
        self._drop(process.service, name)

    def _drop(self, service: str, name: QueueName) -> None:
        del self._queues[service][name]
        if not self._queues[service]:
            del self._queues[service], self._counts[service]

    def forget(self, token: bytes) -> None:
        """Forget that the origin was asked: the transaction is decided."""
        self._tried.discard(token)
        self._open.discard(token)

    def note_work(self, token: bytes, *, is_open: bool) -> None:
        """Ask nobody but the origin while that is connected and its local work goes on.

        Any other process would find nothing of that work, and say ROLLBACK.
        """
        (self._open.add if is_open else self._open.discard)(token)

    def tick(self, now: int) -> None:
        """Timer: release check-backs that their origin did not take in time, or whose
        origin is gone, to any process.
        """
        self._now = now
        if self._started is None:
            self._started = now
        self._lost = {origin: at for origin, at in self._lost.items() if 0 <= now - at < RETURN_US}
        for service, queues in list(self._queues.items()):
            for name in [n for n in queues if n[1] != ANY_PROCESS]:
                self._release(service, name, now)

    def _release(self, service: str, name: QueueName, now: int) -> None:
        queue = self._queues[service][name]
        connected, may_return = self._is_connected(service, *name), self._may_return(name[1], now)
        kept = deque[QueuedCheck]()
        for check in queue:
            in_time = check.token in self._open or 0 <= now - check.since < ORIGIN_US
            if in_time if connected else may_return:
                kept.append(check)
            else:
                self._put(service, (name[0], ANY_PROCESS), check)
        self._queues[service][name] = kept
        if not kept:
            self._drop(service, name)
