"""Lives of a local store, and a check of its promises after each crash.

What was acknowledged is there, in the state that was acknowledged; what was not may be
there in part, as the beginning of what was asked for. Keys keep their order.

A copy of the files at some moment is what a killed process leaves. After a power cut,
what was not synced is missing from the end of the write-ahead log, or is garbage.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.recover.local.model import (
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
from tests.recover.local.stores import FAILURE, OWNER, message, open_store
from txmq.errors import TxmqError
from txmq.model.retry import FailureReport
from txmq.recover.local import Change, LocalStore, State, StoredMessage, StoreReport, store_path
from txmq.recover.local.database import Database

STUCK = 1 << 40  # due time of what stays
HELD = 5  # messages, about, that a life has in its store
FULL = 2  # PRAGMA synchronous


@dataclass
class History:
    """Steps that a store was asked to do, and how many of them it has acknowledged."""

    steps: list[Step] = field(default_factory=list)
    acknowledged: int = 0

    def copy(self) -> History:
        return History(list(self.steps), self.acknowledged)


class Life:
    """A random life of a store, from opening to closing. `after_step` is called now and
    then.
    """

    def __init__(self, store: LocalStore, history: History, seed: int) -> None:
        self.store, self.history, self.rng = store, history, Random(seed)
        self.model = model_of(history.steps)
        self.after_step: Callable[[], object] = lambda: None

    def run(self, steps: int) -> None:
        more, fewer = [self.put] * 4, [self.record, self.forget] * 2
        always = [self.put, self.record, self.forget, self.tell]
        for _ in range(steps):
            self.rng.choice(always + (more if len(self.model.held) < HELD else fewer))()
            self.after_step()
        self.store.close()
        self.history.acknowledged = len(self.history.steps)

    def put(self) -> None:
        rng = self.rng
        stored = [
            (
                message(
                    rng.randrange(60),
                    rng.choice((None, "a", "a", "b")),
                    rng.choice((0, 0, 0, 1)),
                    rng.randbytes(rng.choice((0, 24, 300, 20_000))),
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
        self._do([told] if entries else [], lambda: self.store.told(entries))

    def forget(self) -> None:
        settled = [place for place, one in self.model.held.items() if one.state is not State.STORED]
        places = tuple(settled[: self.rng.randrange(1, 9)])
        self._do([Forget(places)] if places else [], lambda: self.store.forget(places))

    def _do(
        self, steps: Sequence[Step], call: Callable[[], object], *, durable: bool = False
    ) -> None:
        self.history.steps += steps
        call()
        for step in steps:
            self.model.do(step)
        if durable:
            self.history.acknowledged = len(self.history.steps)


class Files:
    """The files of an open database. Images of them go below `images`."""

    def __init__(self, database: Database, images: Path, *, checkpoint_pages: int) -> None:
        """Without checkpoints the write-ahead log only grows, and can be cut."""
        self.count = self.synced = 0
        self._database, self._images, self._grows = database, images, not checkpoint_pages
        self._log = Path(f"{database.file}-wal")
        database._connection.execute(f"PRAGMA wal_autocheckpoint={checkpoint_pages}")
        commit = database._commit

        def watched() -> None:
            [[how]] = database._connection.execute("PRAGMA synchronous")
            commit()
            if how == FULL and self._log.exists():
                self.synced = self._log.stat().st_size

        database._commit = watched  # type: ignore[method-assign]

    def image(self) -> Path:
        """Return a copy of the directory, as a killed process leaves it."""
        self.count += 1
        copy = self._images / str(self.count)
        for file in Path(self._database.path).rglob("*"):
            if file.is_file() and not file.name.endswith("-shm"):
                to = copy / file.relative_to(self._database.path)
                to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                shutil.copyfile(file, to)
        return copy

    def power_cut(self, rng: Random | None = None) -> Path:
        """Return a copy without some of what was not synced, or without all of it."""
        assert self._grows
        copy = self.image()
        log = copy / self._log.name
        if log.exists():
            data = log.read_bytes()
            kept, garbage = min(self.synced, len(data)), b""
            if rng is not None:
                kept = rng.randint(kept, len(data))
                garbage = rng.randbytes(rng.choice((0, len(data) - kept)))
            log.write_bytes(data[:kept] + garbage)
        return copy


def run_life(
    directory: Path,
    seed: int,
    steps: int,
    check: Callable[[Path, History], object],
    *,
    power_cuts: bool,
) -> int:
    """Live, and check an image after each step; return the number of images."""
    (directory / "live").mkdir(parents=True)
    store, _ = open_store(directory / "live")
    history, rng = History(), Random(seed)
    pages = 0 if power_cuts else 4
    files = Files(store._database, directory / "images", checkpoint_pages=pages)
    life = Life(store, history, seed)

    def look() -> None:
        image = files.power_cut(rng) if power_cuts else files.image()
        check(image, history.copy())

    life.after_step = look
    life.run(steps)
    return files.count


def open_image(image: Path) -> tuple[LocalStore, StoreReport]:
    """Open an image of a store's directory where an owner looks for it."""
    directory = image.with_name(f"{image.name}.opened")
    place = Path(store_path(str(directory / "stores"), OWNER))
    place.parent.mkdir(mode=0o700, parents=True)
    image.rename(place)
    return open_store(directory)


def steps_done(store: LocalStore, history: History) -> int:
    """Return how many steps led to what the store has; at least the acknowledged."""
    found, done = stored_contents(store), history.acknowledged
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


def check_recovery(image: Path, history: History) -> None:
    """Open what a crash left, and compare it with the history."""
    try:
        store, report = open_image(image)
    except TxmqError as error:
        raise AssertionError(f"a crash left what cannot be used: {error}") from error
    assert report.findings() == [], "a crash damages nothing"
    model = model_of(history.steps[: steps_done(store, history)])
    check_figures(store, model)
    check_hand_out(store, model.copy())
    store.close()
    shutil.rmtree(image.with_name(f"{image.name}.opened"))
