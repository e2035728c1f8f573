"""The coordinator in a simulated world of faults: nothing ends other than decided."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN, Decision
from txmq.tx.coordinator import HOME, BundleStatus, Coordinator, Vote, XaResult, needs_two_phases

MOST = 1_000  # scenarios


class Rival(Enum):
    """The party that decides before the coordinator does."""

    NOBODY = "nobody"
    RECOVERY = "recovery has it rolled back"
    OPERATOR = "an operator commits it"


class Branch(NamedTuple):
    """The fate of one branch.

    `prepared`: what PREPARE did, whatever the vote says.
    """

    vote: Vote | None
    prepared: bool
    reachable: bool  # for the second phase
    by_hand: Decision | None  # how somebody ends it after the votes


class BundleFate(NamedTuple):
    """The fate of the bundle at one broker."""

    known: BundleStatus | None
    stored: bool


class Scenario(NamedTuple):
    """The fate of one transaction; the first bundle is the home broker's."""

    branches: tuple[Branch, ...]
    bundles: tuple[BundleFate, ...]
    rival: Rival
    heard: bool  # by the home broker
    answered: bool
    vetoed: bool


def _branch(vote: Vote | None, prepared: bool, reachable: bool, by_hand: Decision | None) -> Branch:  # noqa: FBT001
    truth = {Vote.PREPARED: True, Vote.READ_ONLY: False, Vote.NO: False, None: False}.get(
        vote, prepared
    )
    return Branch(vote, truth, reachable, by_hand if truth else None)


def _group(known: BundleStatus | None, stored: bool) -> BundleFate:  # noqa: FBT001
    return BundleFate(
        known, {BundleStatus.YES: True, BundleStatus.NO: False, None: False}.get(known, stored)
    )


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
            st.sampled_from(
                [BundleStatus.YES, BundleStatus.YES, BundleStatus.UNCLEAR, BundleStatus.NO, None]
            ),
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


class CoordinatorWorld:
    """The real state of the home broker's log and of the databases."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.home: Decision | None = None
        self.ended: dict[int, Decision] = {}
        if scenario.rival is Rival.RECOVERY:
            self.home = ROLLBACK
        elif scenario.rival is Rival.OPERATOR and scenario.bundles[0].stored:
            self.home = COMMIT
        for n, branch in enumerate(scenario.branches):
            if branch.by_hand is not None:
                self.ended[n] = branch.by_hand

    def ask(self, question: Decision) -> Decision:
        """Decide by compare-and-set.

        A commit needs the bundle; a rollback writes a tombstone if there is none.
        """
        heard = self.scenario.heard or self.scenario.answered
        if (
            heard
            and self.home is None
            and (question is ROLLBACK or self.scenario.bundles[0].stored)
        ):
            self.home = question
        return self.home or UNKNOWN if self.scenario.answered else UNKNOWN

    def end(self, n: int, decision: Decision) -> bool | None:
        """Return the result of a COMMIT or ROLLBACK PREPARED."""
        if not self.scenario.branches[n].reachable:
            return None
        if not self.scenario.branches[n].prepared:
            return None if decision is COMMIT else True
        return self.ended.setdefault(n, decision) is decision

    def recover(self) -> None:
        """Let recovery ask the home broker to decide, and end prepared branches so."""
        if self.home is None:
            self.home = ROLLBACK
        for n, branch in enumerate(self.scenario.branches):
            if branch.prepared:
                self.ended.setdefault(n, self.home)


def play(kind: type[Coordinator], scenario: Scenario) -> list[str]:
    """Return what went wrong."""
    world = CoordinatorWorld(scenario)
    coordinator = kind(tuple(range(len(scenario.branches))), len(scenario.bundles))
    told(coordinator, scenario)
    question = coordinator.proposal
    faults = unfounded(question, scenario)
    if question is not None:
        coordinator.note_decision(world.ask(question))
    if (
        any(n != HOME for n in coordinator.brokers_to_notify)
        and coordinator.decision is not world.home
    ):
        faults.append("told another broker what the home broker had not decided")
    for n in coordinator.branches_to_end:
        coordinator.note_end(n, world.end(n, coordinator.decision))
    faults += carried_out(world, coordinator.result)
    world.recover()
    return faults + settled(world, coordinator.result)


def told(coordinator: Coordinator, scenario: Scenario) -> None:
    for n, bundle in enumerate(scenario.bundles):
        if bundle.known is not None:
            coordinator.note_bundle(n, bundle.known)
    for n, branch in enumerate(scenario.branches):
        if branch.vote is not None:
            coordinator.note_vote(n, Vote.UNCLEAR)
            coordinator.note_vote(n, branch.vote)
    if scenario.vetoed:
        coordinator.veto()


def unfounded(question: Decision | None, scenario: Scenario) -> list[str]:
    """COMMIT is proposed if all votes are yes, and only then."""
    votes = {branch.vote for branch in scenario.branches}
    everybody = votes <= {Vote.PREPARED, Vote.READ_ONLY} and {
        bundle.known for bundle in scenario.bundles
    } == {BundleStatus.YES}
    return (
        []
        if (question is COMMIT) == (everybody and not scenario.vetoed)
        else [f"asked for {question}"]
    )


def carried_out(world: CoordinatorWorld, result: XaResult) -> list[str]:
    """Every branch that the coordinator ended, it ended as the home broker decided."""
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


def settled(world: CoordinatorWorld, result: XaResult) -> list[str]:
    """After recovery every branch agrees, but for those ended by hand, and the
    coordinator's answer was true.
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
    """Counts a missing or unclear vote as a yes."""

    @property
    def proposal(self) -> Decision | None:
        return COMMIT if Vote.NO not in self._votes.values() else ROLLBACK


class RollsBackFromAbsence(Coordinator):
    """Rolls back without a proposal to the home broker."""

    @property
    def proposal(self) -> Decision | None:
        proposed = Coordinator.proposal.__get__(self)
        return COMMIT if proposed is COMMIT else None

    @property
    def decision(self) -> Decision:
        return ROLLBACK if self._decision is None else self._decision


class TakesSilenceForAYes(Coordinator):
    """Carries out its own proposal, whatever the answer."""

    def note_decision(self, answer: Decision) -> None:
        super().note_decision(self.proposal or answer)


class ForgetsWhatIsUnclear(Coordinator):
    """Ends only the branches with a clear vote."""

    def _prepared(self) -> list[int]:
        return [n for n in self.branches if self._votes.get(n) is Vote.PREPARED]


class CallsWhatIsGoneDone(Coordinator):
    """Counts a missing branch as ended as decided."""

    def note_end(self, branch: int, agrees: bool | None) -> None:  # noqa: FBT001
        super().note_end(branch, agrees is not None)


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
    assert coordinator.proposal is None
    for vote, question in ((Vote.UNCLEAR, ROLLBACK), (Vote.NO, None), (Vote.PREPARED, None)):
        coordinator.note_vote(0, vote)
        assert coordinator.proposal is question


def test_the_home_broker_is_notified_only_if_it_did_not_decide() -> None:
    alone, several = Coordinator((0,), 1), Coordinator((0,), 2)
    for coordinator in (alone, several):
        coordinator.note_bundle(HOME, BundleStatus.UNCLEAR)
        coordinator.note_vote(0, Vote.NO)
    assert (alone.proposal, alone.brokers_to_notify) == (None, (HOME,))
    several.note_bundle(1, BundleStatus.YES)
    assert (several.proposal, several.brokers_to_notify) == (ROLLBACK, ())
    several.note_decision(ROLLBACK)
    assert several.brokers_to_notify == (1,)


def test_silence_touches_nothing() -> None:
    coordinator = Coordinator((0, 1), 1)
    coordinator.note_vote(0, Vote.PREPARED)
    coordinator.note_vote(1, Vote.UNCLEAR)
    coordinator.note_decision(UNKNOWN)
    assert len(coordinator.branches_to_end) == 0
    assert coordinator.result == XaResult(UNKNOWN, unfinished=(0, 1), mixed=())


@pytest.mark.parametrize(
    ("writing", "speaking", "needed"),
    [(0, False, False), (1, False, False), (2, False, True), (0, True, True)],
)
def test_one_commit_does_where_there_is_one_thing_to_commit(
    writing: int,
    speaking: bool,  # noqa: FBT001
    needed: bool,  # noqa: FBT001
) -> None:
    assert needs_two_phases(writing, speaking=speaking) is needed
