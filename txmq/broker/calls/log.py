"""Control calls of the log itself: backups, copies and restores."""

from __future__ import annotations

from base64 import b64encode
from contextlib import closing
from typing import TYPE_CHECKING, Any
from uuid import UUID

import structlog
from twisted.internet.defer import Deferred, execute

from txmq.broker.calls.dispatcher import CallContext, Handler, then
from txmq.broker.calls.operators import audited
from txmq.broker.data_directory.log_holds import HOLD_S
from txmq.core.state import restores
from txmq.core.topics.restored_log import AcceptRestore, NoteBackup
from txmq.errors import BadRequest, StoreError, Throttled
from txmq.store.filesystem import RealFileSystem
from txmq.store.log.scrub import durable_spans
from txmq.store.log.segment import segment_path
from txmq.store.snapshot import snapshot_path, snapshot_positions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twisted.python.failure import Failure

    from txmq.broker.data_directory.log_holds import LogHolds
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import RunInThread
    from txmq.core.state.state import Restore
    from txmq.store.filesystem import FileSystem
    from txmq.wire.calls import logs as wire

log = structlog.get_logger()


class LogCalls:
    """Calls about the log: what backups read, and what restores lost."""

    def __init__(self, engine: Engine, holds: LogHolds, data: Path) -> None:
        self._engine, self._holds, self._data = engine, holds, data
        self._fs = RealFileSystem()
        self.in_thread: RunInThread = _at_once  # reads of files, for copies
        self.handlers: dict[str, Handler] = {
            "log.hold": self.hold,
            "log.read": self.read,
            "log.release": self.release,
            "log.backed_up": self.backed_up,
            "log.restores": self.restores,
            "log.accept": self.accept,
        }

    def hold(self, call: CallContext, args: wire.LogHold) -> None:
        """Keep the log for a backup or a copy; tell how far it is durable, and where it
        is.
        """
        store, state = self._engine.store, self._engine.state
        is_new = args.hold not in self._holds
        if not self._holds.hold(args.hold, args.position):
            hint = "wait for the other backups, or for their holds to end"
            call.answer(Throttled(f"{len(self._holds)} backups hold the log", hint=hint))
            return
        if is_new:
            log.info("log.held", hold=args.hold, user=call.user, position=args.position)
        incarnation = restores.incarnation(state)
        call.answer(
            {
                "log_id": str(store.log_id),
                "incarnation": None if incarnation is None else str(UUID(bytes=incarnation)),
                "segments": [segment.first for segment in store.segments()],
                "snapshots": [at for at in self._snapshots() if at <= store.durable],
                "durable": store.durable,
                "at": self._engine.now(),
                "data": str(self._data.absolute()),
                "expires_s": HOLD_S,
            }
        )

    def _snapshots(self) -> list[int]:
        return snapshot_positions(self._fs, str(self._data))

    def read(self, call: CallContext, args: wire.LogRead) -> None:
        """Read bytes of a segment, as far as it is durable, or of a snapshot."""
        directory, limit = str(self._data), None
        if args.file == "snapshot":
            path = snapshot_path(directory, args.position)
        else:
            path = segment_path(directory, args.position)
            ends = dict(durable_spans(self._engine.store))
            limit = ends.get(args.position, args.position) - args.position
        work = self.in_thread(_read, self._fs, path, limit, args.offset, args.size)
        work.addCallbacks(call.answer, _unreadable, errbackArgs=(call,))

    def release(self, call: CallContext, args: wire.LogRelease) -> None:
        self._holds.release(args.hold)
        call.answer({})

    def backed_up(self, call: CallContext, args: wire.LogBackedUp) -> None:
        """Record a backup, whose age is then watched."""
        log.info("log.backed_up", taken_at=args.taken_at)
        self._engine.submit(NoteBackup(args.taken_at), then(call.answer, lambda _reply: {}))

    def restores(self, call: CallContext, args: wire.LogRestores) -> dict[str, Any]:
        """Show the restores of the log, and the ends of the partitions at each."""
        state = self._engine.state
        topics = [
            {
                "topic_id": topic.topic_id,
                "topic": topic.name,
                "deleted": topic.deleted,
                "ends": [[epoch, list(ends)] for epoch, ends in topic.ends_at_restore],
            }
            for topic in (state.topics_by_id.values() if state.restores and args.topics else ())
        ]
        shown = [_view(one) for one in state.restores]
        log_id = str(self._engine.store.log_id)
        return {"log_id": log_id, "restores": shown, "topics": topics}

    def accept(self, call: CallContext, args: wire.RestoreAccept) -> None:
        log.warning("restore.accepted", operator=args.operator, reason=args.reason)
        command = AcceptRestore(args.operator, args.reason)
        acted = audited("log.accept", "log", args, command)
        self._engine.submit(acted, then(call.answer, lambda _reply: {}))


def _at_once(function: Callable[..., Any], *args: object) -> Deferred[Any]:
    return execute(function, *args)


def _read(
    fs: FileSystem, path: str, limit: int | None, offset: int, size: int
) -> dict[str, object]:
    """Return bytes of a file, of which `limit` belong to the log; None = all."""
    with closing(fs.open(path)) as file:
        end = file.size() if limit is None else limit
        data = file.pread(max(0, min(size, end - offset)), offset)
    return {"data": b64encode(data).decode(), "size": end}


def _unreadable(failure: Failure, call: CallContext) -> None:
    failure.trap(StoreError)
    hint = "it may have been removed meanwhile: hold the log again"
    call.answer(BadRequest(str(failure.value), hint=hint))


def _view(restore: Restore) -> dict[str, Any]:
    shown = restore._asdict() | {"incarnation": str(UUID(bytes=restore.incarnation))}
    return {"restored_at" if name == "at" else name: value for name, value in shown.items()}
