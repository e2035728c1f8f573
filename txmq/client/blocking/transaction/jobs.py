"""Jobs: groups stored apart, by tasks that may be tried twice, and one decision that
names the winners.

Repeating the decision changes nothing, and groups of a decided job are dropped: a job
run again never sends twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple, Unpack
from uuid import UUID

from txmq.client.blocking.core import Core
from txmq.client.blocking.sender.producer import Fields, checked_messages, micros_now
from txmq.client.blocking.transaction.bundles import EPOCH, PART_BYTES, Storing, chunks_of
from txmq.client.blocking.transaction.decisions import await_state
from txmq.client.protocol.sender.rows import ROW_BYTES, columns, weight
from txmq.client.protocol.transaction.buffer import Buffer
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ClientClosed, RemoteProtocolError
from txmq.model import limits
from txmq.model.bundle import GroupState
from txmq.model.message import COMMIT, ROLLBACK, Decision, Message
from txmq.wire.group import NO_DIGEST, Description, Part, PartBatch, pack_part


class JobOutcome(NamedTuple):
    """How a job is decided; `repeated`: it had been before this call, perhaps otherwise
    than was asked.
    """

    outcome: Decision
    repeated: bool


class Job:
    """A job at the broker, named by a token that every process of it knows. Made by
    `client.job`.

    A job whose driver never decides is rolled back `expire_after` seconds after a group
    of it was stored, 0 = never.
    """

    def __init__(self, core: Core, token: UUID, *, expire_after: float) -> None:
        self._core = core
        self._expire_after = expire_after
        self.token = token

    def group(self) -> JobGroup:
        """A new group, for one attempt of one task."""
        description = Description(
            ("job", self.token.bytes),
            self._core.settings.service or "",
            (),
            int(self._expire_after * 1_000_000),
        )
        return JobGroup(self._core, description)

    def store(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> UUID:
        """Stores a group of these messages and returns its token, to be named among the
        winners.
        """
        group = self.group()
        for message in checked_messages(messages):
            group.add(topic, message, partition)
        return group.store()

    def decide(self, winners: Sequence[UUID]) -> JobOutcome:
        """Publishes the groups with these tokens, in this order, and drops all others
        of the job.

        Raises UnknownTransaction where one of them is not stored: nothing is decided
        then.
        """
        return self._decided(COMMIT, winners)

    def wait_published(self, winners: Iterable[UUID], timeout: float = 5.0) -> bool:
        """Waits until consumers can see these groups of a committed job; whether they
        can.

        A large group takes a moment, and one with a key of an undecided transaction
        waits for that.
        """
        deadline = time.monotonic() + timeout
        return all(
            await_state(self._core, one, GroupState.PUBLISHED, deadline) is GroupState.PUBLISHED
            for one in winners
        )

    def abort(self) -> JobOutcome:
        """Drops all groups of the job, and those to come."""
        return self._decided(ROLLBACK, ())

    def outcome(self) -> Decision | None:
        """How the job is decided, None if it is not."""
        outcome = self._core.call("job.show", {"token": self.token.hex}, repeat=True).get("outcome")
        return None if outcome is None else _decision(outcome)

    def _decided(self, outcome: Decision, winners: Sequence[UUID]) -> JobOutcome:
        args = {
            "token": self.token.hex,
            "outcome": outcome.name,
            "winners": [winner.hex for winner in winners],
        }
        reply = self._core.call("job.decide", args, repeat=True)
        return JobOutcome(_decision(reply.get("outcome")), bool(reply.get("repeated")))


class JobGroup:
    """Messages of one attempt of one task. They are stored in parts as they come, so
    they may be more than fits here.

    For one thread. After an error the group is of no use; the task is to be tried again
    with another one.
    """

    def __init__(self, core: Core, description: Description) -> None:
        self._core = core
        self._description: Description | None = description
        self._buffer = Buffer(core.topics)
        self._weight = self._parts = self._messages = 0
        self._digest = sha256()
        self._sealed = False
        self.token = new_token()

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Adds a message. Raises what `client.send` raises where a part that is full
        cannot be stored.
        """
        self.add(topic, Message(body, **fields), partition)

    def add(self, topic: str, message: Message, partition: int | None = None) -> None:
        """As `send`."""
        self._require_open()
        self._buffer.add(topic, message, micros_now(), partition)
        self._grown(weight(message))

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> None:
        """Adds messages given as columns. Raises as `send` does."""
        self._require_open()
        self._buffer.add_columns(topic, columns(bodies, keys, tags, micros_now()), partition)
        self._grown(sum(map(len, bodies)) + ROW_BYTES * len(bodies))

    def store(self) -> UUID:
        """Completes the group and returns its token."""
        self._require_open()
        self._sealed = True
        *full, last = self._chunks()
        for chunk in full:
            self._store(self._part(chunk))
        part = self._part(last)
        self._store(part._replace(sealed=True, digest=self._digest.digest()))
        return self.token

    def _grown(self, size: int) -> None:
        self._weight += size
        if self._weight >= PART_BYTES:
            for chunk in self._chunks():
                self._store(self._part(chunk))

    def _chunks(self) -> list[tuple[PartBatch, ...]]:
        built = self._buffer.build(
            self.token, self._messages, limits.PART_ROWS
        )  # no keys are taken before the decision
        self._messages += sum(map(len, built.places))
        self._buffer.clear()
        self._weight = 0
        return chunks_of(built.batches, PART_BYTES, limits.PART_ROWS)

    def _part(self, batches: tuple[PartBatch, ...]) -> Part:
        """The next part, taken into the digest: that is over all but its header."""
        part = Part(
            self.token.bytes,
            self._parts,
            EPOCH,
            False,
            False,
            NO_DIGEST,
            self._description,
            batches,
        )
        for piece in pack_part(part)[1:]:
            self._digest.update(piece)
        return part

    def _store(self, part: Part) -> None:
        storing = Storing(self._core, [part], time.monotonic() + self._core.settings.timeout)
        storing.send()
        storing.receipt()
        self._parts += 1
        self._description = None  # only the first part has it

    def _require_open(self) -> None:
        if self._sealed:
            raise ClientClosed(
                f"group {self.token} is complete", hint="begin another one with job.group()"
            )


def _decision(name: object) -> Decision:
    try:
        return Decision[str(name)]
    except KeyError as error:
        raise RemoteProtocolError(f"{name!r:.80} is no outcome of a job") from error
