"""What recovery gets wrong when it has a bug: each scenario ends with the audit, which
raises Broken then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from unittest.mock import patch
from uuid import UUID, uuid4

from tests.postgres.orphans import end_by_hand, gid_of, leave
from tests.recovery.world import SAFETY_S, Broken, World
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import RequestRejected
from txmq.model.message import COMMIT, ROLLBACK, Decision
from txmq.recover.branches import Branches
from txmq.recover.bundles import Groups
from txmq.recover.databases import Database
from txmq.recover.findings import Finding
from txmq.recover.homes import Homes
from txmq.tx.orphans import Verdict, Word, judge
from txmq.tx.postgres.prepared import Ending
from txmq.tx.postgres.prepared_list import Prepared

FOREIGN = "131075_Z3RyaWQ=_YnF1YWw="


def two_passes(world: World) -> None:
    recoverer = world.recoverer()
    recoverer.go()
    world.clock.now += SAFETY_S
    recoverer.go()


def slow_coordinator(world: World) -> None:
    """It stores and decides when recovery has long been there."""
    token = world.begin(stored=0)
    two_passes(world)
    for client in world.clients:
        world.store(client, token)
    with suppress(RequestRejected):
        world.decide(token, COMMIT)
    world.recoverer().go()
    world.audit()


def decision_in_between(world: World) -> None:
    """It decides between the recoverer's look at its home and its question there."""
    token = world.begin()
    word = Homes.word

    def decided_first(self: Homes, log: str, of: UUID, *, decide: bool = False) -> Word:
        if decide and of == token and world.state(token) == "UNDECIDED":
            world.decide(token, COMMIT)
        return word(self, log, of, decide=decide)

    with patch.object(Homes, "word", decided_first):
        two_passes(world)
    world.audit()


def strangers(world: World) -> None:
    """Branches of another manager, and of a log that nobody has."""
    lost = gid_of(uuid4(), new_token())
    for gid in (FOREIGN, lost):
        leave(world.dsns["a"], gid, f"INSERT INTO effects VALUES ('{gid}')")
    two_passes(world)
    if world.standing("a") != [FOREIGN, lost]:
        raise Broken(f"only {world.standing('a')} are left")


def hand_before(world: World, outcome: Decision = COMMIT) -> None:
    """Somebody ends a branch the other way between the look that finds it and its
    end.
    """
    token = world.begin()
    world.decide(token, outcome)
    finish = Database.finish

    def after_a_hand(self: Database, branch: Prepared, decision: Decision) -> Ending:
        if self.name == "a":
            end_by_hand(world.dsns["a"], branch.gid, commit=outcome is ROLLBACK)
        return finish(self, branch, decision)

    with patch.object(Database, "finish", after_a_hand):
        world.recoverer().go()
    world.audit()


def hand_between(world: World) -> None:
    """Somebody rolls a branch back between two passes, after the decision."""
    token = world.begin()
    recoverer = world.recoverer()
    recoverer.go()
    world.decide(token, COMMIT)
    end_by_hand(world.dsns["a"], world.gid(token, "a"), commit=False)
    recoverer.go()
    world.audit()


def half_prepared(world: World) -> None:
    """The coordinator died before the second PREPARE, another one with everything
    decided.
    """
    world.begin(prepared=("a",))
    world.decide(world.begin(), COMMIT)
    two_passes(world)
    world.audit()


SCENARIOS: dict[str, Callable[[World], None]] = {
    one.__name__: one
    for one in (
        slow_coordinator,
        decision_in_between,
        strangers,
        hand_before,
        hand_between,
        half_prepared,
    )
}


@contextmanager
def absence_is_a_rollback() -> Iterator[None]:
    def presumed(
        self: Branches, of_log: str, token: UUID, age_s: float, *, act: bool
    ) -> tuple[Word, Verdict]:
        word = self._homes.word(of_log, token)
        verdict = judge(word, age_s, self._safety_s)
        return (Word.ROLLED_BACK, verdict) if verdict.ask and act else (word, verdict)

    with patch.object(Branches, "ask", presumed):
        yield


@contextmanager
def the_answer_is_not_read() -> Iterator[None]:
    def deaf(
        self: Branches, of_log: str, token: UUID, age_s: float, *, act: bool
    ) -> tuple[Word, Verdict]:
        word = self._homes.word(of_log, token)
        verdict = judge(word, age_s, self._safety_s)
        if verdict.ask and act:
            self._homes.word(of_log, token, decide=True)
            word = Word.ROLLED_BACK
        return word, verdict

    with patch.object(Branches, "ask", deaf):
        yield


@contextmanager
def foreign_branches_are_touched() -> Iterator[None]:
    finish = Branches.finish

    def grabs(self: Branches, database: Database, finding: Finding) -> Finding:
        if finding.prepared is not None and finding.token is None:
            database.finish(finding.prepared, ROLLBACK)
        return finish(self, database, finding)

    with patch.object(Branches, "finish", grabs):
        yield


@contextmanager
def an_unknown_log_is_a_rollback() -> Iterator[None]:
    word = Homes.word

    def presumed(self: Homes, log: str, token: UUID, *, decide: bool = False) -> Word:
        found = word(self, log, token, decide=decide)
        return Word.ROLLED_BACK if found is Word.UNKNOWN_LOG else found

    with patch.object(Homes, "word", presumed):
        yield


@contextmanager
def missing_is_committed() -> Iterator[None]:
    """42704 counts as done, whatever became of the branch."""
    finish = Database.finish

    def done(self: Database, branch: Prepared, decision: Decision) -> Ending:
        finish(self, branch, decision)
        return Ending.DONE

    with patch.object(Database, "finish", done):
        yield


@contextmanager
def the_gone_are_forgotten() -> Iterator[None]:
    def nobody(*args: Any) -> Iterator[Finding]:
        yield from ()

    with patch.object(Branches, "look_for_gone", nobody):
        yield


@contextmanager
def only_databases_are_recovered() -> Iterator[None]:
    with patch.object(Groups, "go_through", lambda *_args, **_kwargs: iter(())):
        yield


BUGS: dict[Callable[[], AbstractContextManager[None]], str] = {
    absence_is_a_rollback: "slow_coordinator",
    the_answer_is_not_read: "decision_in_between",
    foreign_branches_are_touched: "strangers",
    an_unknown_log_is_a_rollback: "strangers",
    missing_is_committed: "hand_before",
    the_gone_are_forgotten: "hand_between",
    only_databases_are_recovered: "half_prepared",
}
