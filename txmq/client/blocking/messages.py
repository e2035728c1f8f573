"""Calls of the blocking client about single messages, dead letters and lives."""

from __future__ import annotations

from uuid import UUID

from txmq.client.blocking.plans import ReplayPlan
from txmq.client.blocking.transaction.jobs import Job
from txmq.client.protocol.awaited.messages import AwaitedMessageCalls as Calls
from txmq.client.protocol.awaited.plans import ReplayPlan as Plan
from txmq.faces import blocking, iterating


class BlockingMessageCalls:
    """The part of the blocking client for single messages and letters."""

    _awaited: Calls

    describe_cluster = blocking(Calls.describe_cluster)
    recall = blocking(Calls.recall)
    find = iterating(Calls.find)
    letters = iterating(Calls.letters)
    edit_letter = blocking(Calls.edit_letter)
    revert_letter = blocking(Calls.revert_letter)
    replay_letters = blocking(Calls.replay_letters)
    abandon_letters = blocking(Calls.abandon_letters)
    retry_now = blocking(Calls.retry_now)
    bury_retries = blocking(Calls.bury_retries)
    skip_retries = blocking(Calls.skip_retries)
    redrive_letters = blocking(Calls.redrive_letters)
    try_letter = blocking(Calls.try_letter)
    export_letters = blocking(Calls.export_letters)
    import_letters = blocking(Calls.import_letters)
    audit = iterating(Calls.audit)
    trace = blocking(Calls.trace)

    def job(self, token: UUID | bytes | str | None = None, *, expire_after: float = 0.0) -> Job:
        """Return the job with this token, or a new job: see Job.

        A job stores bundles one by one, and one decision publishes all of them.
        """
        return Job(Calls.job(self._awaited, token, expire_after=expire_after))

    def plan(self, name: str) -> ReplayPlan:
        """Return the replay plan of this name, to create it, to look at it, or to order
        what the broker shall do with it.
        """
        return ReplayPlan(Plan(self._awaited, name))
