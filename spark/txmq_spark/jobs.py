"""Names of jobs: how a write or a replay that is run again is known to be the same.

A job is one decision at the broker over the groups its tasks stored, found by its
token. The token follows from a name the caller chose, so that a second run meets the
first one's decision: once committed, nothing is sent again. A run that was given up has
decided ROLLBACK, which stays so for ever, and the next run is a new generation of the
same name. Nobody starts a generation before the one below it is rolled back, so at most
one is ever committed.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import count
from typing import Any, Final, NamedTuple, Protocol
from uuid import UUID

VERSION, VARIANT = 8 << 76, 2 << 62  # a UUID of its maker's own kind: a job's token tells no time
MASK: Final = ~(0xF << 76 | 3 << 62)
COMMIT, ROLLBACK = "COMMIT", "ROLLBACK"


class Calls(Protocol):
    """Whoever can make control calls."""

    def call(self, name: str, /, **args: Any) -> dict[str, Any]: ...  # JSON


class Job(NamedTuple):
    """The generation that is to be carried out, or that was: `committed`."""

    token: UUID
    committed: bool


def token_of(name: str, generation: int = 0) -> UUID:
    """The token of a job by its name."""
    digest = sha256(f"txmq job {generation} {name}".encode()).digest()
    return UUID(int=int.from_bytes(digest[:16], "big") & MASK | VERSION | VARIANT)


def current(broker: Calls, name: str, *, take_over: bool = False) -> Job:
    """The generation of the job that is not rolled back.

    `take_over` rolls back one that is undecided and has stored something: what a run
    that died left behind, or what another run is about to decide, which then fails
    without having sent anything.
    """
    for generation in count():
        token = token_of(name, generation)
        found = broker.call("job.show", token=token.hex)
        outcome = found["outcome"]
        if take_over and outcome is None and found["groups"]:
            outcome = broker.call("job.decide", token=token.hex, outcome=ROLLBACK)["outcome"]
        if outcome != ROLLBACK:
            return Job(token, outcome == COMMIT)
    raise AssertionError("counting does not end")
