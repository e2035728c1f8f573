"""Calls for dead letters, the audit topic and lives, of clients of any face."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Unpack
from uuid import UUID

from txmq.client.protocol.audit import AuditEntry, AuditOptions, AuditPages
from txmq.client.protocol.awaited.core import AwaitedCore
from txmq.client.protocol.awaited.jobs import Job
from txmq.client.protocol.letter_changes import (
    IMPORT_EXPIRES_S,
    NO_ANSWER,
    TRIAL_POLL_S,
    ChangedLetters,
    ExportedLetters,
    ImportedLetters,
    Place,
    Trial,
    change_letters,
    mark_exported,
    redrive_args,
    tried_args,
    try_args,
    write_letters,
)
from txmq.client.protocol.letter_file import copies_of, new_file
from txmq.client.protocol.letters import DeadLetter, LetterOptions, selection_args
from txmq.client.protocol.lives import Trace, trace_messages
from txmq.client.protocol.message_search import TraceOptions, trace_args
from txmq.client.protocol.named_jobs import current_job
from txmq.client.protocol.transaction.job_decision import require_committed
from txmq.client.protocol.transaction.tokens import new_token, parse_token
from txmq.crashpoints import crashpoint
from txmq.model.durations import Duration, seconds_of
from txmq.model.letter_filter import RETRIED


class AwaitedLetterCalls:
    """The part of a client that changes dead letters, and tells what became of
    messages.
    """

    _core: AwaitedCore

    def job(
        self,
        token: UUID | bytes | str | None = None,
        *,
        expire_after: Duration = 0.0,
    ) -> Job:
        """Return the job with this token, or a new job: see Job.

        A job stores bundles one by one, and one decision publishes all of them.
        """
        named = new_token() if token is None else parse_token(token)
        return Job(self._core, named, expire_after=expire_after)

    async def replay_letters(
        self,
        group: str,
        letters: Sequence[Place | DeadLetter] | None = None,
        *,
        saved: str | None = None,
        operator: str,
        reason: str = "",
        **selection: Unpack[LetterOptions],
    ) -> ChangedLetters:
        """Put open dead letters back: those at these places, or all of a selection.

        For many letters, a `plan` has a rate and rules to stop by.
        """
        by = {"operator": operator, "reason": reason}
        return await change_letters(
            self._core.call, "dlq.replay", group, letters, saved, selection, **by
        )

    async def abandon_letters(
        self,
        group: str,
        letters: Sequence[Place | DeadLetter] | None = None,
        *,
        saved: str | None = None,
        operator: str,
        reason: str,
        **selection: Unpack[LetterOptions],
    ) -> ChangedLetters:
        """Close open dead letters for good; their keys go on."""
        by = {"operator": operator, "reason": reason}
        return await change_letters(
            self._core.call, "dlq.abandon", group, letters, saved, selection, **by
        )

    async def retry_now(
        self,
        group: str,
        messages: Sequence[Place | DeadLetter] | None = None,
        *,
        operator: str,
        reason: str = "",
        **selection: Unpack[LetterOptions],
    ) -> ChangedLetters:
        """Deliver messages at once that wait for their next attempt: those at these
        places, or all of a selection. `letters` with states "retrying", "replaying" and
        "local" finds them.
        """
        by = {"operator": operator, "reason": reason}
        return await self._change_retries("retry.now", group, messages, selection, **by)

    async def bury_retries(
        self,
        group: str,
        messages: Sequence[Place | DeadLetter] | None = None,
        *,
        operator: str,
        reason: str,
        **selection: Unpack[LetterOptions],
    ) -> ChangedLetters:
        """Make messages that are retried dead letters, before their last attempt."""
        by = {"operator": operator, "reason": reason}
        return await self._change_retries("retry.bury", group, messages, selection, **by)

    async def skip_retries(
        self,
        group: str,
        messages: Sequence[Place | DeadLetter] | None = None,
        *,
        operator: str,
        reason: str,
        **selection: Unpack[LetterOptions],
    ) -> ChangedLetters:
        """Close messages that are retried for good; their keys go on."""
        by = {"operator": operator, "reason": reason}
        return await self._change_retries("retry.skip", group, messages, selection, **by)

    async def _change_retries(
        self,
        call: str,
        group: str,
        messages: Sequence[Place | DeadLetter] | None,
        selection: LetterOptions,
        **by: str,
    ) -> ChangedLetters:
        chosen: LetterOptions = {"states": RETRIED, **selection} if selection else {}
        return await change_letters(self._core.call, call, group, messages, None, chosen, **by)

    async def redrive_letters(  # noqa: PLR0913  # what a redrive is
        self,
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
        """Copy open dead letters to a topic, or give them to another group; each once,
        unless `again`. With `abandon` the letters end in the same record.

        A copy in a topic is a new message with headers of its origin. A group gets the
        messages themselves, as they are for the first one.
        """
        args = redrive_args(to, to_group, abandon=abandon, again=again)
        by = {"operator": operator, "reason": reason}
        return await change_letters(
            self._core.call, "dlq.redrive", group, letters, saved, selection, **args, **by
        )

    async def try_letter(
        self,
        letter: DeadLetter,
        *,
        member: str,
        operator: str,
        reason: str = "",
        timeout: Duration = 30.0,  # noqa: ASYNC109  # as of the blocking face
    ) -> Trial:
        """Deliver an open dead letter once, to one member of its group, and wait for
        the outcome. If the member fails it, it is a dead letter again.
        """
        until = self._core.seconds() + seconds_of(timeout, "timeout")
        tried = await self._core.call("dlq.try", try_args(letter, member, operator, reason))
        wanted = tried_args(letter, tried)
        while (found := Trial(**await self._core.call("dlq.tried", wanted))).outcome == NO_ANSWER:
            if self._core.seconds() >= until:
                break
            await self._core.sleep(TRIAL_POLL_S)
        return found

    async def export_letters(
        self,
        group: str,
        file: str | Path,
        *,
        saved: str | None = None,
        mark: bool = False,
        operator: str | None = None,
        reason: str = "",
        **selection: Unpack[LetterOptions],
    ) -> ExportedLetters:
        """Write dead letters to a new file: lines of JSON, with exact bodies.

        The file has its name once it is whole and on disk. With `mark` the letters are
        then noted as exported, for a group that keeps them until then. Raises
        ConfigError for a file that exists or cannot be written.
        """
        chosen = {"group": group, **selection_args(saved, selection)}
        with new_file(Path(file), group) as writer:
            written = await write_letters(self._core.call, chosen, writer)
        marked = ChangedLetters([], [])
        if mark:
            marked = await mark_exported(self._core.call, group, written, operator, reason)
        return ExportedLetters(writer.letters, writer.damaged, len(marked.done), marked.refused)

    async def import_letters(
        self, file: str | Path, *, to: str, operator: str, again: bool = False
    ) -> ImportedLetters:
        """Send the messages of an export to a topic, all or none of them, with headers
        of their origin.

        A file is sent to a topic once, however often that is tried, unless `again`. The
        broker knows it for 400 days. Raises ConfigError for a file that is not whole,
        and TransactionAborted if it took more than a day.
        """
        copies, damaged, name = copies_of(Path(file), operator, to, again=again)
        named = await current_job(self._core.call, name)
        if copies and not named.committed:
            job = self.job(named.token, expire_after=IMPORT_EXPIRES_S)
            bundle = job.group()
            for letter, headers in copies:
                await bundle.send(to, letter.data, key=letter.key, tag=letter.tag, headers=headers)
            stored = await bundle.store()
            crashpoint("import.before_decision")
            decided = await job.decide([stored])
            require_committed(job.token, decided)
            crashpoint("import.after_decision")
            if decided.repeated:  # somebody else has sent the same file meanwhile
                return ImportedLetters(len(copies), damaged, repeated=True)
            await job.wait_published([stored])
        return ImportedLetters(len(copies), damaged, named.committed)

    async def audit(self, **wanted: Unpack[AuditOptions]) -> AsyncIterator[AuditEntry]:
        """Iterate over what operators did, oldest first, page by page."""
        pages = AuditPages(wanted)
        while (args := pages.next_args()) is not None:
            for entry in pages.read(await self._core.call("audit.list", args)):
                yield entry

    async def trace(
        self, key: str | None = None, *, limit: int = 20, **wanted: Unpack[TraceOptions]
    ) -> Trace:
        """Return the life of a key, a message, or of what `body` and `header` find, in
        all topics: transaction, decision, deliveries, failures, edits, replays, and
        what operators did.

        Messages that follow from these, or that these follow from, are among them: see
        `txmq.caused_by`. `TraceOptions` describes the arguments.
        """
        return await trace_messages(self._core.call, trace_args(key, **wanted), limit)
