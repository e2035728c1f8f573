"""Queues of check-backs for the checkers of services, by service, checker and origin.

The origin of a transaction, the process that stored it, knows its outcome best. While
that process is connected and offers the checker, it is asked first, for a while. Any
other process of the service is asked about what the origin leaves, or does not answer.
Nothing of this is in the log: after a restart of the broker or of the origin, all
processes are asked alike.
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

ORIGIN_US = 1 * SECOND  # reserved for the origin, which may be at work on other check-backs
ANY_PROCESS = b""  # in place of an origin


class CheckerProcess(NamedTuple):
    """A process of a service that waits for check-backs. `checkers` are the ones it
    offers (none = all); `origin` is its identity, empty where it has none.
    """

    service: str
    checkers: Collection[str] = ()
    origin: bytes = ANY_PROCESS

    def offers(self, checker: str) -> bool:
        """Return whether the process answers for this checker."""
        return not self.checkers or checker in self.checkers


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

    def __len__(self) -> int:
        return self._counts.total()

    def count(self, service: str) -> int:
        """Return the number of check-backs that wait for processes of a service."""
        return self._counts[service]

    def add_process(self, session: ClientSession, process: CheckerProcess) -> None:
        """Count a process as connected until its session is lost."""
        self._processes[session] = process
        session.on_lost[self] = partial(self._processes.__delitem__, session)

    def add(self, token: bytes, checker: str, row: Transaction, now: int) -> None:
        """Queue a transaction: for its origin first, if that is connected and was not
        asked before.
        """
        to_origin = (token in self._open or token not in self._tried) and self._is_connected(
            row.service, checker, row.origin
        )
        name = checker, row.origin if to_origin else ANY_PROCESS
        self._put(row.service, name, QueuedCheck(token, now))
        self._counts[row.service] += 1

    def _put(self, service: str, name: QueueName, check: QueuedCheck) -> None:
        self._queues[service].setdefault(name, deque()).append(check)

    def _is_connected(self, service: str, checker: str, origin: bytes) -> bool:
        return origin != ANY_PROCESS and any(
            process.origin == origin and process.service == service and process.offers(checker)
            for process in self._processes.values()
        )

    def pop(self, process: CheckerProcess) -> Iterator[bytes]:
        """Yield tokens for this process, those of its own transactions first. A token
        leaves the queue as it is yielded.
        """
        queues = self._queues.get(process.service, {})
        for origin in dict.fromkeys((process.origin, ANY_PROCESS)):
            for name in [n for n in queues if n[1] == origin and process.offers(n[0])]:
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
        for service, queues in list(self._queues.items()):
            for name in [n for n in queues if n[1] != ANY_PROCESS]:
                self._release(service, name, now)

    def _release(self, service: str, name: QueueName, now: int) -> None:
        queue = self._queues[service][name]
        connected = self._is_connected(service, *name)
        kept = deque[QueuedCheck]()
        for check in queue:
            in_time = check.token in self._open or 0 <= now - check.since < ORIGIN_US
            if connected and in_time:
                kept.append(check)
            else:
                self._put(service, (name[0], ANY_PROCESS), check)
        self._queues[service][name] = kept
        if not kept:
            self._drop(service, name)
