"""Names of jobs, by which repeated work is recognised.

A job is one decision of the broker over bundles that were stored apart, found by its
token. The token is derived from a name that the caller chose. So a second run meets the
decision of the first: once that is COMMIT, nothing is sent again.

A run that was given up has decided ROLLBACK, which is final. The next run is then a new
generation of the same name. A generation begins only when the one before it is rolled
back, so at most one is ever committed.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final, NamedTuple
from uuid import UUID

from txmq.client.protocol.calls import Calls

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


async def current_job(call: Calls, name: str) -> NamedJob:
    """Return the generation of the job that is not rolled back.

    Generations are rolled back in their order. So the steps double, and then halve:
    1,000 rolled back generations cost about 20 calls. The last call is about the
    generation that is returned, behind one that is rolled back: what happens to either
    between two calls is seen.
    """
    rolled_back, step, grows = -1, 1, True
    while True:
        token = job_token(name, rolled_back + step)
        reply = await call("job.show", {"token": token.hex})
        if reply["outcome"] == ROLLBACK:
            rolled_back += step
            step = 2 * step if grows else max(step // 2, 1)
        elif step > 1:
            step, grows = step // 2, False
        else:
            return NamedJob(token, reply["outcome"] == COMMIT)
