"""SIGKILL at each named place of the local store, in a real process on a real disk."""

from __future__ import annotations

import os
import pickle
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.recover.local.harness import History, Life, model_of, steps_done
from tests.recover.local.model import check_figures, check_hand_out
from tests.recover.local.stores import open_store
from txmq.crashpoints import VARIABLE
from txmq.recover import local
from txmq.testing.forked import Forked
from txmq.testing.wait import PATIENCE_S

SEED = 22
# which time the process gets there
POINTS = {
    "local_store.before_create": 1,
    "local_store.after_create": 1,
    "local_store.before_commit": 20,
    "local_store.after_commit": 20,
}


class Journal(History):
    """A history that another process can read after the death of this one."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in {"steps", "acknowledged"} and hasattr(self, "acknowledged"):
            self.path.write_bytes(pickle.dumps((self.steps, self.acknowledged)))


def live(directory: str, journal: str) -> None:
    """Run the life of a store, up to the crash point that the environment names."""
    store, _ = open_store(Path(directory))
    Life(store, Journal(journal), SEED).run(60)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_there_loses_nothing(point: str, tmp_path: Path) -> None:
    directory, journal = tmp_path / "directory", tmp_path / "journal"
    directory.mkdir()
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
    store, report = open_store(directory)
    assert report.findings() == []
    model = model_of(history.steps[: steps_done(store, history)])
    check_figures(store, model)
    check_hand_out(store, model)
    store.close()


def test_each_named_place_is_killed_at_once() -> None:
    sources = Path(local.__file__).parent.glob("*.py")
    named = {
        name
        for source in sources
        for name in re.findall(r'crashpoint\("(local_store[\w.]+)"\)', source.read_text("utf-8"))
    }
    assert named == POINTS.keys()
