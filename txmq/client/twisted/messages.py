"""Calls of clients on Twisted about messages, dead letters, plans and jobs."""

from __future__ import annotations

from collections.abc import Awaitable
from uuid import UUID

from twisted.internet.defer import Deferred

from txmq.client.aio.client import Client
from txmq.client.protocol.awaited import jobs, plans
from txmq.client.protocol.transaction.half_message import HalfMessage
from txmq.client.twisted.bridge import Bridge
from txmq.client.twisted.deferring import deferring, iterating
from txmq.model.durations import Duration
from txmq.model.message import COMMIT, Decision


class TwistedMessageCalls:
    """The part of a client of one broker for single messages and letters."""

    _bridge: Bridge
    _awaited: Client

    describe_cluster = deferring(Client.describe_cluster)
    recall = deferring(Client.recall)
    find = iterating(Client.find)
    letters = iterating(Client.letters)
    edit_letter = deferring(Client.edit_letter)
    revert_letter = deferring(Client.revert_letter)
    replay_letters = deferring(Client.replay_letters)
    abandon_letters = deferring(Client.abandon_letters)
    retry_now = deferring(Client.retry_now)
    bury_retries = deferring(Client.bury_retries)
    skip_retries = deferring(Client.skip_retries)
    redrive_letters = deferring(Client.redrive_letters)
    try_letter = deferring(Client.try_letter)
    export_letters = deferring(Client.export_letters)
    import_letters = deferring(Client.import_letters)
    audit = iterating(Client.audit)
    trace = deferring(Client.trace)

    def job(self, token: UUID | bytes | str | None = None, *, expire_after: Duration = 0.0) -> Job:
        """Return the job with this token, or a new job: see Job.

        A job stores bundles one by one, and one decision publishes all of them.
        """
        return Job(self._bridge, self._awaited.job(token, expire_after=expire_after))

    def plan(self, name: str) -> ReplayPlan:
        """Return the replay plan of this name, to create it, to look at it, or to order
        what the broker shall do with it.
        """
        return ReplayPlan(self._bridge, self._awaited.plan(name))


class ReplayPlan:
    """A replay plan at the broker, by its name; as that of the blocking client."""

    def __init__(self, bridge: Bridge, awaited: plans.ReplayPlan) -> None:
        self._bridge, self._awaited, self.name = bridge, awaited, awaited.name

    create = deferring(plans.ReplayPlan.create)
    show = deferring(plans.ReplayPlan.show)
    letters = iterating(plans.ReplayPlan.letters)
    wait = deferring(plans.ReplayPlan.wait)
    approve = deferring(plans.ReplayPlan.approve)
    start = deferring(plans.ReplayPlan.start)
    pause = deferring(plans.ReplayPlan.pause)
    resume = deferring(plans.ReplayPlan.resume)
    cancel = deferring(plans.ReplayPlan.cancel)
    abandon = deferring(plans.ReplayPlan.abandon)
    delete = deferring(plans.ReplayPlan.delete)


class Job:
    """A job at the broker. Made by `client.job`; as that of the blocking client."""

    def __init__(self, bridge: Bridge, awaited: jobs.Job) -> None:
        self._bridge, self._awaited, self.token = bridge, awaited, awaited.token

    def group(self) -> JobBundle:
        """Return a new bundle, for one attempt of one task."""
        return JobBundle(self._bridge, self._awaited.group())

    store = deferring(jobs.Job.store)
    decide = deferring(jobs.Job.decide)
    wait_published = deferring(jobs.Job.wait_published)
    abort = deferring(jobs.Job.abort)
    outcome = deferring(jobs.Job.outcome)


class JobBundle:
    """The bundle of one attempt of one task; as that of the blocking client."""

    def __init__(self, bridge: Bridge, awaited: jobs.JobBundle) -> None:
        self._bridge, self._awaited, self.token = bridge, awaited, awaited.token

    send = deferring(jobs.JobBundle.send)
    add = deferring(jobs.JobBundle.add)
    send_many = deferring(jobs.JobBundle.send_many)
    store = deferring(jobs.JobBundle.store)


def half_message(bridge: Bridge, half: HalfMessage[Awaitable[bool]]) -> HalfMessage[Deferred[bool]]:
    """Return a half message whose decision returns a Deferred."""

    def decide(outcome: Decision) -> Deferred[bool]:
        return bridge.defer(half.commit if outcome is COMMIT else half.rollback)

    return HalfMessage(half.token, decide)
