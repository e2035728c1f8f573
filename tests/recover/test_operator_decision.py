"""Decisions of operators: by the home broker if possible, else with a journal entry."""

from __future__ import annotations

from uuid import uuid4

import pytest

from tests.recover.world import RecoveryWorld
from tests.tx.postgres.prepared_branches import gid_of, leave_prepared
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import TransactionError
from txmq.model.message import COMMIT, ROLLBACK, Decision
from txmq.recover.operator_decision import ForcedBranch, OperatorDecision, force_branch

WHY = "the table is needed"


def by_hand(world: RecoveryWorld, gid: str, outcome: Decision) -> ForcedBranch:
    return force_branch(world.recoverer(), OperatorDecision(gid, outcome, "ada", WHY))


@pytest.mark.parametrize("outcome", [COMMIT, ROLLBACK])
def test_what_is_undecided_is_decided_at_home_for_all_branches(
    world: RecoveryWorld, outcome: Decision
) -> None:
    token = world.begin()
    forced = by_hand(world, world.gid(token, "a"), outcome)
    assert (forced.ending, forced.journal) == ("DONE", world.brokers[0].url)
    [entry] = world.journal(token)
    assert (entry["branch"], entry["decided"], entry["operator"]) == (
        world.gid(token, "a"),
        outcome.name,
        "ada",
    )
    assert entry["reason"] == WHY
    world.recoverer().run_pass()
    assert world.effects("a") == world.effects("b") == ({token.hex} if outcome is COMMIT else set())
    world.audit()


def test_what_home_never_stored_can_only_be_rolled_back(world: RecoveryWorld) -> None:
    token = world.begin(stored=0)
    gid = world.gid(token, "a")
    with pytest.raises(TransactionError, match="cannot be committed"):
        by_hand(world, gid, COMMIT)
    assert world.standing("a") == [gid]
    assert by_hand(world, gid, ROLLBACK).ending == "DONE"
    world.recoverer().run_pass()
    world.audit()


def test_what_is_decided_so_is_no_heuristic(world: RecoveryWorld) -> None:
    token = world.begin()
    world.decide(token, COMMIT)
    assert by_hand(world, world.gid(token, "a"), COMMIT).journal == ""
    world.recoverer().run_pass()
    assert world.journal(token) == []
    world.audit()


def test_what_is_decided_otherwise_is_journalled_before_it_is_ended(world: RecoveryWorld) -> None:
    token = world.begin()
    world.decide(token, COMMIT)
    gid = world.gid(token, "a")
    assert by_hand(world, gid, ROLLBACK).journal == world.brokers[0].url
    [entry] = world.journal(token)
    assert (entry["branch"], entry["decided"], entry["found"]) == (gid, "COMMIT", "rolled back")
    assert world.effects("a") == set()
    world.recoverer().run_pass()
    world.audit()


def test_a_branch_of_a_lost_log_is_journalled_where_there_is_a_journal(
    world: RecoveryWorld,
) -> None:
    token = new_token()
    gid = gid_of(uuid4(), token)
    leave_prepared(world.dsns["a"], gid, f"INSERT INTO effects VALUES ('{token.hex}')")
    forced = by_hand(world, gid, COMMIT)
    assert forced.journal in {broker.url for broker in world.brokers}
    assert world.effects("a") == {token.hex}
    [entry] = world.journal(token)
    assert (entry["branch"], entry["found"], entry["operator"], entry["reason"]) == (
        gid,
        "committed",
        "ada",
        WHY,
    )


def test_a_foreign_branch_is_never_ended_by_hand(world: RecoveryWorld) -> None:
    gid = "131075_Z3RyaWQ=_YnF1YWw="
    leave_prepared(world.dsns["a"], gid, "INSERT INTO effects VALUES ('foreign')")
    for outcome in (COMMIT, ROLLBACK):
        with pytest.raises(TransactionError, match="foreign"):
            by_hand(world, gid, outcome)
    assert world.standing("a") == [gid]


def test_what_does_not_stand_cannot_be_ended(world: RecoveryWorld) -> None:
    with pytest.raises(TransactionError, match=r"No branch .* is prepared"):
        by_hand(world, gid_of(uuid4(), new_token()), COMMIT)
