"""Batched bundles and decisions: one record, with the results of single requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.driver import Driver, token
from txmq.batch import encode, verify
from txmq.core import machine
from txmq.core.events import base
from txmq.core.events.transactions import Decided, GroupsDecided, GroupsStored, PartStored
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions import batched, decisions
from txmq.core.transactions.half_storage import BundleBatch, StorePart
from txmq.core.transactions.model import get
from txmq.errors import Conflict, UnknownTopic, UnknownTransaction
from txmq.model.bundle import BundleReceipt, BundleState, DecideReceipt
from txmq.model.decider import ByBroker, ByForeign, ByJob, ByPostgres
from txmq.model.message import Decision, Message
from txmq.model.units import SECOND
from txmq.store.tables import HOLDS, UNDECIDED

POSTGRES = ByPostgres(1, 1, 5, 7, 1)
C, R = Decision.COMMIT, Decision.ROLLBACK


def bundle(
    core: Driver, number: int, *keys: str, topic: str = "t", decider: Any = POSTGRES, **fields: Any
) -> StorePart:
    name, batches = token(core, number), []
    for place, key in enumerate(keys):
        body = Message(f"{number}:{key}".encode(), key)
        data = encode([body], producer_id=name, epoch=0, sequence=place, born_at=core.now)
        batches.append(BundleBatch(topic, 0, 0, data, verify(data)))
    known: dict[str, Any] = {
        "sealed": True,
        "commit": False,
        "digest": b"d" * 32,
        "epoch": 0,
        "service": "s",
    }
    return StorePart(
        token=name, part=0, batches=tuple(batches), decider=decider,
        **{**known, "actions": (), "check_after": 6 * SECOND, **fields},
    )  # fmt: skip


def store(core: Driver, *bundles: StorePart) -> Any:
    return core.do(batched.StoreBundles(bundles))


def decide(core: Driver, *verdicts: tuple[int, Decision]) -> Any:
    chosen = tuple(
        decisions.DecideTransaction(token(core, number), outcome, "producer")
        for number, outcome in verdicts
    )
    return core.do(batched.DecideBundles(chosen))


def kinds(core: Driver) -> list[type]:
    return [type(event) for _place, event in core.log[1:]]


def states(core: Driver, *numbers: int) -> list[BundleState]:
    rows = [get(core.state, token(core, number)) for number in numbers]
    return [row.state for row in rows if row is not None]


def rows(core: Driver) -> dict[str, list[Any]]:
    """Return the state that recovery makes of the log."""
    state = core.replayed()
    machine.save(state)
    return {
        name: list(state.tables[name].range(b""))
        for name in ("transactions", "holds", "entries", "due", "listed")
    }


def alone(core: Driver, command: batched.StoreBundles | batched.DecideBundles) -> list[Any]:
    """Return the replies to the same commands one by one."""
    return [core.do(one) for one in command[0]]


def test_batched_bundles_are_one_record_and_hold_their_keys_in_their_order(
    core: Driver,
) -> None:
    receipts = store(core, bundle(core, 1, "a", "b"), bundle(core, 2, "a"), bundle(core, 3, "c"))
    assert receipts == [BundleReceipt(BundleState.UNDECIDED, 0)] * 3
    assert kinds(core) == [GroupsStored]
    assert [row for _key, (row, *_database) in core.state.tables[UNDECIDED].range(b"")] == [
        token(core, n) for n in (1, 2, 3)
    ]
    assert decide(core, (2, C)) == [DecideReceipt(BundleState.COMMITTED, repeated=False)]
    assert core.bodies("t") == []
    decide(core, (1, C), (3, R))
    assert core.bodies("t") == ["1:a", "1:b", "2:a"]
    assert not list(core.state.tables[HOLDS].range(b""))


def test_a_batch_of_one_bundle_is_recorded_as_a_single_part(core: Driver) -> None:
    store(core, bundle(core, 1, "a"))
    decide(core, (1, C))
    assert kinds(core) == [PartStored, Decided]


def test_an_invalid_bundle_is_rejected_alone(core: Driver) -> None:
    store(core, bundle(core, 1, "a"))
    other = bundle(core, 1, "x", digest=b"o" * 32)
    refused, again, mismatch, stored = store(
        core, bundle(core, 2, "a", topic="none"), bundle(core, 1, "a"), other, bundle(core, 3, "a")
    )
    assert (type(refused), type(mismatch).__name__) == (UnknownTopic, "DigestMismatch")
    assert (again.state, stored) == (BundleState.UNDECIDED, BundleReceipt(BundleState.UNDECIDED, 0))
    assert core.state.undecided == 2
    assert get(core.state, token(core, 2)) is None


def test_batched_decisions_are_one_record_and_each_has_its_reply(core: Driver) -> None:
    store(core, *(bundle(core, number, "a") for number in (1, 2, 3)))
    answers = decide(core, (3, C), (9, C), (2, R), (1, C))
    published = DecideReceipt(BundleState.PUBLISHED, repeated=False)
    assert [answers[0], answers[3]] == [published, published]
    assert type(answers[1]) is UnknownTransaction
    assert answers[2] == DecideReceipt(BundleState.ROLLED_BACK, repeated=False)
    assert core.bodies("t") == ["1:a", "3:a"]
    assert kinds(core) == [GroupsStored, GroupsDecided]


def test_a_conflict_in_a_batch_is_recorded_and_stops_no_other_decision(core: Driver) -> None:
    store(core, bundle(core, 1, "a"), bundle(core, 2, "b"), bundle(core, 3, "c"))
    decide(core, (1, R))
    refused, repeated, *_rest = decide(core, (1, C), (1, R), (2, C), (3, C))
    assert type(refused) is Conflict
    assert repeated == DecideReceipt(BundleState.ROLLED_BACK, repeated=True)
    assert core.bodies("t") == ["2:b", "3:c"]
    assert len(list(core.state.tables["conflicts"].range(b""))) == 1


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (4, 3, 2, 1), (2, 4, 1, 3)])
def test_batched_requests_have_the_results_of_single_ones(order: tuple[int, ...]) -> None:
    """Cover common keys, a queued plain send, and an earlier undecided half."""
    worlds = []
    for one_by_one in (False, True):
        core = Driver()
        core.do(CreateTopic("t", 1))
        store(core, bundle(core, 7, "z"))
        commands = (
            batched.StoreBundles((bundle(core, 1, "a", "b"), bundle(core, 2, "a"))),
            batched.StoreBundles((bundle(core, 3, "b", "c"), bundle(core, 4, "c", "z"))),
        )
        for command in commands:
            alone(core, command) if one_by_one else core.do(command)
            core.send("t", "plain", key="b")
        verdicts = tuple(
            decisions.DecideTransaction(token(core, n), R if n == 3 else C, "producer")
            for n in order
        )
        decision = batched.DecideBundles(verdicts)
        final = alone(core, decision) if one_by_one else core.do(decision)
        worlds.append(
            (core.bodies("t"), states(core, 1, 2, 3, 4), {type(reply) for reply in final})
        )
    assert worlds[0] == worlds[1]
    assert worlds[0][1] == [
        BundleState.PUBLISHED,
        BundleState.PUBLISHED,
        BundleState.ROLLED_BACK,
        BundleState.COMMITTED,
    ]


def test_what_recovery_makes_of_the_log_is_what_was_in_memory(core: Driver) -> None:
    store(core, bundle(core, 1, "a", "b"), bundle(core, 2, "a"), bundle(core, 3, "c"))
    decide(core, (2, C), (3, R))
    machine.save(core.state)
    for name, found in rows(core).items():
        assert found == list(core.state.tables[name].range(b"")), name
    assert get(core.replayed(), token(core, 1)) == get(core.state, token(core, 1))


@pytest.mark.parametrize(
    "fields",
    [
        {"decider": ByBroker(), "commit": True},
        {"decider": ByJob(b"j" * 16)},
        {"decider": ByForeign(1, b"g", b"b")},
        {"actions": (("ack", "g", "m", 1, "t", 0, 0, 1),)},
        {"part": 1},
        {"sealed": False},
    ],
)
def test_what_others_depend_on_is_stored_alone(core: Driver, fields: dict[str, Any]) -> None:
    decider = fields.pop("decider", POSTGRES)
    assert not batched.is_batchable_store(bundle(core, 1, "a", decider=decider)._replace(**fields))
    assert batched.is_batchable_store(bundle(core, 1, "a"))


def test_what_takes_its_place_only_now_is_decided_alone(core: Driver) -> None:
    core.do(bundle(core, 1, "a", decider=ByForeign(1, b"g", b"b")))
    store(core, bundle(core, 2, "a"))
    assert not batched.is_batchable_decision(core.state, token(core, 1))
    assert batched.is_batchable_decision(core.state, token(core, 2))
    assert batched.is_batchable_decision(core.state, token(core, 3))


def test_a_decision_whose_bundle_was_lost_does_not_affect_its_neighbours(core: Driver) -> None:
    store(core, bundle(core, 1, "a"), bundle(core, 2, "b"))
    stored: Any
    [(created_at, created), (place, stored)] = core.log
    decide(core, (1, C), (2, C))
    decided_at, decided = core.log[-1]
    core.state = Driver().state
    machine.apply(core.state, created, created_at)
    machine.apply(core.state, GroupsStored(stored.groups[1:]), place)
    assert not machine.apply_after_loss(core.state, decided, decided_at)
    row = get(core.state, token(core, 2))
    assert row is not None
    assert row.state is BundleState.PUBLISHED
    assert core.state.lost_log_end == decided_at.end


def test_the_events_are_those_of_the_format() -> None:
    assert (base.KINDS[GroupsStored], base.KINDS[GroupsDecided]) == (11, 12)


def test_bundles_recorded_before_an_event_had_all_its_fields_are_read(core: Driver) -> None:
    store(core, bundle(core, 1, "a"), bundle(core, 2, "b"))
    place, event = core.log[-1]
    older: Any = [tuple(part[:10]) for part in event[0]]
    state = Driver().state
    machine.apply(state, core.log[0][1], core.log[0][0])
    machine.apply(state, GroupsStored(tuple(older)), place)
    assert state.transactions.get(token(core, 2)) == core.state.transactions.get(token(core, 2))
