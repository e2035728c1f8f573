"""The brokers of a client of several, which become more while it runs.

Each broker tells in its welcome of the logs that are listed with its own. For a log
that none of the brokers has, the client makes a broker more. Messages without a key go
to it once it has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

from txmq.client.log import get_logger
from txmq.client.protocol.address import Addresses
from txmq.client.protocol.conversation import MeetsLog
from txmq.model.cluster import NOT_LISTED, ListedLog, LogList

C = TypeVar("C", bound=MeetsLog)
log = get_logger()


class Placed(NamedTuple):
    """A list of logs, and the index of the broker of each."""

    listed: LogList
    brokers: tuple[int, ...]


class Brokers(Generic[C]):
    """The cores of all brokers: those that the user has named, then those that were
    found. They only become more. For any number of threads.
    """

    def __init__(
        self,
        cores: Sequence[C],
        make: Callable[[Addresses], C],
        found: Callable[[int], object],
    ) -> None:
        """`make` returns the core of a log at these addresses. `found` gets the index
        of each of them, before anything is sent there, and must not wait. In the child
        of a fork it gets the index again.
        """
        self.cores = list(cores)
        self.named = len(self.cores)
        self._make, self._found = make, found
        self._lock = Lock()
        self._placed = Placed(NOT_LISTED, ())
        self._answered = set(range(self.named))
        # to which messages without a key may go
        self.for_any: Sequence[int] = range(self.named)
        for core in cores:
            core.when_listed(self.refresh)

    @property
    def version(self) -> int:
        """The version of the list that is known; 0 = none is."""
        return self._placed.listed.version

    @property
    def first(self) -> int:
        """The broker that numbers topics."""
        return self._placed.brokers[0] if self.version else 0

    @property
    def answered(self) -> list[C]:
        """The cores of the brokers that were named, and of those that have answered."""
        return [core for n, core in enumerate(self.cores) if n in self._answered]

    @property
    def present(self) -> list[C]:
        """The cores of brokers that have answered, and those of the logs listed."""
        present = self._answered.union(self._placed.brokers)
        return [core for n, core in enumerate(self.cores) if n in present]

    @property
    def listed(self) -> list[tuple[ListedLog, C]]:
        """The logs of the list that is known, and the core of each."""
        listed, brokers = self._placed
        return [(one, self.cores[n]) for one, n in zip(listed.logs, brokers, strict=True)]

    def with_keys_of(self, topic_id: int) -> Sequence[int]:
        """Return the brokers of the topic's keys, in the order of its partitions."""
        listed, brokers = self._placed
        if not listed.logs:
            return range(self.named)
        placed = zip(listed.logs, brokers, strict=True)
        return [n for one, n in placed if one.has_keys_of(topic_id)]

    def note_answer(self, broker: int) -> None:
        """Let messages without a key go to a broker that was found."""
        with self._lock:
            self._answered.add(broker)
            self._choose()

    def refresh(self) -> None:
        """Know the latest list that a broker has told of. Waits for nothing."""
        teller = max(self.cores, key=lambda core: core.log_list.version)
        if teller.log_list.version > self.version:
            with self._lock:
                self._take(teller)

    def _take(self, teller: C) -> None:
        latest, before = teller.log_list, self._placed.listed
        if latest.version <= before.version:
            return
        if before.logs and before.logs[0].log_id != latest.logs[0].log_id:
            log.error("cluster.lists_differ", known=before.version, other=latest.version)
            return
        self._placed = Placed(latest, tuple(self._place(one, teller) for one in latest.logs))
        self._choose()
        named = [broker for broker in self._placed.brokers if broker < self.named]
        if named != list(range(self.named)):  # keys may be elsewhere than before
            log.warning("cluster.listed_otherwise", brokers=named)

    def _place(self, listed: ListedLog, teller: C) -> int:
        """Return the broker of a log, and make one if there is none."""
        for broker, core in enumerate(self.cores):
            if core.expects(listed):
                core.note_listed(listed)
                return broker
        made = self._make(teller.addresses_of(listed))
        made.note_listed(listed)
        made.when_listed(self.refresh)
        self.cores.append(made)
        self._found(len(self.cores) - 1)
        return len(self.cores) - 1

    def _choose(self) -> None:
        listed, brokers = self._placed
        placed = zip(listed.logs, brokers, strict=True)
        usable = [n for one, n in placed if n in self._answered and not one.is_drained]
        self.for_any = usable or range(self.named)

    def after_fork(self) -> None:
        """Begin anew in a child, where the threads of the parent are none, and one of
        them may have held the lock.
        """
        self._lock = Lock()
        for broker in range(self.named, len(self.cores)):
            if broker not in self._answered:
                self._found(broker)
