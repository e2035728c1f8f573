"""Half messages whose local work goes on in this process.

A checker looks for what the work has left, and would find nothing yet: its ROLLBACK
would lose the message of work that is committed later. So this process answers
check-backs of such half messages by itself, with UNKNOWN.

An owner that nobody refers to any more can decide nothing, and counts no longer.
"""

from __future__ import annotations

import os
from uuid import UUID
from weakref import WeakValueDictionary

REASON = "the block of its local work is still open in the process that stored it"

_owners: WeakValueDictionary[UUID, object] = WeakValueDictionary()
# A child's copy of a block is not the block.
os.register_at_fork(after_in_child=_owners.clear)


def begin_work(token: UUID, owner: object) -> None:
    """Count the local work as going on until `end_work`, or while `owner` lives."""
    _owners[token] = owner


def end_work(token: UUID) -> None:
    """Let checkers answer: the work has ended, whatever became of the decision."""
    _owners.pop(token, None)


def is_open(token: UUID) -> bool:
    """Return whether the local work goes on in this process."""
    return token in _owners
