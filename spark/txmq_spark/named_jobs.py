"""Names of jobs, by which a repeated write or replay is recognised.

A job is one decision of the broker over the bundles that its tasks stored, found by its
token. The token is derived from a name that the caller chose. So a second run meets the
decision of the first: once that is COMMIT, nothing is sent again.

A run that was given up has decided ROLLBACK, which is final. The next run is then a new
generation of the same name. A generation begins only when the one before it is rolled
back, so at most one is ever committed.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

if TYPE_CHECKING:
    from txmq.client.blocking.messages import ControlCalls

VERSION, VARIANT = 8 << 76, 2 << 62  # UUID version 8: the token of a job contains no time
MASK: Final = ~(0xF << 76 | 3 << 62)
COMMIT, ROLLBACK = "COMMIT", "ROLLBACK"


class NamedJob(NamedTuple):
    """The generation of a job to carry out, or the one that is `committed`."""

    token: UUID
    committed: bool


def job_token(name: str, generation: int = 0) -> UUID:
    """Return the token of a job, derived from its name."""
    digest = sha256(f"txmq job {generation} {name}".encode()).digest()
    return UUID(int=int.from_bytes(digest[:16], "big") & MASK | VERSION | VARIANT)


def current_job(broker: ControlCalls, name: str) -> NamedJob:
    """Return the generation of the job that is not rolled back."""
    for generation in count():
        token = job_token(name, generation)
        outcome = broker.call("job.show", token=token.hex)["outcome"]
        if outcome != ROLLBACK:
            return NamedJob(token, outcome == COMMIT)
    raise AssertionError("counting does not end")
