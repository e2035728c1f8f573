"""Calls for dead letters, the audit topic and lives, of clients on an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, Unpack

from txmq.client.protocol.audit import AuditEntry, AuditOptions, AuditPages
from txmq.client.protocol.awaited.core import AwaitedCalls, AwaitedCore
from txmq.client.protocol.awaited.jobs import Job
from txmq.client.protocol.call_steps import CallRun, CallSteps
from txmq.client.protocol.letter_changes import (
    IMPORT_EXPIRES_S,
    NO_ANSWER,
    TRIAL_POLL_S,
    ChangedLetters,
    ExportedLetters,
    ImportedLetters,
    Place,
    Trial,
    change_steps,
    export_steps,
    mark_steps,
    redrive_args,
    tried_args,
    try_args,
)
from txmq.client.protocol.letter_file import copies_of, new_file
from txmq.client.protocol.letters import DeadLetter, LetterOptions, selection_args
from txmq.client.protocol.lives import Trace, trace_steps
from txmq.client.protocol.message_search import message_id_of
from txmq.client.protocol.named_jobs import current_job
from txmq.client.protocol.transaction.job_decision import require_committed
from txmq.errors import TxmqError
from txmq.model.message import Receipt

T = TypeVar("T")


class WaitingCalls(AwaitedCalls, Protocol):
    """A client whose state is at hand, as its clock."""

    @property
    def _core(self) -> AwaitedCore: ...


class AwaitedLetterCalls:
    """The part of a client that changes dead letters, and tells what became of
    messages. Arguments, results and errors are those of the blocking client.
    """

    async def replay_letters(
        self: AwaitedCalls,
        group: str,
        letters: Sequence[Place | DeadLetter] | None = None,
        *,
        saved: str | None = None,
        operator: str,
        reason: str = "",
        **selection: Unpack[LetterOptions],
    ) -> ChangedLetters:
        """Put open dead letters back."""
        by = {"operator": operator, "reason": reason}
        return await awaited_calls(
            self.call, change_steps("dlq.replay", group, letters, saved, selection, **by)
        )

    async def abandon_letters(
        self: AwaitedCalls,
        group: str,
        letters: Sequence[Place | DeadLetter] | None = None,
        *,
        saved: str | None = None,
        operator: str,
        reason: str,
        **selection: Unpack[LetterOptions],
    ) -> ChangedLetters:
        """Close open dead letters for good."""
        by = {"operator": operator, "reason": reason}
        return await awaited_calls(
            self.call, change_steps("dlq.abandon", group, letters, saved, selection, **by)
        )

    async def redrive_letters(  # noqa: PLR0913  # what a redrive is
        self: AwaitedCalls,
        group: str,
        letters: Sequence[Place | DeadLetter] | None = None,
        *,
        to: str | None = None,
        to_group: str | None = None,
        saved: str | None = None,
        abandon: bool = False,
        again: bool = False,
        operator: str,
        reason: str,
        **selection: Unpack[LetterOptions],
    ) -> ChangedLetters:
        """Copy open dead letters to a topic, or give them to another group."""
        args = redrive_args(to, to_group, abandon=abandon, again=again)
        by = {"operator": operator, "reason": reason}
        return await awaited_calls(
            self.call, change_steps("dlq.redrive", group, letters, saved, selection, **args, **by)
        )

    async def try_letter(
        self: WaitingCalls,
        letter: DeadLetter,
        *,
        member: str,
        operator: str,
        reason: str = "",
        timeout: float = 30.0,  # noqa: ASYNC109  # as the other face has it
    ) -> Trial:
        """Deliver an open dead letter once, to one member, and wait for the outcome."""
        until = self._core.seconds() + timeout
        tried = await self.call("dlq.try", **try_args(letter, member, operator, reason))
        wanted = tried_args(letter, tried)
        while (found := Trial(**await self.call("dlq.tried", **wanted))).outcome == NO_ANSWER:
            if self._core.seconds() >= until:
                break
            await self._core.sleep(TRIAL_POLL_S)
        return found

    async def export_letters(
        self: AwaitedCalls,
        group: str,
        file: str | Path,
        *,
        saved: str | None = None,
        mark: bool = False,
        operator: str | None = None,
        reason: str = "",
        **selection: Unpack[LetterOptions],
    ) -> ExportedLetters:
        """Write dead letters to a new file."""
        chosen = {"group": group, **selection_args(saved, selection)}
        with new_file(Path(file), group) as writer:
            written = await awaited_calls(self.call, export_steps(chosen, writer))
        marked = ChangedLetters([], [])
        if mark:
            marked = await awaited_calls(self.call, mark_steps(group, written, operator, reason))
        return ExportedLetters(writer.letters, writer.damaged, len(marked.done), marked.refused)

    async def import_letters(
        self: WaitingCalls, file: str | Path, *, to: str, operator: str, again: bool = False
    ) -> ImportedLetters:
        """Send the messages of an export to a topic, once, all or none of them."""
        copies, damaged, name = copies_of(Path(file), operator, to, again=again)
        named = await awaited_calls(self.call, current_job(name))
        if copies and not named.committed:
            job = Job(self._core, named.token, expire_after=IMPORT_EXPIRES_S)
            bundle = job.group()
            for letter, headers in copies:
                await bundle.send(to, letter.data, key=letter.key, tag=letter.tag, headers=headers)
            stored = await bundle.store()
            decided = await job.decide([stored])
            require_committed(job.token, decided)
            if decided.repeated:  # somebody else has sent the same file meanwhile
                return ImportedLetters(len(copies), damaged, repeated=True)
            await job.wait_published([stored])
        return ImportedLetters(len(copies), damaged, named.committed)

    async def audit(
        self: AwaitedCalls, **wanted: Unpack[AuditOptions]
    ) -> AsyncIterator[AuditEntry]:
        """Iterate over what operators did, oldest first, for `async for`."""
        pages = AuditPages(wanted)
        while (args := pages.next_args()) is not None:
            for entry in pages.read(await self.call("audit.list", **args)):
                yield entry

    async def trace(
        self: AwaitedCalls,
        key: str | None = None,
        *,
        message_id: Receipt | str | None = None,
        limit: int = 20,
    ) -> Trace:
        """Return the life of a key or a message in all topics."""
        name = None if message_id is None else message_id_of(message_id)
        return await awaited_calls(self.call, trace_steps(key, name, limit))


async def awaited_calls(call: Callable[..., Awaitable[dict[str, Any]]], steps: CallSteps[T]) -> T:
    """Make the calls one after the other, and return the result."""
    run = CallRun(steps)
    while run.call is not None:
        name, args = run.call
        try:
            reply = await call(name, **args)
        except TxmqError as error:
            run.fail(error)
        else:
            run.reply(reply)
    result: T = run.result
    return result
