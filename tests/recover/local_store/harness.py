"""Lives of a local store on a simulated disk, and a check of its promises.

What was acknowledged is there, in the state that was acknowledged; what was not may be
there in part, as the beginning of what was asked for. Keys keep their order. The index
holds what the log makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from uuid import UUID

from tests.recover.local_store.model import (
    Contents,
    Forget,
    Model,
    Put,
    Step,
    Told,
    check_figures,
    check_hand_out,
    contents,
    stored_contents,
)
from tests.recover.local_store.stores import FAILURE, LIMITS, OWNER, Clock, message
from txmq.errors import DiskFull, StoreError, TxmqError
from txmq.model.retry import FailureReport
from txmq.recover.local_store import Change, LocalStore, State, StoredMessage, StoreReport
from txmq.recover.local_store.opening import Sizes
from txmq.recover.local_store.state import NAMES
from txmq.store.filesystem import FileSystem
from txmq.store.index.lmdb_tables import FrozenOverlays
from txmq.store.tables import MemoryTable, Row
from txmq.testing.simfs import SimFS, crash_points

PATH = "/srv/stores/billing/orders@5"
SIZES = Sizes(segment=1280, step=512, ballast=4096, behind=3000, rows=40)
STUCK = 1 << 40  # due time of what stays
HELD = 5  # messages, about, that a life has in its store
Rows = dict[str, dict[bytes, Row]]


@dataclass
class SimIndex:
    """Indexes as LMDB keeps them: the newest commits may be undone by a power cut."""

    commits: list[tuple[int, Rows]] = field(default_factory=list)

    def __call__(self, store_id: UUID, *, discard: str) -> tuple[SimTables, str]:
        if discard:
            self.commits = []
        return SimTables(self), discard

    def seal(self) -> None:
        """Nothing needs it here."""

    def discard(self) -> None:
        self.commits = []

    def copy(self) -> SimIndex:
        return SimIndex(list(self.commits))

    def crash(self, rng: Random) -> SimIndex:
        kept = max(0, len(self.commits) - rng.choice((0, 0, 1, 2)))
        return SimIndex([] if rng.random() < 0.15 else self.commits[:kept])


class Frozen(FrozenOverlays):
    """Tables as of a position."""

    def __init__(self, position: int, contents: Rows) -> None:
        super().__init__(position, {})
        self.contents = contents


class SimTables:
    """Tables in memory that are committed to a `SimIndex`."""

    def __init__(self, index: SimIndex) -> None:
        self._index = index
        self.position, rows = index.commits[-1] if index.commits else (0, {})
        self.tables = {name: CountedTable(rows.get(name, {})) for name in NAMES}

    def __getitem__(self, name: str) -> CountedTable:
        return self.tables[name]

    @property
    def overlay_rows(self) -> int:
        return sum(table.changed for table in self.tables.values())

    def freeze(self, position: int) -> Frozen:
        for table in self.tables.values():
            table.changed = 0
        return Frozen(position, self.rows())

    def commit(self, frozen: FrozenOverlays, *, durable: int) -> None:
        assert isinstance(frozen, Frozen)
        if durable < frozen.position:
            raise StoreError(f"{frozen.position} would lead the log, durable up to {durable}")
        self._index.commits.append((frozen.position, dict(frozen.contents)))
        self.position = frozen.position

    def release(self, frozen: FrozenOverlays) -> None:
        """Nothing is kept twice here."""

    def close(self) -> None:
        """Nothing is open."""

    def rows(self) -> Rows:
        return {name: dict(table.range(b"")) for name, table in self.tables.items()}


class CountedTable(MemoryTable):
    """A table that counts its changes."""

    def __init__(self, rows: dict[bytes, Row]) -> None:
        super().__init__()
        for key, row in rows.items():
            self.put(key, row)
        self.changed = 0

    def put(self, key: bytes, row: Row) -> None:
        super().put(key, row)
        self.changed = getattr(self, "changed", 0) + 1

    def delete(self, key: bytes) -> None:
        super().delete(key)
        self.changed += 1


@dataclass
class History:
    """Steps that a store was asked to do, how many of them it has acknowledged, and its
    index.
    """

    steps: list[Step] = field(default_factory=list)
    acknowledged: int = 0
    index: SimIndex = field(default_factory=SimIndex)

    def copy(self) -> History:
        return History(list(self.steps), self.acknowledged, self.index.copy())


def new_disk(capacity: int | None = None) -> SimFS:
    fs = SimFS(capacity=capacity)
    fs.makedirs(PATH)
    return fs.copy()


def open_sim(fs: FileSystem, index: SimIndex) -> tuple[LocalStore, StoreReport]:
    return LocalStore.open_at(fs, PATH, OWNER, LIMITS, index, sizes=SIZES, now=Clock())


class Life:
    """A random life of a store, from opening to closing. On a full disk it goes on."""

    def __init__(self, store: LocalStore, history: History, seed: int) -> None:
        self.store, self.history, self.rng = store, history, Random(seed)
        self.model = model_of(history.steps)

    def run(self, steps: int) -> None:
        more, fewer = [self.put] * 4, [self.record, self.forget] * 2
        always = [self.put, self.record, self.forget, self.tell]
        for _ in range(steps):
            with suppress(DiskFull):
                self.rng.choice(always + (more if len(self.model.held) < HELD else fewer))()
        everything = self.store._log.end
        self.store.close()
        if self.store._log.durable == everything:
            self.history.acknowledged = len(self.history.steps)

    def put(self) -> None:
        rng = self.rng
        stored = [
            (
                message(
                    rng.randrange(60),
                    rng.choice((None, "a", "a", "b")),
                    rng.choice((0, 0, 0, 1)),
                    rng.randbytes(rng.choice((0, 24, 300, 700))),
                ),
                rng.randrange(1_000),
                FAILURE if rng.random() < 0.5 else FailureReport(),
            )
            for _ in range(rng.randrange(1, 4))
        ]
        if not self.history.steps:  # one that is stuck, with a key and followers
            stored = [(message(offset, "stuck"), STUCK, FAILURE) for offset in (70, 71)]
        self._do([Put(one) for one in stored], lambda: self.store.put(stored), durable=True)

    def record(self) -> None:
        self.settle(self.changes(self.store.due(self.rng.choice((300, 1_000)), 5)))

    def changes(self, due: Sequence[StoredMessage]) -> list[Change]:
        """Return random outcomes."""
        rng = self.rng
        return [
            Change(
                one.place,
                rng.choice((State.ACKED, State.ACKED, State.STORED, State.DEAD, State.RETURNED)),
                one.attempt + 1,
                rng.randrange(1_000),
                FAILURE if rng.random() < 0.5 else FailureReport(),
            )
            for one in due
        ]

    def settle(self, changes: list[Change]) -> None:
        self._do(changes, lambda: self.store.record(changes), durable=bool(changes))

    def tell(self) -> None:
        entries = self.store.untold(self.rng.randrange(1, 9))
        told = Told(tuple((e.place, e.state, e.attempt, e.due) for e in entries))
        self._do([told] if entries else [], lambda: self.store.told(entries), durable=False)

    def forget(self) -> None:
        settled = [place for place, one in self.model.held.items() if one.state is not State.STORED]
        places = tuple(settled[: self.rng.randrange(1, 9)])
        self._do([Forget(places)] if places else [], lambda: self.store.forget(places))

    def _do(
        self, steps: Sequence[Step], call: Callable[[], object], *, durable: bool = False
    ) -> None:
        self.history.steps += steps
        before = self.store._log.end
        try:
            call()
        except DiskFull:
            if self.store._log.end == before:  # refused
                del self.history.steps[len(self.history.steps) - len(steps) :]
                raise
            durable = False
        for step in steps:
            self.model.do(step)
        if durable:
            self.history.acknowledged = len(self.history.steps)


def run_life(fs: SimFS, history: History, *, seed: int, steps: int = 60) -> None:
    store, _ = open_sim(fs, history.index)
    Life(store, history, seed).run(steps)


def steps_done(store: LocalStore, history: History) -> int:
    """Return how many steps led to what the store has; at least the acknowledged."""
    found, done = stored_contents(store._state), history.acknowledged
    model = model_of(history.steps[:done])
    while contents(model) != found:
        assert done < len(history.steps), "lost, or invented"
        model.do(history.steps[done])
        done += 1
    return done


def model_of(steps: Sequence[Step]) -> Model:
    model = Model()
    for step in steps:
        model.do(step)
    return model


def check_recovery(fs: SimFS, history: History) -> None:
    """Open what a crash left, and compare it with the history, which then is what was
    found.
    """
    try:
        _check_recovery(fs, history)
    except TxmqError as error:
        raise AssertionError(f"a crash left what cannot be used: {error}") from error


def _check_recovery(fs: SimFS, history: History) -> None:
    from_log, rows_from_log = contents_of(fs.copy(), SimIndex())
    store, report = open_sim(fs, history.index.copy())
    assert report.damages + report.unnamed + report.returned == (), "a crash damages nothing"
    found = stored_contents(store._state)
    assert found == from_log, "the index and the log differ"
    tables = store._index
    assert isinstance(tables, SimTables)
    store._state.save()
    assert tables.rows() == rows_from_log, "the index is not what the log makes of it"
    model = model_of(history.steps[: steps_done(store, history)])
    check_figures(store, model)
    check_hand_out(store, model.copy())
    store.close()


def contents_of(fs: SimFS, index: SimIndex) -> tuple[Contents, Rows]:
    """Return what a store has, and its tables; the disk is not used any more."""
    store, _ = open_sim(fs, index)
    found = stored_contents(store._state)
    store._state.save()
    tables = store._index
    assert isinstance(tables, SimTables)
    return found, tables.rows()


def check_power_cuts(run: Callable[[SimFS, History], None], *, images: int) -> int:
    """Cut the power at every change of `run`, and check several possible disks each
    time, and that of a process which was killed. Returns the number of disks.
    """
    checked = 0
    for change, (fs, history) in enumerate(crash_points(new_disk(), run, History)):
        rng = Random(change)
        for _ in range(images):
            image = history.copy()
            image.index = history.index.crash(rng)
            check_recovery(fs.crash(rng), image)
            checked += 1
        check_recovery(fs.restart().copy(), history.copy())
        checked += 1
    return checked
