"""Jobs: bundles stored by the tasks of a job, and one decision that names the winners.

A task may run twice, and each attempt stores a bundle. The decision publishes one
bundle of each task and drops the others. Repeating the decision changes nothing, and
bundles of a decided job are dropped: a job that runs again never sends twice.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from typing import Unpack
from uuid import UUID

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.bundle_upload import BundleUpload
from txmq.client.blocking.transaction.decisions import await_state
from txmq.client.protocol.sender.rows import Fields, Rows, checked_messages
from txmq.client.protocol.transaction.job_decision import (
    JobOutcome,
    decide_args,
    decided,
    describe_job,
    outcome_of,
)
from txmq.client.protocol.transaction.job_parts import JobParts
from txmq.errors import StaleTopic
from txmq.model.bundle import BundleState
from txmq.model.message import COMMIT, ROLLBACK, Decision, Message
from txmq.wire.bundle import BundleDescription, BundlePart


class Job:
    """A job at the broker. Made by `client.job`.

    All processes of the job share its token. A job that nobody decides is rolled back
    `expire_after` seconds after one of its bundles was stored; 0 = never.
    """

    def __init__(self, core: BlockingCore, token: UUID, *, expire_after: float) -> None:
        self._core = core
        self._expire_after = expire_after
        self.token = token

    def group(self) -> JobBundle:
        """Return a new bundle, for one attempt of one task."""
        service = self._core.settings.service or ""
        return JobBundle(self._core, describe_job(self.token, service, self._expire_after))

    def store(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> UUID:
        """Store a bundle of these messages; return its token, for `decide`."""
        group = self.group()
        for message in checked_messages(messages):
            group.add(topic, message, partition)
        return group.store()

    def decide(self, winners: Sequence[UUID]) -> JobOutcome:
        """Publish the bundles with these tokens; drop all others.

        They are published in this order, but for small ones, which do not wait until
        large ones are visible, and those that wait for an undecided message of a key.

        Raises UnknownTransaction if one of them is not stored; nothing is decided then.
        """
        return self._decide(COMMIT, winners)

    def wait_published(self, winners: Iterable[UUID], timeout: float = 5.0) -> bool:
        """Wait until consumers can see these bundles of a committed job; False = not
        yet.

        A large bundle takes a moment. A bundle with a key of an undecided transaction
        waits for that transaction.
        """
        deadline = time.monotonic() + timeout
        return all(
            await_state(self._core, one, BundleState.PUBLISHED, deadline) is BundleState.PUBLISHED
            for one in winners
        )

    def abort(self) -> JobOutcome:
        """Drop all bundles of the job, also those that arrive later."""
        return self._decide(ROLLBACK, ())

    def outcome(self) -> Decision | None:
        """Return the outcome of the job; None = it is undecided."""
        return outcome_of(self._core.call("job.show", {"token": self.token.hex}, repeat=True))

    def _decide(self, outcome: Decision, winners: Sequence[UUID]) -> JobOutcome:
        args = decide_args(self.token, outcome, winners)
        return decided(self._core.call("job.decide", args, repeat=True))


class JobBundle:
    """The bundle of one attempt of one task. For one thread.

    It is stored in parts as messages come, so it may exceed this process's memory.
    After an error try the task again with another one.
    """

    def __init__(self, core: BlockingCore, description: BundleDescription) -> None:
        self._core = core
        self._parts = JobParts(core.topics, description)
        self.token = self._parts.token

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Add a message; store a part that is full. Raises as `client.send`."""
        self.add(topic, Message(body, **fields), partition)

    def add(self, topic: str, message: Message, partition: int | None = None) -> None:
        """Add a message, as `send` does."""
        self._parts.add(topic, message, partition)
        self._store_full()

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> None:
        """Add messages given as columns. Raises as `send` does."""
        self._parts.add_columns(topic, bodies, keys, tags, partition)
        self._store_full()

    def send_rows(self, topic: str, rows: Rows, size: int) -> None:
        """Add rows of about so many bytes, for txmq's own jobs."""
        self._parts.add_rows(topic, rows, size, None)
        self._store_full()

    def store(self) -> UUID:
        """Complete the bundle and return its token."""
        self._store(self._parts.steps(seal=True))
        return self.token

    def _store_full(self) -> None:
        if self._parts.full:
            self._store(self._parts.steps(seal=False))

    def _store(self, steps: Generator[BundlePart, None, None]) -> None:
        deadline = time.monotonic() + self._core.settings.timeout
        part = next(steps, None)
        while part is not None:
            upload = BundleUpload(
                self._core, [part], time.monotonic() + self._core.settings.timeout
            )
            try:
                upload.send()
                upload.await_receipt()
            except StaleTopic as stale:
                if time.monotonic() >= deadline:
                    raise
                self._core.topics.refresh(str(stale.detail.get("topic", "")))
                part = steps.throw(stale)
            else:
                part = next(steps, None)
