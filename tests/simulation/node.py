"""A broker on a simulated disk: every part is the real one, but for sockets, clock,
threads and LMDB.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
from twisted.internet.defer import Deferred

from tests.simulation.network import Link
from txmq.broker.assembly import Assembly
from txmq.broker.data_directory.storage import roll_forward
from txmq.broker.engine import Engine
from txmq.broker.reactor.steady_clock import SteadyClock
from txmq.broker.service import CLOCK_S
from txmq.config.broker import load
from txmq.core import machine
from txmq.store.log import Log
from txmq.store.segment import read_log_id
from txmq.store.snapshot import newest_snapshot, read_rows, write_snapshot
from txmq.store.survey import Known
from txmq.store.tables import META, NAMES, MemoryTables
from txmq.testing.simfs import PowerCut

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from twisted.python.failure import Failure

    from tests.simulation.clock import Clock
    from tests.simulation.network import Peer
    from tests.simulation.planted import Bug
    from txmq.broker.checkback.resolver_service import Resolves
    from txmq.core.state.state import State
    from txmq.core.transactions.model import Transaction
    from txmq.testing.simfs import SimFS

DATA = "/data"
SEGMENT, PREALLOCATE = 64 << 10, 8 << 10
EPOCH_US = 1_700_000_000_000_000
SETTINGS = load(None, {"data": Path(DATA)}).model_copy(
    update={
        "checks": load(None, {"data": DATA}).checks.model_copy(
            update={"first_s": 0.15, "then_s": 0.15, "longest_s": 1.0}
        ),
        "consumers": load(None, {"data": DATA}).consumers.model_copy(
            update={"lost_connection_grace_s": 0.1}
        ),
    }
)


class Node:
    """One life of the broker, from recovery to a crash."""

    def __init__(
        self, disk: SimFS, clock: Clock, rng: Random, resolving: Resolves, bug: Bug | None
    ) -> None:
        self.disk, self._clock, self._rng = disk, clock, rng
        self.alive = True
        self.failure: Failure | None = None
        self._links: list[Link] = []
        self._snapshot: tuple[int, list[tuple[str, bytes, bytes]]] | None = None
        self.log, state = recover(disk, self.now())
        steady = SteadyClock(self.now, clock.seconds, state.stored_at)
        self.engine = Engine(
            self.log, state, clock=_Mortal(self, clock), now=steady, in_thread=self._in_thread
        )
        self.engine.on_failure = self._failed
        if bug is not None:
            bug.plant(self.engine)
        self.engine.boot("sim")
        self._assembly = Assembly(
            self.engine, SETTINGS, _Mortal(self, clock), _MortalResolver(self, resolving), rng
        )
        self._assembly._backlog._clock = _Slow(self, clock, rng)
        self._assembly.every(0.1, self._upkeep)
        self._assembly.every(CLOCK_S, steady.look)
        self._assembly.start(self._failed)

    def now(self) -> int:
        """The wall clock's."""
        return EPOCH_US + int(self._clock.seconds() * 1_000_000) - self._clock.put_back

    def accept(self, peer: Peer) -> Link:
        session = self._assembly.sessions.accept()
        link = Link(self._clock, self._rng, session, peer)
        self._links.append(link)
        return link

    def _in_thread(self, function: Callable[..., Any], *args: object) -> Deferred[Any]:
        """The thread runs at once or a little later; its result comes back later still,
        as to a reactor.
        """
        done: Deferred[Any] = Deferred()

        def run() -> None:
            try:
                result = function(*args)
            except PowerCut:
                self.crash()
                raise
            _Mortal(self, self._clock).callLater(self._rng.random() * 0.001, done.callback, result)

        _Mortal(self, self._clock).callLater(self._rng.random() * 0.002, run)
        return done

    def _upkeep(self) -> None:
        """What the keeper does on a real disk: room ahead, and a snapshot now and then,
        never ahead of what is durable.
        """
        if self.log.wants_room and not self.log.busy:
            self.log.reserve()
        if self._snapshot is not None:
            position, rows = self._snapshot
            if position <= self.log.durable:
                write_snapshot(self.disk, DATA, self.log.log_id, position, rows)
                self._snapshot = None
        elif self._rng.random() < 0.1:
            self._snapshot = (self.log.end, dumped(self.engine.state))

    def cut_a_connection(self) -> None:
        alive = [link for link in self._links if link.connected]
        if alive:
            self._rng.choice(alive).cut()

    def crash(self) -> None:
        """Everything in memory is gone at once."""
        if not self.alive:
            return
        self.alive = False
        for link in self._links:
            if link.connected:
                link.vanish()

    def _failed(self, failure: Failure) -> None:
        self.failure = self.failure or failure


class _Mortal:
    """The clock, for what ends with the node."""

    def __init__(self, node: Node, clock: Clock) -> None:
        self._node, self._clock = node, clock

    def seconds(self) -> float:
        return self._clock.seconds()

    def callLater(self, delay: float, function: Callable[..., object], *args: object) -> Any:
        def run() -> None:
            if self._node.alive:
                function(*args)

        return self._clock.callLater(delay, run)


class _Slow(_Mortal):
    """The clock of whoever does one step after the other: much happens between two of
    them.
    """

    def __init__(self, node: Node, clock: Clock, rng: Random) -> None:
        super().__init__(node, clock)
        self._rng = rng

    def callLater(self, delay: float, function: Callable[..., object], *args: object) -> Any:
        return super().callLater(delay + self._rng.random() * 0.01, function, *args)


class _MortalResolver:
    """The database's answers, for a broker that is still there to hear them."""

    def __init__(self, node: Node, resolving: Resolves) -> None:
        self._node, self._resolving = node, resolving
        self.knows, self.status = resolving.knows, resolving.status

    def ask(self, token: bytes, row: Transaction, answered: Callable[..., None]) -> None:
        def hear(*answer: object) -> None:
            if self._node.alive:
                answered(*answer)

        self._resolving.ask(token, row, hear)


def dumped(state: State) -> list[tuple[str, bytes, bytes]]:
    """All rows, as LMDB would hold them."""
    machine.save(state)
    return [
        (name, key, msgpack.packb(row))
        for name in NAMES
        for key, row in state.tables[name].range(b"")
    ]


def recover(disk: SimFS, now: int) -> tuple[Log, State]:
    """The log and the state of a disk, by the same steps as
    `txmq.broker.data_directory.storage`, with tables in memory.
    """
    log_id = read_log_id(disk, DATA)
    tables, position = MemoryTables(), 0
    if log_id is not None:
        snapshot = newest_snapshot(disk, DATA, log_id)
        if snapshot is not None:
            position = snapshot.position
            for name, key, row in read_rows(disk, snapshot):
                tables[name].put(key, msgpack.unpackb(row, use_list=False))
    log, _report = Log.open(
        disk,
        DATA,
        now=now,
        known=Known(position, position, position),
        segment_size=SEGMENT,
        preallocate=PREALLOCATE,
    )
    state = machine.load(tables)
    roll_forward(state, log, position)
    return log, state


def without_boot(rows: list[tuple[str, bytes, bytes]]) -> list[tuple[str, bytes, bytes]]:
    """Rows but for the counters of the broker itself."""
    return [row for row in rows if row[0] != META]
