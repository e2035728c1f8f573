"""Drain of spools without an owner, by a command or a program that only does that."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from txmq.client.blocking.connect import connect
from txmq.errors import RequestTimeout
from txmq.recover.local.spools import retry_refused, spools_below

if TYPE_CHECKING:
    from uuid import UUID

    from txmq.recover.local.spools import SpoolSummary


class SpoolProblem(NamedTuple):
    """A spool that was left alone, and why."""

    path: str
    problem: str


class DrainResult(NamedTuple):
    """Messages that were sent, that still wait, and that the broker refused.

    `problems` are of spools whose messages wait because they cannot be sent there.
    """

    sent: int
    left: int
    refused: int
    problems: tuple[SpoolProblem, ...] = ()


def drain_spools(
    url: str, directory: str, *, timeout: float, service: str | None = None, refused: bool = False
) -> DrainResult:
    """Send what waits in the spools without an owner below a directory.

    With `refused`, try those messages again, too, that the broker refused. Spools of a
    live process are left to it. Raises StoreError where the directory cannot be used,
    and BrokerUnavailable where no broker answers.
    """
    if refused:
        retry_refused(directory)
    before = _unowned(directory)
    with connect(url, service=service, spool=directory) as client:
        log_id = client.log_id
        with suppress(RequestTimeout):  # the result tells
            client.spool.wait(timeout)
    # By what is on disk: a client counts no spool that it leaves alone.
    after = _unowned(directory)
    left = sum(spool.messages for spool in after)
    now_refused = sum(spool.refused for spool in after) - sum(spool.refused for spool in before)
    sent = sum(spool.messages for spool in before) - left - now_refused
    problems = (SpoolProblem(spool.path, _problem(spool, log_id)) for spool in after)
    return DrainResult(sent, left, now_refused, tuple(one for one in problems if one.problem))


def _unowned(directory: str) -> list[SpoolSummary]:
    return [spool for spool in spools_below(directory) if not spool.owned]


def _problem(spool: SpoolSummary, log_id: UUID) -> str:
    if not spool.problem and spool.messages and spool.log_id not in (None, log_id):
        return f"its messages are for the broker of log {spool.log_id}, and this one has {log_id}"
    return spool.problem
