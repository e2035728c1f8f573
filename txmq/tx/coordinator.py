"""Two-phase commit, the coordinator's part of it (PROTOCOLS 3): votes in, the question
for the home broker out, then what is to be done with the branches.

    votes and groups ──all yes──► ask COMMIT ──┬─ COMMIT ───► commit what is prepared
                     └─any other─► ask ROLLBACK ├─ ROLLBACK ─► roll back what may be prepared
                                                └─ no answer ─► leave everything as it is

The home broker decides, by compare-and-set in its log; what is asked for is a proposal.
Whoever is quicker, a recoverer or an operator, is followed. Without its answer no
branch that may be prepared is touched: that something is absent, a vote, an answer, a
gid, never means ROLLBACK.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN, Decision


class Vote(Enum):
    """What became of a branch's PREPARE."""

    PREPARED = "it can be committed, whatever happens"
    READ_ONLY = "it is over, it wrote nothing"
    NO = "it is not prepared, and never will be"
    UNCLEAR = "it may be prepared, or become so"


class Stored(Enum):
    """What is known of a broker's group."""

    YES = "it is durable"
    NO = "it is not there, and never will be"
    UNCLEAR = "it was sent"


class Result(NamedTuple):
    """How a transaction ended here: UNKNOWN where the home broker did not answer.
    Branches by their numbers.

    Recovery ends the `unfinished`; the `mixed` were ended otherwise, by somebody's
    hand.
    """

    decision: Decision
    unfinished: tuple[int, ...]
    mixed: tuple[int, ...]


HOME: Final = 0  # the number of the home broker
LEFT: Final = (Vote.PREPARED, Vote.UNCLEAR)  # what may hold locks until it is ended


@dataclass(slots=True)
class Coordinator:
    """One transaction's, with branches of these numbers, and so many brokers, from 0,
    which is the home broker.
    """

    branches: tuple[int, ...]
    brokers: int
    _votes: dict[int, Vote] = field(default_factory=dict)
    _groups: dict[int, Stored] = field(default_factory=dict)
    _endings: dict[int, bool | None] = field(default_factory=dict)
    _decision: Decision | None = None
    _vetoed: bool = False

    def voted(self, branch: int, vote: Vote) -> None:
        """A branch's vote; the first one that is clear counts."""
        if self._votes.get(branch, Vote.UNCLEAR) is Vote.UNCLEAR:
            self._votes[branch] = vote

    def grouped(self, broker: int, stored: Stored) -> None:
        """What is known of a broker's group now. Before the first word it was not even
        sent.
        """
        self._groups[broker] = stored

    def veto(self) -> None:
        """Whatever the votes are, COMMIT is not asked for."""
        self._vetoed = True

    @property
    def question(self) -> Decision | None:
        """What the home broker is to be asked for; None where nothing is left behind
        that waits for its answer.

        Whoever has not voted, or not answered, has not said yes.
        """
        votes = [self._votes.get(branch, Vote.NO) for branch in self.branches]
        agreed = all(vote in (Vote.PREPARED, Vote.READ_ONLY) for vote in votes)
        if (
            agreed
            and not self._vetoed
            and list(self._groups.values()) == [Stored.YES] * self.brokers
        ):
            return COMMIT
        waiting = any(vote in LEFT for vote in votes) or any(
            broker != HOME for broker in self._sent()
        )
        return ROLLBACK if waiting else None

    def decided(self, answer: Decision) -> None:
        """What the home broker has decided, durably, whatever it was asked for; UNKNOWN
        where there was no answer.
        """
        self._decision = answer

    @property
    def decision(self) -> Decision:
        """The outcome. Where nobody need be asked, it is a rollback."""
        if self._decision is None:
            return ROLLBACK if self.question is None else UNKNOWN
        return self._decision

    @property
    def to_end(self) -> tuple[int, ...]:
        """The branches to be ended by the decision now."""
        if self.decision is UNKNOWN:
            return ()
        return tuple(branch for branch in self._left() if self._endings.get(branch) is None)

    @property
    def to_tell(self) -> tuple[int, ...]:
        """The brokers that may have a group and are to learn of the decision; not the
        home broker that answered.
        """
        if self.decision is UNKNOWN:
            return ()
        return tuple(broker for broker in self._sent() if broker != HOME or self._decision is None)

    def ended(self, branch: int, agrees: bool | None) -> None:  # an answer
        """Whether a branch was found to have ended as decided; None where nobody knows
        yet.
        """
        self._endings[branch] = agrees

    @property
    def result(self) -> Result:
        """How it stands now. Branches that said no to what was committed all the same
        are mixed.
        """
        left = self._left()
        refused = [
            b
            for b in self.branches
            if self.decision is COMMIT and self._votes.get(b, Vote.NO) is Vote.NO
        ]
        mixed = [branch for branch in left if self._endings.get(branch) is False]
        unfinished = [branch for branch in left if self._endings.get(branch) is None]
        return Result(self.decision, tuple(unfinished), tuple(sorted(refused + mixed)))

    def _sent(self) -> list[int]:
        return [broker for broker, stored in self._groups.items() if stored is not Stored.NO]

    def _left(self) -> list[int]:
        return [branch for branch in self.branches if self._votes.get(branch) in LEFT]


def needs_two_phases(writing: int, *, speaking: bool) -> bool:
    """Whether a transaction of so many branches that wrote, with or without messages,
    takes more than one COMMIT.
    """
    return speaking or writing > 1
