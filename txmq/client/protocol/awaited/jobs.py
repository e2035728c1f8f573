"""Jobs: the steps of `txmq.client.blocking.transaction.jobs`, for all faces."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Unpack
from uuid import UUID

from txmq.client.protocol.awaited.core import AwaitedCore
from txmq.client.protocol.awaited.decisions import await_state
from txmq.client.protocol.sender.accumulator import SideRequest
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
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import COMMIT, ROLLBACK, Decision, Message
from txmq.wire.bundle import BundleDescription, BundlePart, pack_part
from txmq.wire.data_requests import Opcode


class Job:
    """A job at the broker. Made by `client.job`.

    All processes of the job share its token. A job that nobody decides is rolled back
    `expire_after` seconds after one of its bundles was stored; 0 = never.
    """

    def __init__(self, core: AwaitedCore, token: UUID, *, expire_after: Duration) -> None:
        self._core = core
        self._expire_after = expire_after
        self.token = token

    def group(self) -> JobBundle:
        """Return a new bundle, for one attempt of one task."""
        service = self._core.settings.service or ""
        return JobBundle(self._core, describe_job(self.token, service, self._expire_after))

    async def store(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> UUID:
        """Store a bundle of these messages; return its token, for `decide`."""
        group = self.group()
        for message in checked_messages(messages):
            await group.add(topic, message, partition)
        return await group.store()

    async def decide(self, winners: Sequence[UUID]) -> JobOutcome:
        """Publish the bundles with these tokens; drop all others.

        They are published in this order, but for small ones, which do not wait until
        large ones are visible, and those that wait for an undecided message of a key.

        Raises UnknownTransaction if one of them is not stored; nothing is decided then.
        """
        return await self._decide(COMMIT, winners)

    async def wait_published(self, winners: Iterable[UUID], timeout: Duration = 5.0) -> bool:  # noqa: ASYNC109  # as of the blocking face
        """Wait until consumers can see these bundles of a committed job; False = not
        yet.

        A large bundle takes a moment. A bundle with a key of an undecided transaction
        waits for that transaction.
        """
        deadline = self._core.seconds() + seconds_of(timeout, "timeout")
        for one in winners:
            state = await await_state(self._core, one, BundleState.PUBLISHED, deadline)
            if state is not BundleState.PUBLISHED:
                return False
        return True

    async def abort(self) -> JobOutcome:
        """Drop all bundles of the job, also those that arrive later."""
        return await self._decide(ROLLBACK, ())

    async def outcome(self) -> Decision | None:
        """Return the outcome of the job; None = it is undecided."""
        args = {"token": self.token.hex}
        return outcome_of(await self._core.call("job.show", args, repeat=True))

    async def _decide(self, outcome: Decision, winners: Sequence[UUID]) -> JobOutcome:
        args = decide_args(self.token, outcome, winners)
        return decided(await self._core.call("job.decide", args, repeat=True))


class JobBundle:
    """The bundle of one attempt of one task. For one coroutine or thread.

    It is stored in parts as messages come, so it may exceed this process's memory.
    After an error try the task again with another one.
    """

    def __init__(self, core: AwaitedCore, description: BundleDescription) -> None:
        self._core = core
        self._parts = JobParts(core.topics, description)
        self._topics: set[str] = set()
        self.token = self._parts.token

    async def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Add a message; store a part that is full. Raises as `client.send`."""
        await self.add(topic, Message(body, **fields), partition)

    async def add(self, topic: str, message: Message, partition: int | None = None) -> None:
        """Add a message, as `send` does."""
        self._parts.add(topic, message, partition)
        await self._added(topic)

    async def send_many(
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
        await self._added(topic)

    async def send_rows(self, topic: str, rows: Rows, size: int) -> None:
        """Add rows of about so many bytes, for txmq's own jobs."""
        self._parts.add_rows(topic, rows, size, None)
        await self._added(topic)

    async def store(self) -> UUID:
        """Complete the bundle and return its token."""
        await self._store(self._parts.steps(seal=True))
        return self.token

    async def _added(self, topic: str) -> None:
        self._topics.add(topic)
        if self._parts.full:
            await self._store(self._parts.steps(seal=False))

    async def _store(self, steps: Generator[BundlePart, None, None]) -> None:
        for topic in self._topics:
            await self._core.topic(topic)
        deadline = self._core.seconds() + self._core.settings.timeout
        part = next(steps, None)
        while part is not None:
            try:
                await self._core.send_request(SideRequest(Opcode.GROUP, pack_part(part)))
            except StaleTopic as stale:
                if self._core.seconds() >= deadline:
                    raise
                await self._core.refresh(str(stale.detail.get("topic", "")))
                part = steps.throw(stale)
            else:
                part = next(steps, None)
