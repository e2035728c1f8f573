"""A group: the messages of one transaction at one broker, and the states it goes
through.

    OPEN ──seal──► UNDECIDED ──COMMIT──► COMMITTED ──its keys are free──► PUBLISHED
                       └──────ROLLBACK──► ROLLED_BACK

In doubt is a flag for operators, not a state; UNKNOWN is an answer to a check, not a
decision.
"""

from __future__ import annotations

from enum import IntEnum


class GroupState(IntEnum):
    """Where a group stands; the numbers are on the wire and in the log."""

    OPEN = 0  # parts are still arriving
    UNDECIDED = 1
    COMMITTED = 2  # waits for earlier tickets of its keys
    PUBLISHED = 3
    ROLLED_BACK = 4


class Step(IntEnum):
    """What can happen to a group."""

    SEAL = 0
    COMMIT = 1
    ROLLBACK = 2
    PUBLISH = 3


S, T = GroupState, Step
TRANSITIONS: dict[GroupState, dict[Step, GroupState]] = {
    S.OPEN: {T.SEAL: S.UNDECIDED, T.ROLLBACK: S.ROLLED_BACK},
    S.UNDECIDED: {T.COMMIT: S.COMMITTED, T.ROLLBACK: S.ROLLED_BACK},
    S.COMMITTED: {
        T.COMMIT: S.COMMITTED,
        T.PUBLISH: S.PUBLISHED,
    },  # a repeated decision is harmless,
    S.PUBLISHED: {T.COMMIT: S.PUBLISHED},  # a contradicting one has no transition and is refused
    S.ROLLED_BACK: {T.ROLLBACK: S.ROLLED_BACK},
}


def step(state: GroupState, what: Step) -> GroupState | None:
    """The state after `what`, None where that is not possible."""
    return TRANSITIONS[state].get(what)


def decided(state: GroupState) -> bool:
    """Whether the outcome is fixed for ever."""
    return state >= GroupState.COMMITTED


HOLDING = frozenset({"postgres", "checker", "home"})


def makes_holds(decider: tuple[object, ...]) -> bool:
    """Whether a group of this decider takes its place in the order of its keys when it
    is stored, not when it is decided.

    Only where somebody's row lock can order two transactions before either is decided
    here (PROTOCOLS 5, result 10): what a home broker decides reaches other brokers in
    any order.
    """
    return decider[0] in HOLDING
