"""Bundles and their states.

A bundle is the messages and consumer actions of one transaction at one broker, stored
under one token.

    OPEN ──seal──► UNDECIDED ──COMMIT──► COMMITTED ──its keys are free──► PUBLISHED
      └──────────────┴────ROLLBACK──► ROLLED_BACK

"In doubt" is a flag for operators, not a state. UNKNOWN is an answer to a check-back,
not a decision.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from txmq.model.message import Decision


class BundleState(IntEnum):
    """The state of a bundle; the numbers are on the wire and in the log."""

    OPEN = 0  # parts are still arriving
    UNDECIDED = 1
    COMMITTED = 2  # waits for earlier tickets on its keys
    PUBLISHED = 3
    ROLLED_BACK = 4


class Transition(IntEnum):
    """An event in the life of a bundle."""

    SEAL = 0
    COMMIT = 1
    ROLLBACK = 2
    PUBLISH = 3


S, T = BundleState, Transition
# Repeating a decision is harmless. A contradicting one has no transition: it is
# refused.
TRANSITIONS: Final[dict[BundleState, dict[Transition, BundleState]]] = {
    S.OPEN: {T.SEAL: S.UNDECIDED, T.ROLLBACK: S.ROLLED_BACK},
    S.UNDECIDED: {T.COMMIT: S.COMMITTED, T.ROLLBACK: S.ROLLED_BACK},
    S.COMMITTED: {T.COMMIT: S.COMMITTED, T.PUBLISH: S.PUBLISHED},
    S.PUBLISHED: {T.COMMIT: S.PUBLISHED},
    S.ROLLED_BACK: {T.ROLLBACK: S.ROLLED_BACK},
}
COMMITTED: Final = (S.COMMITTED, S.PUBLISHED)
DECIDED: Final = (*COMMITTED, S.ROLLED_BACK)  # final outcomes
ACCEPTING: Final = {  # the states in which a decision is accepted
    Decision.COMMIT: tuple(state for state in S if T.COMMIT in TRANSITIONS[state]),
    Decision.ROLLBACK: tuple(state for state in S if T.ROLLBACK in TRANSITIONS[state]),
}


class BundleReceipt(NamedTuple):
    """The state of a bundle after one of its parts was stored.

    `ticket` is 0 until the bundle has its place in the order of its keys. `offsets` are
    those of its batches once they are published; they are not on the wire.
    """

    state: BundleState
    ticket: int
    offsets: tuple[int, ...] = ()


class DecideReceipt(NamedTuple):
    """The state of a transaction after a decision.

    `repeated`: the same decision had been made before.
    """

    state: BundleState
    repeated: bool
