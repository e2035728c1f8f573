"""The decision of a job, as its calls have it, and what its bundles say of the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from txmq.errors import RemoteProtocolError, TransactionAborted
from txmq.model.decider import ByJob
from txmq.model.durations import Duration, micros_of
from txmq.model.message import COMMIT, Decision
from txmq.wire.bundle import BundleDescription


class JobOutcome(NamedTuple):
    """The outcome of a job; `repeated` = it was decided before this call.

    A repeated outcome may be another one than asked for.
    """

    outcome: Decision
    repeated: bool


def describe_job(token: UUID, service: str, expire_after: Duration) -> BundleDescription:
    """Return what a bundle of a job says of itself."""
    return BundleDescription(
        ByJob(token.bytes), service, (), micros_of(expire_after, "expire_after")
    )


def decide_args(token: UUID, outcome: Decision, winners: Sequence[UUID]) -> dict[str, Any]:
    """Return the arguments of `job.decide`."""
    return {
        "token": token.hex,
        "outcome": outcome.name,
        "winners": [winner.hex for winner in winners],
    }


def decided(reply: Mapping[str, Any]) -> JobOutcome:
    """Return the reply to `job.decide`."""
    return JobOutcome(_decision(reply.get("outcome")), bool(reply.get("repeated")))


def require_committed(token: UUID, outcome: JobOutcome) -> None:
    """Raise TransactionAborted unless the job is committed."""
    if outcome.outcome is not COMMIT:
        raise TransactionAborted(
            f"job {token} was rolled back", hint="do it again: nothing was sent"
        )


def outcome_of(reply: Mapping[str, Any]) -> Decision | None:
    """Return the outcome in the reply to `job.show`."""
    outcome = reply.get("outcome")
    return None if outcome is None else _decision(outcome)


def _decision(name: object) -> Decision:
    try:
        return Decision[str(name)]
    except KeyError as error:
        raise RemoteProtocolError(
            f"The broker sent {name!r:.80} as the outcome of a job"
        ) from error
