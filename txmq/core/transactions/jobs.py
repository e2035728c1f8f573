"""Jobs: one decision over many groups that were stored apart, such as by the tasks of a
Spark write.

Each task stores a group under a token of its own whose decider is the job; the decision
names the winners and drops all others. Repeating it changes nothing, and what comes for
a decided job is not stored: a task tried twice, a driver that died and a job that is
run again never send twice.

The decision is one record. A job of very many groups is then carried out some groups at
a time, from the backlog: what is sent meanwhile with a key of one of them may come
before it.

A decision is kept for 7 days after the token was made, if that tells its time (UUIDv7):
a job as old as that takes no groups any more. A token of another kind stands for a name
that may come again any time; its decision is kept for 400 days, after which a job of
that name is a new one.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.transactions import JobDecided, JobGroupsDone, JobsForgotten
from txmq.core.state.state import Outcome, Rejected, State
from txmq.core.topics.key_order import Release
from txmq.core.transactions import backlog
from txmq.core.transactions import decisions as tx
from txmq.core.transactions.model import KEPT, get, is_timed, token_time
from txmq.errors import UnknownTransaction
from txmq.model.message import Decision
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.events.base import Place
    from txmq.core.events.transactions import Released


AT_ONCE = 64  # groups in one record: 1 to 3 ms
NAMED_KEPT = 400 * 24 * 3600 * 1_000_000


class DecideJob(NamedTuple):
    """Commit the groups named, in this order, and drop the rest of the job; or drop all
    of it.
    """

    token: bytes
    outcome: Decision
    winners: tuple[bytes, ...]
    by: str


class Work(NamedTuple):
    """A row of table `job_work`: a decided job with very many groups, of which so many
    are dealt with.
    """

    position: int  # of the record of its decision
    by: str
    done: int
    winners: tuple[bytes, ...]
    losers: tuple[bytes, ...]

    def slice(self, most: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """The next ones: winners, and losers where no winner is left."""
        winners = self.winners[self.done : self.done + most]
        start = max(self.done - len(self.winners), 0)
        return winners, self.losers[start : start + most - len(winners)]


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
    """Whether a job takes no more groups: it was decided, or is so old that this may
    have been forgotten.
    """
    return state.tables[t.JOBS].get(job) is not None or _is_old(job, now)


def _is_old(job: bytes, now: int) -> bool:
    return is_timed(job) and token_time(job) < now - KEPT


def decide_job(state: State, command: DecideJob, now: int) -> Outcome | Rejected:
    known = state.tables[t.JOBS].get(command.token)
    if known is not None:
        return Outcome(reply=JobReceipt(Decision(known[0]), repeated=True))
    stored = tuple(members(state, command.token))
    if not stored and _is_old(command.token, now):
        return Rejected(
            UnknownTransaction,
            f"job {command.token.hex()} is older than the outcomes that are kept",
            "make another job",
        )
    winners = command.winners if command.outcome is Decision.COMMIT else ()
    missing = sorted(set(winners) - set(stored))
    if missing:
        hint = "run the job again: nothing of it was sent"
        return Rejected(
            UnknownTransaction,
            f"group {missing[0].hex()} of the job is not stored or not complete",
            hint,
        )
    return Outcome(
        (_decided(state, command, winners, stored),), JobReceipt(command.outcome, repeated=False)
    )


def _decided(
    state: State, command: DecideJob, winners: tuple[bytes, ...], stored: tuple[bytes, ...]
) -> JobDecided:
    named = frozenset(winners)
    losers = tuple(token for token in stored if token not in named)
    if len(stored) > AT_ONCE:
        return JobDecided(
            command.token, int(command.outcome), command.by, winners, losers, (), in_steps=True
        )
    release = _release(state, winners)
    released = tuple(release.released)
    return JobDecided(
        command.token, int(command.outcome), command.by, winners, losers, released, release.rest
    )


def _release(state: State, winners: Iterable[bytes]) -> Release:
    """What becomes of these, all of them committed now."""
    release = Release(state, lambda ticket, token: tx.committed(state, ticket, token))
    for token in winners:
        row = get(state, token)
        assert row is not None, "a member of the job is stored"
        tx.commit_into(state, release, row, row.waiting(token))
    return release


def under_way(state: State, job: bytes) -> Work | None:
    """What is yet to be done of a job that was decided."""
    row: Any = state.tables[t.JOB_WORK].get(job)
    return None if row is None else Work._make(row)


def next_step(state: State, job: bytes, work: Work) -> JobGroupsDone:
    """Some more groups of a job, in one record."""
    winners, losers = work.slice(AT_ONCE)
    release = _release(state, winners)
    return JobGroupsDone(job, len(winners) + len(losers), tuple(release.released), release.rest)


def apply_decided(state: State, event: JobDecided, place: Place) -> None:
    state.tables[t.JOBS].put(event.token, (event.outcome, event.by, place.stored_at))
    work = Work(place.position, event.by, 0, event.winners, event.losers)
    if event.in_steps:
        state.tables[t.JOB_WORK].put(event.token, work)
        backlog.add(state, work.position, event.token)
        return
    _settle(state, event.token, work, len(event.winners) + len(event.losers), place, event.released)
    backlog.add_all(state, event.later)


def apply_done(state: State, event: JobGroupsDone, place: Place) -> None:
    work = under_way(state, event.token)
    assert work is not None, "a step of a job that is under way"
    _settle(state, event.token, work, event.groups, place, event.released)
    work = work._replace(done=work.done + event.groups)
    if work.done < len(work.winners) + len(work.losers):
        state.tables[t.JOB_WORK].put(event.token, work)
    else:
        state.tables[t.JOB_WORK].delete(event.token)
        backlog.drop(state, work.position)
    backlog.add_all(state, event.later)


def _settle(
    state: State, job: bytes, work: Work, groups: int, place: Place, released: tuple[Released, ...]
) -> None:
    published = {token for token, _ticket, _offsets in released}
    winners, losers = work.slice(groups)
    for token in losers:
        verdict = tx.Decide(token, Decision.ROLLBACK, work.by, "not among the job's winners")
        tx.settle_one(state, verdict, place, published=False, ticket=0)
    # The record of a job's decision has more bytes than it names winners, so positions
    # inside it serve as tickets.
    for ticket, token in enumerate(winners, work.position + 1 + work.done):
        verdict = tx.Decide(token, Decision.COMMIT, work.by)
        tx.settle_one(state, verdict, place, published=token in published, ticket=ticket)
    for token in winners + losers:
        state.tables[t.JOB_PARTS].delete(t.JOB_PART_KEY.pack(job, token))
    tx.apply_released(state, released, place)


def old(
    state: State, now: int, start: bytes, most: int
) -> tuple[JobsForgotten | None, bytes | None]:
    """Which of `most` jobs from `start` on are to be forgotten, and where the next ones
    begin; None = nowhere.
    """
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
APPLIERS: dict[type, Any] = {
    JobDecided: apply_decided,
    JobGroupsDone: apply_done,
    JobsForgotten: apply_forgotten,
}
