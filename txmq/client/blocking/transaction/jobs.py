"""Jobs: bundles stored by the tasks of a job, and one decision that names the winners.

A task may run twice, and each attempt stores a bundle. The decision publishes one
bundle of each task and drops the others. Repeating the decision changes nothing, and
bundles of a decided job are dropped: a job that runs again never sends twice.
"""

from __future__ import annotations

from txmq.client.protocol.awaited import jobs
from txmq.faces import blocking


class Job:
    """A job at the broker. Made by `client.job`.

    All processes of the job share its token. A job that nobody decides is rolled back
    `expire_after` seconds after one of its bundles was stored; 0 = never.
    """

    def __init__(self, job: jobs.Job) -> None:
        self._awaited, self.token = job, job.token

    def group(self) -> JobBundle:
        """Return a new bundle, for one attempt of one task."""
        return JobBundle(self._awaited.group())

    store = blocking(jobs.Job.store)
    decide = blocking(jobs.Job.decide)
    wait_published = blocking(jobs.Job.wait_published)
    abort = blocking(jobs.Job.abort)
    outcome = blocking(jobs.Job.outcome)


class JobBundle:
    """The bundle of one attempt of one task. For one thread.

    It is stored in parts as messages come, so it may exceed this process's memory.
    After an error try the task again with another one.
    """

    def __init__(self, bundle: jobs.JobBundle) -> None:
        self._awaited, self.token = bundle, bundle.token

    send = blocking(jobs.JobBundle.send)
    add = blocking(jobs.JobBundle.add)
    send_many = blocking(jobs.JobBundle.send_many)
    send_rows = blocking(jobs.JobBundle.send_rows)
    store = blocking(jobs.JobBundle.store)
