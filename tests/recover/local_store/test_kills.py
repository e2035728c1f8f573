"""SIGKILL at each named place of the local store, in a real process on a real disk."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.recover.local_store.harness import SIZES, History, Life, model_of, steps_done
from tests.recover.local_store.model import check_figures, check_hand_out, stored_contents
from tests.recover.local_store.stores import LIMITS, OWNER, Clock
from txmq.crashpoints import VARIABLE
from txmq.recover import local_store
from txmq.recover.local_store import LocalStore, StoreReport
from txmq.recover.local_store.index import LmdbIndex
from txmq.store.filesystem import RealFileSystem
from txmq.testing.forked import Forked
from txmq.testing.wait import PATIENCE_S

SEED = 22
# which time the process gets there
POINTS = {
    "local_store.before_identity": 1,
    "local_store.after_identity": 1,
    "local_store.before_log": 1,
    "local_store.before_write": 20,
    "local_store.before_fsync": 20,
    "local_store.after_fsync": 20,
    "local_store.before_index_commit": 3,
    "local_store.after_index_commit": 3,
    "local_store.before_relocation": 2,
    "local_store.after_relocation": 2,
    "local_store.before_removal": 2,
    "local_store.after_removal": 2,
}


class Journal(History):
    """A history that another process can read after the death of this one."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in {"steps", "acknowledged"} and hasattr(self, "index"):
            self.path.write_bytes(pickle.dumps((self.steps, self.acknowledged)))


def open_real(directory: str) -> tuple[LocalStore, StoreReport]:
    """Open a store of small sizes in a directory."""
    index = LmdbIndex(directory)
    return LocalStore.open_at(
        RealFileSystem(), directory, OWNER, LIMITS, index, sizes=SIZES, now=Clock()
    )


def live(directory: str, journal: str) -> None:
    """Run the life of a store, up to the crash point that the environment names."""
    store, _ = open_real(directory)
    Life(store, Journal(journal), SEED).run(60)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_there_loses_nothing(point: str, tmp_path: Path) -> None:
    directory, journal = tmp_path / "store", tmp_path / "journal"
    place = f"{point}:{POINTS[point]}"
    process = Forked(
        live,
        (str(directory), str(journal)),
        out=tmp_path / "out",
        err=tmp_path / "err",
        environment={**os.environ, VARIABLE: place},
    )
    assert process.wait(PATIENCE_S) == -signal.SIGKILL, (tmp_path / "err").read_text("utf-8")
    history = History()
    if journal.exists():
        history.steps, history.acknowledged = pickle.loads(journal.read_bytes())
    assert (history.acknowledged > 0) == (POINTS[point] > 1)
    from_log = tmp_path / "from_log"
    shutil.copytree(directory, from_log)
    shutil.rmtree(from_log / "index", ignore_errors=True)
    rebuilt, _ = open_real(str(from_log))
    store, report = open_real(str(directory))
    assert report.damages + report.unnamed + report.returned == ()
    assert stored_contents(store._state) == stored_contents(rebuilt._state)
    model = model_of(history.steps[: steps_done(store, history)])
    check_figures(store, model)
    check_hand_out(store, model)
    store.close()
    rebuilt.close()


def test_each_named_place_is_killed_at_once() -> None:
    sources = Path(local_store.__file__).parent.glob("*.py")
    named = {
        name
        for source in sources
        for name in re.findall(r'crashpoint\("([\w.]+)"\)', source.read_text("utf-8"))
    }
    assert named == POINTS.keys()
