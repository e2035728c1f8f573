"""What is to be done with a prepared branch that its coordinator has left, and why
(PROTOCOLS 3).

Nobody concludes a rollback from absence. The home broker's log says how the transaction
ended; where it has not ended yet, and the safety interval is over, the home broker is
asked to end it, and whatever it then says is followed. No answer leaves everything as
it is.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from txmq.model.bundle import GroupState
from txmq.model.message import Decision


class Word(StrEnum):
    """What is known of a transaction's decision."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNDECIDED = "undecided"  # stored at home
    UNHEARD_OF = "unheard of"  # not stored at home, and may yet be
    SILENT = "home is silent"  # it cannot be reached now
    FORGOTTEN = "forgotten"  # older than what brokers keep
    UNKNOWN_LOG = "unknown log"  # none of the brokers that can be reached has that log
    REFUSED = "refused"  # the broker knows the transaction as one that another decides

    @property
    def decision(self) -> Decision:
        """COMMIT and ROLLBACK are the home's, for good; all else is UNKNOWN."""
        return _DECISIONS.get(self, Decision.UNKNOWN)


_DECISIONS = {Word.COMMITTED: Decision.COMMIT, Word.ROLLED_BACK: Decision.ROLLBACK}
_OF_STATES = {
    "UNKNOWN": Word.UNHEARD_OF,
    GroupState.OPEN.name: Word.UNDECIDED,
    GroupState.UNDECIDED.name: Word.UNDECIDED,
    GroupState.COMMITTED.name: Word.COMMITTED,
    GroupState.PUBLISHED.name: Word.COMMITTED,
    GroupState.ROLLED_BACK.name: Word.ROLLED_BACK,
}


class Action(StrEnum):
    """What is to be done with a branch."""

    COMMIT = "commit prepared"
    ROLL_BACK = "roll back prepared"
    WAIT = "wait"
    LEAVE = "leave alone"
    HEURISTIC = "heuristic"  # a person has to decide, and to say why


class Verdict(NamedTuple):
    """What is to be done and why. `ask`: the home broker has to decide first, and its
    answer goes before `action`.
    """

    action: Action
    reason: str
    ask: bool = False


FOREIGN = Verdict(Action.LEAVE, "foreign: its own transaction manager finishes it")
_SETTLED = {
    Word.COMMITTED: Verdict(Action.COMMIT, "its home broker has committed the transaction"),
    Word.ROLLED_BACK: Verdict(Action.ROLL_BACK, "its home broker has rolled the transaction back"),
    Word.SILENT: Verdict(Action.WAIT, "its home broker cannot be reached now"),
    Word.FORGOTTEN: Verdict(
        Action.HEURISTIC, "its home broker keeps no outcomes as old: needs --reason"
    ),
    Word.UNKNOWN_LOG: Verdict(Action.LEAVE, "unknown log: no broker that is configured has it"),
    Word.REFUSED: Verdict(
        Action.LEAVE, "its home broker says that another decides it: see txmq tx show"
    ),
}


def word_of(state: str) -> Word:
    """The word that `xa.outcome` gives as a state. KeyError for one that there is
    not.
    """
    return _OF_STATES[state]


def judge(word: Word, age_s: float, safety_s: float) -> Verdict:
    """What is to be done with a branch of ours that has stood for `age_s`, given what
    its home says.
    """
    if settled := _SETTLED.get(word):
        return settled
    if age_s < safety_s:
        return Verdict(
            Action.WAIT, f"{word}, and younger than the safety interval of {safety_s:g} s"
        )
    return Verdict(
        Action.ROLL_BACK,
        f"{word} for longer than the safety interval: home decides first",
        ask=True,
    )


def contradiction(word: Word, xid_status: str | None) -> str:
    """How a branch that is gone had ended, if otherwise than decided: "committed" or
    "aborted"; else nothing.

    `xid_status` is what pg_xact_status says of its transaction id, which must have been
    prepared: such an id is never given to another. That a branch is gone proves nothing
    by itself.
    """
    against = {Word.COMMITTED: "aborted", Word.ROLLED_BACK: "committed"}.get(word)
    return against if against is not None and xid_status == against else ""
