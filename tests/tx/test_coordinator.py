"""The coordinator in a world of its own: whatever fails and whoever interferes, nothing
ends otherwise than decided.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN, Decision
from txmq.tx.coordinator import HOME, Coordinator, Result, Stored, Vote, needs_two_phases

MOST = 1_000  # scenarios


class Rival(Enum):
    """Who is quicker than the coordinator's question."""

    NOBODY = "nobody"
    RECOVERY = "recovery has it rolled back"
    OPERATOR = "an operator commits it"


class Branch(NamedTuple):
    """What happens to one database. `prepared`: what PREPARE did, whatever the vote
    says of it.
    """

    vote: Vote | None
    prepared: bool
    reachable: bool  # for the second phase
    by_hand: Decision | None  # how somebody ends it after the votes


class Group(NamedTuple):
    """What happens to one broker's group."""

    known: Stored | None
    stored: bool


class Scenario(NamedTuple):
    """One transaction's fate; the first group is the home broker's."""

    branches: tuple[Branch, ...]
    groups: tuple[Group, ...]
    rival: Rival
    heard: bool  # by the home broker
    answered: bool
    vetoed: bool


def _branch(vote: Vote | None, prepared: bool, reachable: bool, by_hand: Decision | None) -> Branch:
    truth = {Vote.PREPARED: True, Vote.READ_ONLY: False, Vote.NO: False, None: False}.get(
        vote, prepared
    )
    return Branch(vote, truth, reachable, by_hand if truth else None)


def _group(known: Stored | None, stored: bool) -> Group:
    return Group(known, {Stored.YES: True, Stored.NO: False, None: False}.get(known, stored))


most_yes = st.sampled_from(
    [Vote.PREPARED, Vote.PREPARED, Vote.PREPARED, Vote.READ_ONLY, Vote.NO, Vote.UNCLEAR, None]
)
hands = st.sampled_from([None, None, None, COMMIT, ROLLBACK])
scenarios = st.builds(
    Scenario,
    st.lists(st.builds(_branch, most_yes, st.booleans(), st.booleans(), hands), max_size=4).map(
        tuple
    ),
    st.lists(
        st.builds(
            _group,
            st.sampled_from([Stored.YES, Stored.YES, Stored.UNCLEAR, Stored.NO, None]),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    st.sampled_from(Rival),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


class World:
    """The home broker's log and the databases, as they are and not as they are
    known.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.home: Decision | None = None
        self.ended: dict[int, Decision] = {}
        if scenario.rival is Rival.RECOVERY:
            self.home = ROLLBACK
        elif scenario.rival is Rival.OPERATOR and scenario.groups[0].stored:
            self.home = COMMIT
        for n, branch in enumerate(scenario.branches):
            if branch.by_hand is not None:
                self.ended[n] = branch.by_hand

    def ask(self, question: Decision) -> Decision:
        """Compare-and-set. A commit needs the group, a rollback writes a tombstone
        where there is none.
        """
        heard = self.scenario.heard or self.scenario.answered
        if heard and self.home is None and (question is ROLLBACK or self.scenario.groups[0].stored):
            self.home = question
        return self.home or UNKNOWN if self.scenario.answered else UNKNOWN

    def end(self, n: int, decision: Decision) -> bool | None:
        """What a COMMIT or ROLLBACK PREPARED comes to."""
        if not self.scenario.branches[n].reachable:
            return None
        if not self.scenario.branches[n].prepared:
            return None if decision is COMMIT else True
        return self.ended.setdefault(n, decision) is decision

    def recover(self) -> None:
        """As PROTOCOLS 3 has it: the home broker decides, and what is prepared
        follows.
        """
        if self.home is None:
            self.home = ROLLBACK
        for n, branch in enumerate(self.scenario.branches):
            if branch.prepared:
                self.ended.setdefault(n, self.home)


def play(kind: type[Coordinator], scenario: Scenario) -> list[str]:
    """What went wrong."""
    world = World(scenario)
    coordinator = kind(tuple(range(len(scenario.branches))), len(scenario.groups))
    told(coordinator, scenario)
    question = coordinator.question
    faults = unfounded(question, scenario)
    if question is not None:
        coordinator.decided(world.ask(question))
    if any(n != HOME for n in coordinator.to_tell) and coordinator.decision is not world.home:
        faults.append("told another broker what the home broker had not decided")
    for n in coordinator.to_end:
        coordinator.ended(n, world.end(n, coordinator.decision))
    faults += carried_out(world, coordinator.result)
    world.recover()
    return faults + settled(world, coordinator.result)


def told(coordinator: Coordinator, scenario: Scenario) -> None:
    for n, group in enumerate(scenario.groups):
        if group.known is not None:
            coordinator.grouped(n, group.known)
    for n, branch in enumerate(scenario.branches):
        if branch.vote is not None:
            coordinator.voted(n, Vote.UNCLEAR)
            coordinator.voted(n, branch.vote)
    if scenario.vetoed:
        coordinator.veto()


def unfounded(question: Decision | None, scenario: Scenario) -> list[str]:
    """COMMIT is asked for if everybody has said yes, and only then."""
    votes = {branch.vote for branch in scenario.branches}
    everybody = votes <= {Vote.PREPARED, Vote.READ_ONLY} and {
        group.known for group in scenario.groups
    } == {Stored.YES}
    return (
        []
        if (question is COMMIT) == (everybody and not scenario.vetoed)
        else [f"asked for {question}"]
    )


def carried_out(world: World, result: Result) -> list[str]:
    """What the coordinator has ended, it ended as the home broker decided, and it knows
    what it has left.
    """
    faults = []
    for n, branch in enumerate(world.scenario.branches):
        ended = world.ended.get(n)
        if (
            ended is not None
            and branch.by_hand is None
            and ended is not world.home
            and branch.prepared
        ):
            faults.append(f"branch {n} ended as {ended.name}, which nobody had decided")
        if branch.prepared and ended is None and n not in result.unfinished:
            faults.append(f"branch {n} is left and not told")
        if (
            result.decision is not UNKNOWN
            and ended not in (None, result.decision)
            and n not in (*result.mixed, *result.unfinished)
        ):
            faults.append(f"branch {n} is mixed and not told")
    return faults


def settled(world: World, result: Result) -> list[str]:
    """After recovery everything is as decided, but for what somebody's hand did, and
    the answer was true.
    """
    faults = []
    for n, branch in enumerate(world.scenario.branches):
        if branch.prepared and branch.by_hand is None and world.ended[n] is not world.home:
            faults.append(
                f"branch {n} ended as {world.ended[n].name} against the home broker's decision"
            )
        missing = not branch.prepared and branch.vote is not Vote.READ_ONLY
        if result.decision is COMMIT and missing and n not in (*result.mixed, *result.unfinished):
            faults.append(f"committed without branch {n}, and not told")
    if result.decision is COMMIT and world.home is not COMMIT:
        faults.append("said to be committed")
    prepared = any(branch.prepared for branch in world.scenario.branches)
    if result.decision is ROLLBACK and world.home is COMMIT and prepared:
        faults.append("said to be rolled back")
    return faults


@settings(max_examples=MOST)
@given(scenarios)
def test_nothing_ends_otherwise_than_the_home_broker_decided(scenario: Scenario) -> None:
    assert play(Coordinator, scenario) == []


class CommitsWithoutAVote(Coordinator):
    """Takes a vote that is missing or unclear for a yes."""

    @property
    def question(self) -> Decision | None:
        return COMMIT if Vote.NO not in self._votes.values() else ROLLBACK


class RollsBackFromAbsence(Coordinator):
    """Asks nobody before it rolls back."""

    @property
    def question(self) -> Decision | None:
        asked = Coordinator.question.__get__(self)
        return COMMIT if asked is COMMIT else None

    @property
    def decision(self) -> Decision:
        return ROLLBACK if self._decision is None else self._decision


class TakesSilenceForAYes(Coordinator):
    """Carries out what it has asked for, whatever the answer."""

    def decided(self, answer: Decision) -> None:
        super().decided(self.question or answer)


class ForgetsWhatIsUnclear(Coordinator):
    """Ends only what is known to be prepared."""

    def _left(self) -> list[int]:
        return [n for n in self.branches if self._votes.get(n) is Vote.PREPARED]


class CallsWhatIsGoneDone(Coordinator):
    """Takes a branch that is not there for one that ended as decided."""

    def ended(self, branch: int, agrees: bool | None) -> None:
        super().ended(branch, agrees is not None)


@pytest.mark.parametrize(
    "planted",
    [
        CommitsWithoutAVote,
        RollsBackFromAbsence,
        TakesSilenceForAYes,
        ForgetsWhatIsUnclear,
        CallsWhatIsGoneDone,
    ],
)
def test_a_planted_bug_is_found(planted: type[Coordinator]) -> None:
    scenario = find(
        scenarios,
        lambda scenario: bool(play(planted, scenario)),
        settings=settings(max_examples=MOST),
    )
    assert play(planted, scenario) != []
    assert play(Coordinator, scenario) == []


def test_the_first_clear_vote_counts() -> None:
    coordinator = Coordinator((0,), 0)
    assert coordinator.question is None
    for vote, question in ((Vote.UNCLEAR, ROLLBACK), (Vote.NO, None), (Vote.PREPARED, None)):
        coordinator.voted(0, vote)
        assert coordinator.question is question


def test_the_home_broker_is_told_only_where_it_was_not_asked() -> None:
    alone, several = Coordinator((0,), 1), Coordinator((0,), 2)
    for coordinator in (alone, several):
        coordinator.grouped(HOME, Stored.UNCLEAR)
        coordinator.voted(0, Vote.NO)
    assert (alone.question, alone.to_tell) == (None, (HOME,))
    several.grouped(1, Stored.YES)
    assert (several.question, several.to_tell) == (ROLLBACK, ())
    several.decided(ROLLBACK)
    assert several.to_tell == (1,)


def test_silence_touches_nothing() -> None:
    coordinator = Coordinator((0, 1), 1)
    coordinator.voted(0, Vote.PREPARED)
    coordinator.voted(1, Vote.UNCLEAR)
    coordinator.decided(UNKNOWN)
    assert len(coordinator.to_end) == 0
    assert coordinator.result == Result(UNKNOWN, unfinished=(0, 1), mixed=())


@pytest.mark.parametrize(
    ("writing", "speaking", "needed"),
    [(0, False, False), (1, False, False), (2, False, True), (0, True, True)],
)
def test_one_commit_does_where_there_is_one_thing_to_commit(
    writing: int,
    speaking: bool,
    needed: bool,
) -> None:
    assert needs_two_phases(writing, speaking=speaking) is needed
