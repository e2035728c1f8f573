"""The state against a model: order of keys, counts, what is due, what is untold."""

from __future__ import annotations

from random import Random

import pytest

from tests.recover.local_store.harness import History, Life, new_disk, open_sim
from tests.recover.local_store.model import check_figures, check_hand_out, contents, stored_contents
from txmq.recover.local_store.state import NAMES


@pytest.mark.parametrize("seed", range(6))
def test_the_state_is_that_of_the_model_after_each_step(seed: int) -> None:
    history = History()
    store, _ = open_sim(new_disk(), history.index)
    life = Life(store, history, seed)
    rng = Random(seed)
    for _ in range(120):
        rng.choice([life.put, life.put, life.record, life.tell, life.forget])()
        assert stored_contents(store._state) == contents(life.model)
        check_figures(store, life.model)
    check_hand_out(store, life.model)
    store.close()


def test_an_empty_store_has_no_rows() -> None:
    history = History()
    store, _ = open_sim(new_disk(), history.index)
    life = Life(store, history, 3)
    for _ in range(40):
        life.put()
    store.forget([place for place, _ in store._state.rows()])
    rows = {name: list(store._index[name].range(b"")) for name in NAMES}
    assert {name for name, found in rows.items() if found} <= {"meta"}
    assert store.stats()[:4] == (0, 0, 0, 0)
    store.close()
