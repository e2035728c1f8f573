"""Jobs: bundles stored by the tasks of a job, and one decision that names the winners.

A task may run twice, and each attempt stores a bundle. The decision publishes one
bundle of each task and drops the others. Repeating the decision changes nothing, and
bundles of a decided job are dropped: a job that runs again never sends twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import NamedTuple, Unpack
from uuid import UUID

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.bundle_upload import BundleUpload
from txmq.client.blocking.transaction.decisions import await_state
from txmq.client.protocol.sender.rows import (
    ROW_OVERHEAD,
    Fields,
    checked_messages,
    column_rows,
    estimated_size,
    micros_now,
)
from txmq.client.protocol.transaction.buffer import Buffer, BuiltBatches
from txmq.client.protocol.transaction.parts import EPOCH, PART_BYTES, cut_batches
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ClientClosed, RemoteProtocolError, StaleTopic
from txmq.model import limits
from txmq.model.bundle import BundleState
from txmq.model.decider import ByJob
from txmq.model.message import COMMIT, ROLLBACK, Decision, Message
from txmq.model.units import SECOND
from txmq.wire.bundle import NO_DIGEST, BundleDescription, BundlePart, PartBatch, pack_part


class JobOutcome(NamedTuple):
    """The outcome of a job; `repeated` = it was decided before this call.

    A repeated outcome may be another one than asked for.
    """

    outcome: Decision
    repeated: bool


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
        description = BundleDescription(
            ByJob(self.token.bytes),
            self._core.settings.service or "",
            (),
            int(self._expire_after * SECOND),
        )
        return JobBundle(self._core, description)

    def store(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> UUID:
        """Store a bundle of these messages; return its token, for `decide`."""
        group = self.group()
        for message in checked_messages(messages):
            group.add(topic, message, partition)
        return group.store()

    def decide(self, winners: Sequence[UUID]) -> JobOutcome:
        """Publish the bundles with these tokens, in this order; drop all others.

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
        outcome = self._core.call("job.show", {"token": self.token.hex}, repeat=True).get("outcome")
        return None if outcome is None else _decision(outcome)

    def _decide(self, outcome: Decision, winners: Sequence[UUID]) -> JobOutcome:
        args = {
            "token": self.token.hex,
            "outcome": outcome.name,
            "winners": [winner.hex for winner in winners],
        }
        reply = self._core.call("job.decide", args, repeat=True)
        return JobOutcome(_decision(reply.get("outcome")), bool(reply.get("repeated")))


class JobBundle:
    """The bundle of one attempt of one task. For one thread.

    It is stored in parts as messages come, so it may exceed this process's memory.
    After an error try the task again with another one.
    """

    def __init__(self, core: BlockingCore, description: BundleDescription) -> None:
        self._core = core
        self._description: BundleDescription | None = description
        self._buffer = Buffer(core.topics)
        self._weight = self._parts = self._messages = 0
        self._digest = sha256()
        self._sealed = False
        self.token = new_token()

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Add a message; store a part that is full. Raises as `client.send`."""
        self.add(topic, Message(body, **fields), partition)

    def add(self, topic: str, message: Message, partition: int | None = None) -> None:
        """Add a message, as `send` does."""
        self._require_open()
        self._buffer.add(topic, message, micros_now(), partition)
        self._add_weight(estimated_size(message))

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        header_cells: Sequence[bytes | None] | None = None,
        partition: int | None = None,
    ) -> None:
        """Add messages given as columns. Raises as `send` does.

        `header_cells` are headers as another batch had them: the broker checks them.
        """
        self._require_open()
        rows = column_rows(bodies, keys, tags, micros_now())
        rows = replace(rows, header_cells=header_cells)
        self._buffer.add_columns(topic, rows, partition)
        self._add_weight(
            sum(map(len, bodies))
            + ROW_OVERHEAD * len(bodies)
            + sum(len(cell or b"") for cell in header_cells or ())
        )

    def store(self) -> UUID:
        """Complete the bundle and return its token."""
        self._require_open()
        self._sealed = True
        self._store_buffered(seal=True)
        return self.token

    def _add_weight(self, size: int) -> None:
        self._weight += size
        if self._weight >= PART_BYTES:
            self._store_buffered(seal=False)

    def _store_buffered(self, *, seal: bool) -> None:
        """Store all messages of the buffer; those whose topic has grown meanwhile in
        its new partitions.
        """
        deadline = time.monotonic() + self._core.settings.timeout
        stored = BuiltBatches([], [])
        while True:
            before = len(stored.batches)
            # no keys are taken before the decision
            built = self._buffer.build(
                self.token, self._messages, limits.PART_ROWS, stored=stored.first(before)
            )
            try:
                for batches, last in _with_last(
                    cut_batches(built.batches[before:], PART_BYTES, limits.PART_ROWS)
                ):
                    self._store(batches, seal=seal and last)
                    stored = built.first(len(stored.batches) + len(batches))
            except StaleTopic as stale:
                if time.monotonic() >= deadline:
                    raise
                self._core.topics.refresh(str(stale.detail.get("topic", "")))
            else:
                break
        self._messages += sum(map(len, built.message_indexes))
        self._buffer.clear()
        self._weight = 0

    def _store(self, batches: tuple[PartBatch, ...], *, seal: bool) -> None:
        """Store the next part; the digest is of all parts but their headers."""
        part = BundlePart(
            self.token.bytes,
            self._parts,
            EPOCH,
            False,
            False,
            NO_DIGEST,
            self._description,
            batches,
        )
        digest = self._digest.copy()
        for piece in pack_part(part)[1:]:
            digest.update(piece)
        if seal:
            part = part._replace(sealed=True, digest=digest.digest())
        upload = BundleUpload(self._core, [part], time.monotonic() + self._core.settings.timeout)
        upload.send()
        upload.await_receipt()
        self._digest = digest
        self._parts += 1
        self._description = None  # only the first part has it

    def _require_open(self) -> None:
        if self._sealed:
            raise ClientClosed(
                f"Group {self.token} is complete", hint="begin another one with job.group()"
            )


def _with_last(
    parts: Sequence[tuple[PartBatch, ...]],
) -> Iterator[tuple[tuple[PartBatch, ...], bool]]:
    """Yield each part, and whether it is the last one."""
    for number, batches in enumerate(parts, 1):
        yield batches, number == len(parts)


def _decision(name: object) -> Decision:
    try:
        return Decision[str(name)]
    except KeyError as error:
        raise RemoteProtocolError(
            f"The broker sent {name!r:.80} as the outcome of a job"
        ) from error
