"""Large bundles: stored by parts, published by pieces, visible whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.core.driver import Driver, token
from tests.core.due import due_checks
from tests.core.transactions.test_decisions import LOCAL, POSTGRES, decide
from txmq.broker.engine.log_reader import visible_end
from txmq.core.events.base import Booted
from txmq.core.persistence import load, save
from txmq.core.state import visibility
from txmq.core.state.visibility import offset_at_time
from txmq.core.topics import key_order
from txmq.core.topics.key_order import UnplacedBatch
from txmq.core.topics.topics import CreateTopic, DeleteTopic
from txmq.core.transactions import half_storage, indexes, jobs, large_bundles, timers
from txmq.core.transactions.model import OUTCOME_RETENTION, get
from txmq.errors import BadRequest, Conflict, MessageTooLarge
from txmq.model import limits
from txmq.model.bundle import BundleState, DecideReceipt
from txmq.model.decider import ByChecker, ByJob, Decider
from txmq.model.message import Decision
from txmq.model.units import SECOND
from txmq.store.tables import BACKLOG, HOLDS, JOB_PARTS, JOB_WORK, NAMES, PIECES, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKER = ByChecker("c")
PARTITIONS = 3


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Cut pieces of two keys, so that a few messages make a large bundle."""
    monkeypatch.setattr(large_bundles, "KEYS_PER_PIECE", 2)
    driver = Driver()
    driver.do(CreateTopic("t", PARTITIONS))
    yield driver
    assert rows_of(driver.replayed()) == rows_of(driver.state)
    assert rows_of(load(driver.state.tables)) == rows_of(driver.state)


def rows_of(state: Any) -> list[tuple[str, bytes, Any]]:
    save(state)
    counted = ("", b"", (state.held_keys, state.undecided, state.backlog, state.barriers))
    return [counted] + [(name, *item) for name in NAMES for item in state.tables[name].range(b"")]


def sends(number: int, *keys: str) -> list[tuple[str, int, str | None, str]]:
    return [("t", place % PARTITIONS, key, f"{number}:{key}") for place, key in enumerate(keys)]


def large(
    core: Driver,
    number: int,
    *keys: str,
    decider: Any = POSTGRES,
    sealed: bool = True,
    each: int = 2,
) -> bytes:
    """Store a bundle in parts of `each` messages."""
    name, rows = token(core, number), sends(number, *keys)
    starts = range(0, len(rows), each)
    for part, start in enumerate(starts):
        last = sealed and start + each >= len(rows)
        core.store(
            name,
            rows[start : start + each],
            decider,
            part=part,
            sealed=last,
            commit=last and decider == LOCAL,
        )
    return name


def seen(core: Driver) -> list[str]:
    return sorted(body for partition in range(PARTITIONS) for body in core.bodies("t", partition))


def state_of(core: Driver, name: bytes) -> BundleState:
    row = get(core.state, name)
    assert row is not None
    return row.state


def nothing_left(core: Driver) -> bool:
    return not any(list(core.state.tables[name].range(b"")) for name in (HOLDS, BACKLOG, UNDECIDED))


def test_a_large_bundle_is_decided_in_one_record_and_visible_whole_after_its_last_piece(
    core: Driver,
) -> None:
    name = large(core, 1, *"abcdefg")
    recorded = len(core.log)
    assert decide(core, name) == DecideReceipt(BundleState.COMMITTED, repeated=False)
    assert len(core.log) == recorded + 1
    while core.advance():
        whole = state_of(core, name) is BundleState.PUBLISHED
        assert seen(core) == ([f"1:{key}" for key in "abcdefg"] if whole else [])
    assert len(seen(core)) == 7
    assert nothing_left(core)


def test_sizes_are_those_of_a_state_that_was_saved_between_two_pieces(core: Driver) -> None:
    name = large(core, 1, *"abcdef")
    decide(core, name)
    while core.advance():
        rows_of(core.state)  # saved
        tables = load(core.state.tables)
        assert tables.topics["t"].partition_bytes == core.state.topics["t"].partition_bytes
    assert all(core.state.topics["t"].partition_bytes)


def test_the_visibility_barrier_stands_until_the_last_record_is_durable(core: Driver) -> None:
    name = large(core, 1, *"abcd")
    decide(core, name)
    core.work_off()
    topic = core.state.topics["t"].topic_id
    last = core.log[-1][0]
    assert visible_end(core.state, topic, 0, last.end - 1) == 0
    assert visible_end(core.state, topic, 0, last.end) > 0
    core.record(Booted(2, "b"))
    assert not core.state.barriers


def test_what_others_send_meanwhile_has_its_place_and_is_seen_later(core: Driver) -> None:
    name = large(core, 1, *"abcdef")
    decide(core, name)
    while visibility.publishing_token(core.state) is None:
        core.advance()
    topic = core.state.topics["t"].topic_id
    assert core.send("t", "plain").offset == 2
    core.store(token(core, 2), [("t", 0, None, "x"), ("t", 1, None, "y")], LOCAL)
    assert seen(core) == []
    assert [visible_end(core.state, topic, n, core.end) for n in range(PARTITIONS)] == [0, 0, 0]
    assert offset_at_time(core.state, topic, 0, core.now + 1) == 0
    core.work_off()
    assert core.bodies("t") == ["1:a", "1:d", "plain", "x"]
    assert core.bodies("t", 1) == ["1:b", "1:e", "y"]


def test_a_bundle_published_across_a_visibility_barrier_is_not_seen_in_part(core: Driver) -> None:
    name = token(core, 1)
    for part in range(3):
        core.store(name, [("t", 0, f"k{part}", f"{part}")], POSTGRES, part=part, sealed=part == 2)
    decide(core, name)
    while visibility.publishing_token(core.state) is None:
        core.advance()
    core.store(token(core, 2), [("t", 2, None, "x"), ("t", 0, None, "y")], LOCAL)
    core.send("t", "behind x", partition=2)
    assert seen(core) == []
    core.work_off()
    assert (core.bodies("t"), core.bodies("t", 2)) == (["0", "1", "2", "y"], ["x", "behind x"])


def test_holds_are_taken_part_by_part_under_the_ticket_of_the_first(core: Driver) -> None:
    name = large(core, 1, "a", "b", sealed=False, each=1)
    assert core.send("t", "x", key="a").offset == -1
    assert core.send("t", "y", key="c", partition=2).offset == 0
    core.store(name, [("t", 0, "c", "1:c")], POSTGRES, part=2)
    assert core.send("t", "z", key="c").offset == -1
    decide(core, name)
    core.work_off()
    assert core.bodies("t") == ["1:a", "1:c", "x", "z"]
    assert nothing_left(core)


def test_a_large_bundle_waits_for_the_last_earlier_ticket_of_its_keys(core: Driver) -> None:
    early = [token(core, 10), token(core, 11)]
    for name, key in zip(early, "bf", strict=True):
        core.store(name, [("t", "abcdef".index(key) % PARTITIONS, key, f"early {key}")], POSTGRES)
    name = large(core, 1, *"abcdef")
    decide(core, name)
    core.work_off()
    assert core.state.backlog == 0
    decide(core, early[1], Decision.ROLLBACK)
    core.work_off()
    assert (seen(core), core.state.backlog) == ([], 0)
    decide(core, early[0])
    core.work_off()
    assert core.bodies("t", 1) == ["early b", "1:b", "1:e"]
    assert state_of(core, name) is BundleState.PUBLISHED
    assert nothing_left(core)


@pytest.mark.parametrize("outcome", [Decision.COMMIT, Decision.ROLLBACK])
def test_what_waited_behind_a_large_bundle_comes_after_it(core: Driver, outcome: Decision) -> None:
    first, second = large(core, 1, *"abcdef"), large(core, 2, *"abcdef")
    small = token(core, 3)
    core.store(small, sends(3, "a", "b"), POSTGRES)
    for name in (small, second):
        decide(core, name)
    core.send("t", "last", key="d")
    core.work_off()
    assert seen(core) == []
    decide(core, first, outcome)
    core.work_off()
    of_first = ["1:a", "1:d"] if outcome is Decision.COMMIT else []
    assert core.bodies("t") == [*of_first, "2:a", "2:d", "3:a", "last"] or core.bodies("t") == [
        *of_first, "2:a", "2:d", "last", "3:a",
    ]  # fmt: skip
    assert nothing_left(core)


def test_a_rolled_back_large_bundle_leaves_no_piece(core: Driver) -> None:
    name = large(core, 1, *"abcdef")
    decide(core, name, Decision.ROLLBACK)
    assert core.send("t", "x", key="a").offset == -1
    core.work_off()
    assert core.bodies("t") == ["x"]
    assert not list(core.state.tables[PIECES].range(b""))
    assert nothing_left(core)


def test_a_local_bundle_of_several_parts_is_committed_with_its_seal(core: Driver) -> None:
    name = large(core, 1, *"abcd", decider=LOCAL)
    assert state_of(core, name) is BundleState.COMMITTED
    assert core.send("t", "after", key="a").offset == -1
    core.work_off()
    assert core.bodies("t") == ["1:a", "1:d", "after"]


def test_a_local_bundle_waits_behind_a_half_of_one_of_its_keys(core: Driver) -> None:
    half = token(core, 9)
    core.store(half, [("t", 0, "d", "half")], POSTGRES)
    large(core, 1, *"abcd", decider=LOCAL)
    core.work_off()
    assert seen(core) == []
    decide(core, half)
    core.work_off()
    assert core.bodies("t") == ["half", "1:a", "1:d"]


def test_a_large_bundle_of_one_part_is_stored_in_pieces_too(core: Driver) -> None:
    name = large(core, 1, *"abcde", each=5)
    row = get(core.state, name)
    assert row is not None
    assert (row.batches, row.messages) == ((), 5)
    decide(core, name)
    core.work_off()
    assert len(seen(core)) == 5


def test_a_batch_with_more_keys_than_a_piece_goes_on_in_the_next() -> None:
    batch = UnplacedBatch(1, 0, 100, 80, 5, 1, (1, 2, 3, 4, 5))
    keyless = batch._replace(count=1, hashes=())
    cut = list(large_bundles.cut_into_pieces([batch, keyless, batch], 2))
    assert [[b.hashes for b in piece] for piece in cut] == [
        [(1, 2)], [(3, 4)], [(5,), ()], [(1, 2)], [(3, 4)], [(5,)],
    ]  # fmt: skip
    assert [b.count for piece in cut for b in piece] == [5, 0, 0, 1, 5, 0, 0]


def test_the_parts_again_get_the_same_answers(core: Driver) -> None:
    name = large(core, 1, *"abcd", sealed=False)
    recorded = len(core.log)
    assert core.store(name, sends(1, "a", "b"), POSTGRES, sealed=False).state is BundleState.OPEN
    assert len(core.log) == recorded
    core.store(name, sends(1, "e"), POSTGRES, part=2)
    for part in range(3):
        assert (
            core.store(name, sends(1, "e"), POSTGRES, part=part, sealed=part == 2).state
            is BundleState.UNDECIDED
        )
    decide(core, name)
    assert core.store(name, sends(1, "e"), POSTGRES, part=2).state is BundleState.COMMITTED


def test_an_open_bundle_is_undecided_can_be_rolled_back_and_not_committed(core: Driver) -> None:
    name = large(core, 1, *"abcd", sealed=False)
    assert (indexes.oldest_undecided(core.state), core.state.undecided) == (name, 1)
    refused = decide(core, name)
    assert type(refused) is Conflict
    decide(core, name, Decision.ROLLBACK)
    core.work_off()
    assert nothing_left(core)
    for part, last in ((2, False), (3, True)):
        late = core.store(name, sends(1, "e"), POSTGRES, part=part, sealed=last, digest=b"x" * 32)
        assert late.state is BundleState.ROLLED_BACK


@pytest.mark.parametrize("decider", [POSTGRES, CHECKER, LOCAL, ByJob(b"j" * 16)])
def test_an_open_bundle_is_due_some_time_after_its_latest_part(
    core: Driver, decider: Decider
) -> None:
    has_own_time = decider == POSTGRES or isinstance(decider, ByJob)
    wait = 6 * SECOND if has_own_time else half_storage.OPEN_TIMEOUT
    name = large(core, 1, *"abcd", decider=decider, sealed=False)
    core.now += wait // 2
    core.store(name, sends(1, "e"), decider, part=2, sealed=False, commit=False)
    assert list(due_checks(core.state, core.now + wait - 1, 9)) == []
    assert list(due_checks(core.state, core.now + wait, 9)) == [name]
    core.do(timers.PlanCheck(name, core.now + 2 * wait, 1, in_doubt=False))
    assert list(due_checks(core.state, core.now + wait, 9)) == []


def test_the_first_check_back_counts_from_the_seal(core: Driver) -> None:
    name = large(core, 1, *"abcd", decider=CHECKER, sealed=False)
    core.now += 20 * SECOND
    core.store(name, sends(1, "e"), CHECKER, part=2)
    assert list(due_checks(core.state, core.now + 6 * SECOND - 1, 9)) == []
    assert list(due_checks(core.state, core.now + 6 * SECOND, 9)) == [name]


def test_parts_that_could_not_be_are_refused(core: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    name = large(core, 1, *"ab", decider=LOCAL, sealed=False)
    assert type(core.store(name, sends(1, "c"), LOCAL, part=1, commit=False)) is BadRequest
    assert type(core.store(name, [], LOCAL, part=1, sealed=False, commit=False)) is BadRequest
    other = large(core, 2, *"ab", sealed=False)
    assert type(core.store(other, sends(2, "c"), POSTGRES, part=1, commit=True)) is BadRequest
    monkeypatch.setattr(limits, "PART_ROWS", 2)
    assert type(core.store(other, sends(2, *"cde"), POSTGRES, part=1)) is MessageTooLarge


def test_bundles_of_a_job_hold_their_keys_once_it_is_decided(core: Driver) -> None:
    job, half = token(core, 50), token(core, 9)
    bundles = [large(core, number, *"abcde", decider=ByJob(job)) for number in (1, 2)]
    assert not list(core.state.tables[HOLDS].range(b""))
    core.store(half, [("t", 0, "d", "half")], POSTGRES)
    core.do(jobs.DecideJob(job, Decision.COMMIT, (bundles[1], bundles[0]), "driver"))
    core.work_off()
    assert core.send("t", "after", key="d").offset == -1
    assert seen(core) == []
    decide(core, half)
    core.work_off()
    assert core.bodies("t") == ["half", "2:a", "2:d", "1:a", "1:d", "after"]
    assert nothing_left(core)


def test_a_bundle_in_parts_that_comes_after_its_job_is_rolled_back(core: Driver) -> None:
    job = token(core, 50)
    half_way = large(core, 1, *"abcd", decider=ByJob(job), sealed=False)
    core.do(jobs.DecideJob(job, Decision.COMMIT, (), "driver"))
    late = token(core, 2)
    for name, first in ((late, 0), (half_way, 2)):
        for part in range(first, first + 3):
            reply = core.store(name, sends(2, "a"), ByJob(job), part=part, sealed=part == first + 2)
            assert reply.state is BundleState.ROLLED_BACK
    core.work_off()
    assert nothing_left(core)


def test_a_topic_is_not_deleted_under_a_publication(core: Driver) -> None:
    job = token(core, 50)
    name = large(core, 1, *"abcde", decider=ByJob(job))
    core.do(jobs.DecideJob(job, Decision.COMMIT, (name,), "driver"))
    core.advance()
    assert type(core.do(DeleteTopic("t"))) is Conflict
    core.work_off()
    core.do(DeleteTopic("t"))
    assert "t" not in core.state.topics


def test_what_a_decision_sets_free_beyond_its_measure_is_for_the_backlog(
    core: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_order, "MAX_KEYS_PER_RELEASE", 3)
    first = token(core, 1)
    core.store(first, [("t", 0, "a", "first")], POSTGRES)
    for number in range(10):
        core.send("t", str(number), key="a")
    decide(core, first)
    assert 0 < len(seen(core)) < 11
    assert list(indexes.backlog_rows(core.state))
    core.work_off()
    assert core.bodies("t") == ["first", *map(str, range(10))]
    assert nothing_left(core)


def test_a_large_bundle_is_forgotten_with_all_its_pieces(core: Driver) -> None:
    name = large(core, 1, *"abcdef")
    decide(core, name)
    core.work_off()
    core.now += OUTCOME_RETENTION + SECOND
    core.sweep()
    assert get(core.state, name) is None
    assert not list(core.state.tables[PIECES].range(b""))


def test_a_job_of_very_many_bundles_is_carried_out_step_by_step(
    core: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BUNDLES_PER_STEP", 3)
    job, half = token(core, 900), token(core, 901)
    core.store(half, [("t", 0, "k5", "half")], POSTGRES)
    names = [token(core, number) for number in range(10)]
    for number, name in enumerate(names):
        core.store(name, [("t", 0, f"k{number}", str(number))], ByJob(job))
    several = large(core, 500, "k5", "x", "y", decider=ByJob(job))
    command = jobs.DecideJob(job, Decision.COMMIT, (names[7], *names[:7], several), "driver")
    assert [core.do(command).repeated for _ in range(2)] == [False, True]
    assert core.store(token(core, 600), sends(6, "z"), ByJob(job)).state is BundleState.ROLLED_BACK
    refused = decide(core, names[2], Decision.ROLLBACK)
    assert type(refused) is Conflict
    recorded = len(core.log)
    core.work_off()
    assert len(core.log) >= recorded + 4
    assert core.bodies("t") == list("7012346")
    assert [state_of(core, name) for name in names[8:]] == [BundleState.ROLLED_BACK] * 2
    decide(core, half)
    core.work_off()
    assert core.bodies("t") == [*"7012346", "half", "5", "500:k5"]
    assert nothing_left(core)
    assert not any(list(core.state.tables[name].range(b"")) for name in (JOB_PARTS, JOB_WORK))


def test_a_job_of_very_many_bundles_is_rolled_back_step_by_step(
    core: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BUNDLES_PER_STEP", 3)
    job, names = token(core, 900), [token(core, number) for number in range(7)]
    for number, name in enumerate(names):
        core.store(name, [("t", 0, f"k{number}", str(number))], ByJob(job))
    core.do(jobs.DecideJob(job, Decision.ROLLBACK, (), "driver"))
    core.work_off()
    assert {state_of(core, name) for name in names} == {BundleState.ROLLED_BACK}
    assert (core.bodies("t"), core.state.undecided) == ([], 0)
    assert not any(
        list(core.state.tables[name].range(b"")) for name in (JOB_PARTS, JOB_WORK, BACKLOG)
    )


def test_the_row_of_a_large_bundle_from_before_its_begun_position_is_read() -> None:
    row = (2, ((1, 0, 3, 3, 7, 0),), 3, 1)
    large = large_bundles.read_large(row)
    assert large is not None
    assert (large.done, large.begun) == (1, 0)
    assert large_bundles.read_large((*row, 900)) == large._replace(begun=900)
