"""The letters of benchmarks: computed rows are those that deaths make."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

from tests.bench import many_letters
from tests.bench.data_directories import Filler, filling
from tests.bench.letters import SPAN, Die
from tests.bench.many_letters import BATCH, GROUP, PARTITIONS, TOPIC
from txmq.core.consumers.candidates import FetchLimits
from txmq.core.consumers.commands import CandidateRead, Deliver, JoinGroup
from txmq.core.consumers.fetch_choice import choose_candidates
from txmq.core.state.state import State
from txmq.core.topics.topics import CreateTopic
from txmq.model.retry import FailureReport
from txmq.store import tables as t

MADE = (t.FAILED, t.LETTERS, t.LETTER_INDEX, t.LETTER_CELLS)
COUNT = 2_600  # some partitions have two batches, and the last batch is not full
FIRST_AT = 1_700_000_000_000_000


def test_computed_letters_have_the_rows_of_letters_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_letters, "KEYS", 70)
    monkeypatch.setattr(many_letters, "PRINTS", 30)
    with filling(tmp_path / "died") as filler:
        filler.submit([CreateTopic(TOPIC, PARTITIONS)])
        filler.submit([JoinGroup(GROUP, "m", "m", "concurrent", (TOPIC,))])
        for number, batch in enumerate(many_letters.batches(COUNT)):
            filler.submit([batch])
            let_die(filler, number)
        letters = many_letters.letters_in(filler.engine.state, COUNT, FIRST_AT)
        computed = list(letters.rows())
        for table in MADE:
            rows = [
                (key, msgpack.unpackb(row, use_list=False))
                for name, key, row in computed
                if name == table
            ]
            assert rows == rows_of(filler.engine.state, table), table


@pytest.mark.parametrize("lean", [False, True])
def test_a_directory_of_computed_letters_is_opened_as_one_of_a_broker(
    tmp_path: Path, *, lean: bool
) -> None:
    many_letters.make(tmp_path / "data", COUNT, lean=lean)
    with filling(tmp_path / "data") as filler:
        group = filler.engine.state.groups.by_name[GROUP]
        assert (group.letters, group.next_letter) == (COUNT, COUNT + 1)
        assert len(rows_of(filler.engine.state, t.LETTERS)) == COUNT


def let_die(filler: Filler, batch: int) -> None:
    """Deliver a batch, and let all its messages die."""
    engine, first = filler.engine, batch * BATCH
    state, limits = engine.state, FetchLimits(BATCH, 1 << 30)
    generation = state.groups.by_name[GROUP].generation
    found = choose_candidates(state, GROUP, "m", generation, engine.store.durable, limits, FIRST_AT)
    reads = tuple(CandidateRead(candidate) for candidate in found.candidates)
    filler.submit([Deliver(GROUP, "m", generation, reads)])
    step = SPAN // COUNT
    deaths = tuple(
        (
            number - first,
            many_letters.key_of(number).hashed,
            FIRST_AT + number * step,
            FailureReport(
                many_letters.error_of(number),
                many_letters.text_of(number, lean=False),
                many_letters.print_of(number),
            ),
        )
        for number in range(first, min(COUNT, first + BATCH))
    )
    filler.submit([Die(GROUP, reads[0].candidate, deaths)])


def rows_of(state: State, table: str) -> list[tuple[bytes, object]]:
    return list(state.tables[table].range(b""))
