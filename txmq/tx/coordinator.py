"""The coordinator of a two-phase commit: votes in, proposal to the home broker out.

    votes and bundles ─all yes──► propose COMMIT
                      └any other► propose ROLLBACK

    COMMIT ────► commit the prepared branches
    ROLLBACK ──► roll back the branches that may be prepared
    no answer ─► leave all branches as they are

The home broker decides, by compare-and-set in its log, so a recoverer or an operator
may be quicker. Without its answer no branch that may be prepared is touched: a missing
vote, answer or gid never means ROLLBACK.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN, Decision


class Vote(Enum):
    """The result of a branch's PREPARE."""

    PREPARED = "it can be committed, whatever happens"
    READ_ONLY = "it has nothing to prepare, and ends after the decision"
    NO = "it is not prepared, and never will be"
    UNCLEAR = "it may be prepared, or become so"


class BundleStatus(Enum):
    """The state of a bundle at a broker, as far as the coordinator knows."""

    YES = "it is durable"
    NO = "it is not there, and never will be"
    UNCLEAR = "it was sent"


class XaResult(NamedTuple):
    """The end of a transaction: UNKNOWN if the home broker did not answer.

    Branches are given by number. Recovery ends the `unfinished` ones. The `mixed` ones
    were ended otherwise, by an operator.
    """

    decision: Decision
    unfinished: tuple[int, ...]
    mixed: tuple[int, ...]


HOME: Final = 0  # the number of the home broker
MAY_BE_PREPARED: Final = (Vote.PREPARED, Vote.UNCLEAR)  # they may hold locks until the end


@dataclass(slots=True)
class Coordinator:
    """The state of one two-phase commit.

    `branches` are numbers, `brokers` is a count; broker 0 is the home broker.
    """

    branches: tuple[int, ...]
    brokers: int
    _votes: dict[int, Vote] = field(default_factory=dict)
    _bundles: dict[int, BundleStatus] = field(default_factory=dict)
    _endings: dict[int, bool | None] = field(default_factory=dict)
    _decision: Decision | None = None
    _vetoed: bool = False

    def note_vote(self, branch: int, vote: Vote) -> None:
        """Note the vote of a branch; the first one that is clear counts."""
        if self._votes.get(branch, Vote.UNCLEAR) is Vote.UNCLEAR:
            self._votes[branch] = vote

    def note_bundle(self, broker: int, stored: BundleStatus) -> None:
        """Note the state of a broker's bundle. Without a note it was never sent."""
        self._bundles[broker] = stored

    def veto(self) -> None:
        """Never propose COMMIT, whatever the votes are."""
        self._vetoed = True

    @property
    def proposal(self) -> Decision | None:
        """The decision to propose; None if nothing waits for the home broker's answer.

        A branch without a vote, or a broker without an answer, counts as a no.
        """
        votes = [self._votes.get(branch, Vote.NO) for branch in self.branches]
        agreed = all(vote in (Vote.PREPARED, Vote.READ_ONLY) for vote in votes)
        if (
            agreed
            and not self._vetoed
            and list(self._bundles.values()) == [BundleStatus.YES] * self.brokers
        ):
            return COMMIT
        waiting = any(vote in MAY_BE_PREPARED for vote in votes) or any(
            broker != HOME for broker in self._sent()
        )
        return ROLLBACK if waiting else None

    def note_decision(self, answer: Decision) -> None:
        """Note the home broker's durable decision; UNKNOWN if it did not answer."""
        self._decision = answer

    @property
    def decision(self) -> Decision:
        """The outcome. Without a proposal it is a rollback."""
        if self._decision is None:
            return ROLLBACK if self.proposal is None else UNKNOWN
        return self._decision

    @property
    def branches_to_end(self) -> tuple[int, ...]:
        """The branches to end by the decision now."""
        if self.decision is UNKNOWN:
            return ()
        return tuple(branch for branch in self._prepared() if self._endings.get(branch) is None)

    @property
    def brokers_to_notify(self) -> tuple[int, ...]:
        """The brokers that may have a bundle and do not know the decision yet."""
        if self.decision is UNKNOWN:
            return ()
        return tuple(broker for broker in self._sent() if broker != HOME or self._decision is None)

    def note_end(self, branch: int, agrees: bool | None) -> None:  # noqa: FBT001  # a finding
        """Note whether a branch ended as decided; None = not known yet."""
        self._endings[branch] = agrees

    @property
    def result(self) -> XaResult:
        """The result so far. A branch that voted no is mixed if the decision is
        COMMIT.
        """
        prepared = self._prepared()
        refused = [
            b
            for b in self.branches
            if self.decision is COMMIT and self._votes.get(b, Vote.NO) is Vote.NO
        ]
        mixed = [branch for branch in prepared if self._endings.get(branch) is False]
        unfinished = [branch for branch in prepared if self._endings.get(branch) is None]
        return XaResult(self.decision, tuple(unfinished), tuple(sorted(refused + mixed)))

    def _sent(self) -> list[int]:
        return [broker for broker, stored in self._bundles.items() if stored is not BundleStatus.NO]

    def _prepared(self) -> list[int]:
        return [branch for branch in self.branches if self._votes.get(branch) in MAY_BE_PREPARED]


def needs_two_phases(writing: int, *, speaking: bool) -> bool:
    """Return whether a transaction takes more than one COMMIT.

    `writing` is the number of branches that wrote; `speaking`: it sends messages.
    """
    return speaking or writing > 1
