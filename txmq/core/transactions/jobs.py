"""Jobs: one decision over many bundles that were stored apart, as by Spark tasks.

Each task stores a bundle under a token of its own, whose decider is the job. The
decision names the winners and drops all others. Repeating it changes nothing, and what
comes for a decided job is not stored. So a task that is tried twice, a driver that dies
and a job that is run again never send twice.

The decision is one record. A job of very many bundles is then carried out step by step,
from the backlog. What is sent meanwhile with a key of one of them may come before it.

A decision is kept for 7 days after its token was made, if the token tells its time
(UUIDv7); an older job takes no bundles any more. A token of another kind stands for a
name that may come again at any time. Its decision is kept for 400 days, after which a
job of that name is a new one.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.transactions import JobDecided, JobGroupsDone, JobsForgotten
from txmq.core.topics.key_order import ReleasePlan
from txmq.core.transactions import decisions as tx
from txmq.core.transactions import indexes
from txmq.core.transactions.model import get, has_time, is_forgotten
from txmq.errors import UnknownTransaction
from txmq.model.message import Decision
from txmq.model.units import DAY
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.events.base import RecordContext
    from txmq.core.events.transactions import Released
    from txmq.core.state.state import State
    from txmq.core.topics.key_order import Holder

BUNDLES_PER_STEP = 64  # 1 to 3 ms
NAMED_RETENTION = 400 * DAY


class DecideJob(NamedTuple):
    """Commit the winners of a job, in this order, and drop its other bundles.

    A ROLLBACK drops all of them.
    """

    token: bytes
    outcome: Decision
    winners: tuple[bytes, ...]
    by: str


class JobProgress(NamedTuple):
    """A row of table `job_work`: a decided job of which `done` bundles are
    processed.
    """

    position: int  # of the record of its decision
    by: str
    done: int
    winners: tuple[bytes, ...]
    losers: tuple[bytes, ...]

    def next_bundles(self, most: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Return the next bundles: winners, then losers."""
        winners = self.winners[self.done : self.done + most]
        start = max(self.done - len(self.winners), 0)
        return winners, self.losers[start : start + most - len(winners)]


class JobReceipt(NamedTuple):
    """The outcome of a job. `repeated`: it had been decided before."""

    outcome: Decision
    repeated: bool


def undecided_bundles(state: State, job: bytes) -> Iterator[bytes]:
    """Yield the tokens of undecided bundles that are stored for a job."""
    start = t.JOB_PART_KEY.pack(job, bytes(16))
    for key, _row in state.tables[t.JOB_PARTS].range(start, t.JOB_PART_KEY.pack(job, b"\xff" * 16)):
        yield key[16:]


def is_over(state: State, job: bytes, now: int) -> bool:
    """Return whether a job takes no more bundles.

    It was decided, or is so old that its decision may have been forgotten.
    """
    return state.tables[t.JOBS].get(job) is not None or _is_old(state, job, now)


def _is_old(state: State, job: bytes, now: int) -> bool:
    return has_time(job) and is_forgotten(state, job, now)


def decide_job(state: State, command: DecideJob, now: int) -> Outcome:
    decided = state.tables[t.JOBS].get(command.token)
    if decided is not None:
        return Outcome(reply=JobReceipt(Decision(decided[0]), repeated=True))
    stored = tuple(undecided_bundles(state, command.token))
    if not stored and _is_old(state, command.token, now):
        raise UnknownTransaction(
            f"job {command.token.hex()} is older than the outcomes that are kept",
            hint="make another job",
        )
    winners = command.winners if command.outcome is Decision.COMMIT else ()
    missing = sorted(set(winners) - set(stored))
    if missing:
        hint = "run the job again: nothing of it was sent"
        raise UnknownTransaction(
            f"transaction {missing[0].hex()} of the job is not stored or not complete", hint=hint
        )
    return Outcome(
        (_job_decided(state, command, winners, stored),),
        JobReceipt(command.outcome, repeated=False),
    )


def _job_decided(
    state: State, command: DecideJob, winners: tuple[bytes, ...], stored: tuple[bytes, ...]
) -> JobDecided:
    named = frozenset(winners)
    losers = tuple(token for token in stored if token not in named)
    if len(stored) > BUNDLES_PER_STEP:
        return JobDecided(
            command.token, int(command.outcome), command.by, winners, losers, (), in_steps=True
        )
    released, later = _plan_commits(state, winners)
    return JobDecided(
        command.token, int(command.outcome), command.by, winners, losers, released, later
    )


def _plan_commits(
    state: State, winners: Iterable[bytes]
) -> tuple[tuple[Released, ...], tuple[Holder, ...]]:
    """Return the publications of winners that are committed now, and what is left for
    the backlog.
    """
    plan = ReleasePlan(state, partial(tx.find_publishable, state))
    for token in winners:
        row = get(state, token)
        assert row is not None, "a bundle of the job is stored"
        tx.plan_outcome(state, plan, row, row.publishable(token), Decision.COMMIT)
    return plan.drain()


def get_progress(state: State, job: bytes) -> JobProgress | None:
    """Return the progress of a decided job; None = no step is left."""
    row: Any = state.tables[t.JOB_WORK].get(job)
    return None if row is None else JobProgress._make(row)


def next_step(state: State, job: bytes, work: JobProgress) -> JobGroupsDone:
    """Return the event of the next step of a job."""
    winners, losers = work.next_bundles(BUNDLES_PER_STEP)
    return JobGroupsDone(job, len(winners) + len(losers), *_plan_commits(state, winners))


def apply_decided(state: State, event: JobDecided, context: RecordContext) -> None:
    state.tables[t.JOBS].put(event.token, (event.outcome, event.by, context.stored_at))
    work = JobProgress(context.position, event.by, 0, event.winners, event.losers)
    if event.in_steps:
        state.tables[t.JOB_WORK].put(event.token, work)
        indexes.add_to_backlog(state, work.position, event.token)
        return
    _apply_outcomes(
        state, event.token, work, len(event.winners) + len(event.losers), context, event.released
    )
    indexes.add_all_to_backlog(state, event.later)


def apply_step(state: State, event: JobGroupsDone, context: RecordContext) -> None:
    work = get_progress(state, event.token)
    assert work is not None, "a step of a decided job"
    _apply_outcomes(state, event.token, work, event.groups, context, event.released)
    work = work._replace(done=work.done + event.groups)
    if work.done < len(work.winners) + len(work.losers):
        state.tables[t.JOB_WORK].put(event.token, work)
    else:
        state.tables[t.JOB_WORK].delete(event.token)
        indexes.remove_from_backlog(state, work.position)
    indexes.add_all_to_backlog(state, event.later)


def _apply_outcomes(
    state: State,
    job: bytes,
    work: JobProgress,
    groups: int,
    context: RecordContext,
    released: tuple[Released, ...],
) -> None:
    published = {token for token, _ticket, _offsets in released}
    winners, losers = work.next_bundles(groups)
    for token in losers:
        verdict = tx.DecideTransaction(
            token, Decision.ROLLBACK, work.by, "not among the job's winners"
        )
        tx.apply_outcome(state, verdict, context, published=False, ticket=0)
    # The record of a job's decision has more bytes than it names winners, so positions
    # inside it serve as tickets.
    for ticket, token in enumerate(winners, work.position + 1 + work.done):
        verdict = tx.DecideTransaction(token, Decision.COMMIT, work.by)
        tx.apply_outcome(state, verdict, context, published=token in published, ticket=ticket)
    for token in winners + losers:
        state.tables[t.JOB_PARTS].delete(t.JOB_PART_KEY.pack(job, token))
    tx.apply_released(state, released, context)


def find_expired(
    state: State, now: int, start: bytes, most: int
) -> tuple[JobsForgotten | None, bytes | None]:
    """Return the expired ones of `most` jobs from `start` on, and the next start.

    The next start is None after the last job.
    """
    rows: Any = list(islice(state.tables[t.JOBS].range(start), most + 1))
    expired = tuple(
        token
        for token, (_outcome, _by, at) in rows[:most]
        if (_is_old(state, token, now) if has_time(token) else at < now - NAMED_RETENTION)
    )
    return JobsForgotten(expired) if expired else None, rows[most][0] if len(rows) > most else None


def apply_forgotten(state: State, event: JobsForgotten, _context: RecordContext) -> None:
    for token in event.tokens:
        state.tables[t.JOBS].delete(token)


DECIDERS: Deciders = {DecideJob: decide_job}
APPLIERS: Appliers = {
    JobDecided: apply_decided,
    JobGroupsDone: apply_step,
    JobsForgotten: apply_forgotten,
}
