"""A broker on a simulated disk.

Sockets, clock, threads and LMDB are replaced; all other parts are the real ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
from twisted.internet.defer import Deferred

from tests.simulation.network import SimulatedConnection
from tests.store.simfs import PowerCut
from txmq.broker.assembly import Assembly
from txmq.broker.data_directory.storage import roll_forward
from txmq.broker.engine.engine import Engine
from txmq.broker.reactor.steady_clock import SteadyClock
from txmq.config.broker import load_broker
from txmq.core import machine
from txmq.model.units import SECOND
from txmq.store.log.integrity import KnownPositions
from txmq.store.log.log import Log
from txmq.store.log.segment import read_log_id
from txmq.store.snapshot import newest_snapshot, read_rows, write_snapshot
from txmq.store.tables import META, NAMES, MemoryTables

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from twisted.python.failure import Failure

    from tests.simulation.clock import SimulatedClock
    from tests.simulation.network import ClientConnection
    from tests.store.simfs import SimFS
    from txmq.broker.checkback.resolvers import Resolvers
    from txmq.core.state.state import State
    from txmq.core.transactions.model import Transaction

DATA = "/data"
SEGMENT, PREALLOCATE = 64 << 10, 8 << 10
EPOCH_US = 1_700_000_000_000_000
SETTINGS = load_broker(None, {"data": Path(DATA), "create_topics": True}).model_copy(
    update={
        "checks": load_broker(None, {"data": DATA}).checks.model_copy(
            update={"first_s": 0.15, "then_s": 0.15, "longest_s": 1.0}
        ),
        "retention": load_broker(None, {"data": DATA}).retention.model_copy(
            update={"every_s": 0.2, "letters_hours": 24.0}
        ),
        "consumers": load_broker(None, {"data": DATA}).consumers.model_copy(
            update={"lost_connection_grace_s": 0.1}
        ),
    }
)


class SimulatedBroker:
    """One life of the broker, from recovery to a crash."""

    def __init__(
        self,
        disk: SimFS,
        clock: SimulatedClock,
        rng: Random,
        resolvers: Resolvers,
        plant: Callable[[Engine], None] | None,
    ) -> None:
        self.disk, self._clock, self._rng = disk, clock, rng
        self.alive = True
        self.failure: Failure | None = None
        self._links: list[SimulatedConnection] = []
        self._snapshot: tuple[int, list[tuple[str, bytes, bytes]]] | None = None
        self.log, state = recover(disk, self.now())
        steady = SteadyClock(self.now, clock.seconds, state.stored_at)
        self.engine = Engine(
            self.log, state, clock=_BrokerClock(self, clock), now=steady, in_thread=self._in_thread
        )
        self.engine.on_failure = self._failed
        if plant is not None:
            plant(self.engine)
        self.engine.boot("sim", self.now())
        self._assembly = Assembly(
            self.engine,
            SETTINGS,
            _BrokerClock(self, clock),
            _BrokerResolvers(self, resolvers),
            rng,
            steady,
        )
        self._assembly._publication._clock = _SlowBrokerClock(self, clock, rng)
        self._assembly.add_timer(0.1, self._upkeep)
        self._assembly.add_timer(0.1, self._assembly._policies.tick)  # a run takes seconds
        self._assembly.start(self._failed)

    def now(self) -> int:
        """Return the wall clock in microseconds."""
        return EPOCH_US + int(self._clock.seconds() * SECOND) - self._clock.put_back

    def confirm_clock(self) -> None:
        """Let an operator confirm the clock of the machine."""
        self._assembly.clock.confirm("sim")

    def accept(self, peer: ClientConnection) -> SimulatedConnection:
        session = self._assembly.sessions.accept()
        link = SimulatedConnection(self._clock, self._rng, session, peer)
        self._links.append(link)
        return link

    def _in_thread(self, function: Callable[..., Any], *args: object) -> Deferred[Any]:
        """Run a function at once or a little later, and return its result later still,
        as a thread pool does.
        """
        done: Deferred[Any] = Deferred()

        def run() -> None:
            try:
                result = function(*args)
            except PowerCut:
                self.crash()
                raise
            _BrokerClock(self, self._clock).callLater(
                self._rng.random() * 0.001, done.callback, result
            )

        _BrokerClock(self, self._clock).callLater(self._rng.random() * 0.002, run)
        return done

    def _upkeep(self) -> None:
        """Write snapshots, as the storage service does.

        A snapshot is never ahead of the durable log.
        """
        if self._snapshot is not None:
            position, rows = self._snapshot
            if position <= self.log.durable:
                write_snapshot(self.disk, DATA, self.log.log_id, position, rows)
                self._snapshot = None
        elif self._rng.random() < 0.1:
            self._snapshot = (self.log.end, dump_tables(self.engine.state))

    def cut_a_connection(self) -> None:
        alive = [link for link in self._links if link.connected]
        if alive:
            self._rng.choice(alive).cut()

    def crash(self) -> None:
        """End this life of the broker; everything in memory is lost."""
        if not self.alive:
            return
        self.alive = False
        for link in self._links:
            if link.connected:
                link.vanish()

    def _failed(self, failure: Failure) -> None:
        self.failure = self.failure or failure


class _BrokerClock:
    """The clock for calls that a crash of the broker cancels."""

    def __init__(self, broker: SimulatedBroker, clock: SimulatedClock) -> None:
        self._broker, self._clock = broker, clock

    def seconds(self) -> float:
        return self._clock.seconds()

    def callLater(self, delay: float, function: Callable[..., object], *args: object) -> Any:
        def run() -> None:
            if self._broker.alive:
                function(*args)

        return self._clock.callLater(delay, run)


class _SlowBrokerClock(_BrokerClock):
    """A clock that delays the steps of background work, so that much happens between
    two of them.
    """

    def __init__(self, broker: SimulatedBroker, clock: SimulatedClock, rng: Random) -> None:
        super().__init__(broker, clock)
        self._rng = rng

    def callLater(self, delay: float, function: Callable[..., object], *args: object) -> Any:
        return super().callLater(delay + self._rng.random() * 0.01, function, *args)


class _BrokerResolvers:
    """The answers of the database, which a crashed broker does not receive."""

    def __init__(self, broker: SimulatedBroker, resolvers: Resolvers) -> None:
        self._broker, self._resolvers = broker, resolvers
        self.may_resolve, self.status = resolvers.may_resolve, resolvers.status
        self.lease_of, self.note_bundle = resolvers.lease_of, resolvers.note_bundle
        self.left_behind, self.reports = resolvers.left_behind, resolvers.reports

    def resolve(self, token: bytes, row: Transaction, answered: Callable[..., None]) -> None:
        def hear(*answer: object) -> None:
            if self._broker.alive:
                answered(*answer)

        self._resolvers.resolve(token, row, hear)


def dump_tables(state: State) -> list[tuple[str, bytes, bytes]]:
    """Return all rows of the state, as LMDB would hold them."""
    machine.save(state)
    return [
        (name, key, msgpack.packb(row))
        for name in NAMES
        for key, row in state.tables[name].range(b"")
    ]


def recover(disk: SimFS, now: int) -> tuple[Log, State]:
    """Recover the log and the state from a disk.

    The steps are those of `txmq.broker.data_directory.storage`, with tables in memory.
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
        positions=KnownPositions(position, position, position),
        segment_size=SEGMENT,
        preallocate=PREALLOCATE,
    )
    state = machine.load(tables)
    roll_forward(state, log, position)
    return log, state


def without_broker_counters(rows: list[tuple[str, bytes, bytes]]) -> list[tuple[str, bytes, bytes]]:
    """Return the rows without the counters of the broker itself, which each start
    changes.
    """
    return [row for row in rows if row[0] != META]
