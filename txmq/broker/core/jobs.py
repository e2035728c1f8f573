"""Jobs: one decision over many groups that were stored apart, such as by the tasks of a Spark write.

Each task stores a group under a token of its own whose decider is the job; the decision names the winners and drops
all others. Repeating it changes nothing, and what comes for a decided job is not stored: a task tried twice, a driver
that died and a job that is run again never send twice.

A decision is kept for 7 days after the token was made, if that tells its time (UUIDv7): a job as old as that takes no
groups any more. A token of another kind stands for a name that may come again any time; its decision is kept for 400
days, after which a job of that name is a new one.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.broker.core import backlog
from txmq.broker.core import decisions as tx
from txmq.broker.core import tables as t
from txmq.broker.core.events import JobDecided, JobsForgotten
from txmq.broker.core.holds import Release
from txmq.broker.core.state import Outcome, Rejected, State
from txmq.broker.core.transactions import KEPT, get, is_timed, token_time
from txmq.errors import UnknownTransaction
from txmq.message import Decision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.broker.core.events import Place


NAMED_KEPT = 400 * 24 * 3600 * 1_000_000


class DecideJob(NamedTuple):
    """Commit the groups named, in this order, and drop the rest of the job; or drop all of it."""

    token: bytes
    outcome: Decision
    winners: tuple[bytes, ...]
    by: str


class JobReceipt(NamedTuple):
    """How the job was decided; `repeated` = before this call."""

    outcome: Decision
    repeated: bool


def members(state: State, job: bytes) -> Iterator[bytes]:
    """The tokens of the undecided groups stored for a job."""
    start = t.JOB_PART_KEY.pack(job, bytes(16))
    for key, _row in state.tables[t.JOB_PARTS].range(start, t.JOB_PART_KEY.pack(job, b"\xff" * 16)):
        yield key[16:]


def is_over(state: State, job: bytes, now: int) -> bool:
    """Whether a job takes no more groups: it was decided, or is so old that this may have been forgotten."""
    return state.tables[t.JOBS].get(job) is not None or _is_old(job, now)


def _is_old(job: bytes, now: int) -> bool:
    return is_timed(job) and token_time(job) < now - KEPT


def decide_job(state: State, command: DecideJob, now: int) -> Outcome | Rejected:
    known = state.tables[t.JOBS].get(command.token)
    if known is not None:
        return Outcome(reply=JobReceipt(Decision(known[0]), repeated=True))
    stored = tuple(members(state, command.token))
    if not stored and _is_old(command.token, now):
        return Rejected(UnknownTransaction, f"job {command.token.hex()} is older than the outcomes that are kept")
    winners = command.winners if command.outcome is Decision.COMMIT else ()
    missing = sorted(set(winners) - set(stored))
    if missing:
        hint = "run the job again: nothing of it was sent"
        return Rejected(UnknownTransaction, f"group {missing[0].hex()} of the job is not stored or not complete", hint)
    return Outcome((_decided(state, command, winners, stored),), JobReceipt(command.outcome, repeated=False))


def _decided(state: State, command: DecideJob, winners: tuple[bytes, ...], stored: tuple[bytes, ...]) -> JobDecided:
    release = Release(state, lambda ticket, token: tx.committed(state, ticket, token))
    for token in winners:
        row = get(state, token)
        assert row is not None, "a member of the job is stored"
        tx.commit_into(state, release, row, row.waiting(token))
    losers = tuple(token for token in stored if token not in set(winners))
    released = tuple(release.released)
    return JobDecided(command.token, int(command.outcome), command.by, winners, losers, released, release.rest)


def apply_decided(state: State, event: JobDecided, place: Place) -> None:
    outcome = Decision(event.outcome)
    state.tables[t.JOBS].put(event.token, (event.outcome, event.by, place.stored_at))
    published = {token for token, _ticket, _offsets in event.released}
    for token in event.losers:
        verdict = tx.Decide(token, Decision.ROLLBACK, event.by, "not among the job's winners")
        tx.settle_one(state, verdict, place, published=False, ticket=0)
    # A record has more bytes than it names winners, so positions inside it serve as tickets that differ.
    for ticket, token in enumerate(event.winners, place.position):
        verdict = tx.Decide(token, outcome, event.by)
        tx.settle_one(state, verdict, place, published=token in published, ticket=ticket)
    for token in event.winners + event.losers:
        state.tables[t.JOB_PARTS].delete(t.JOB_PART_KEY.pack(event.token, token))
    tx.apply_released(state, event.released, place)
    backlog.add_all(state, event.later)


def old(state: State, now: int, start: bytes, most: int) -> tuple[JobsForgotten | None, bytes | None]:
    """Which of `most` jobs from `start` on are to be forgotten, and where the next ones begin; None = nowhere."""
    rows: Any = list(islice(state.tables[t.JOBS].range(start), most + 1))
    found = tuple(
        token
        for token, (_outcome, _by, at) in rows[:most]
        if (_is_old(token, now) if is_timed(token) else at < now - NAMED_KEPT)
    )
    return JobsForgotten(found) if found else None, rows[most][0] if len(rows) > most else None


def apply_forgotten(state: State, event: JobsForgotten, place: Place) -> None:
    del place
    for token in event.tokens:
        state.tables[t.JOBS].delete(token)


DECIDERS = {DecideJob: decide_job}
APPLIERS: dict[type, Any] = {JobDecided: apply_decided, JobsForgotten: apply_forgotten}
