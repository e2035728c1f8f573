"""A preallocated file for the Twisted sink: write at once, sync in groups, answer."""

from __future__ import annotations

import os
from queue import SimpleQueue
from threading import Thread
from typing import Any, cast

from twisted.internet import protocol, reactor

from tests.bench.raw.disk import preallocate

Waiting = dict[protocol.Protocol, list[bytes]]


class GroupSync:
    """Replies wait for a sync: none, inline, or in a thread (a lone one inline)."""

    def __init__(self, path: str, size: int, sync: str) -> None:
        self.fd, self.end, self.sync = preallocate(path, size), 0, sync
        self.waiting: Waiting = {}
        self.due = self.syncing = False
        self.groups: SimpleQueue[Waiting] = SimpleQueue()
        self.loop = cast(Any, reactor)
        Thread(target=self.sync_groups, daemon=True).start()

    def append(self, data: bytes, sender: protocol.Protocol, replies: list[bytes]) -> None:
        os.write(self.fd, data)
        self.end += len(data)
        self.waiting.setdefault(sender, []).extend(replies)
        if not self.due and not self.syncing:
            self.due = True
            self.loop.callLater(0, self.flush)  # after this turn's other connections

    def flush(self) -> None:
        self.due, waiting, self.waiting = False, self.waiting, {}
        if self.sync == "thread" and sum(map(len, waiting.values())) > 1:
            self.syncing = True
            return self.groups.put(waiting)
        if self.sync != "none":
            os.fdatasync(self.fd)
        return answer(waiting)

    def sync_groups(self) -> None:
        while True:
            waiting = self.groups.get()
            os.fdatasync(self.fd)
            self.loop.callFromThread(self.synced, waiting)

    def synced(self, waiting: Waiting) -> None:
        self.syncing = False
        answer(waiting)
        if self.waiting:
            self.flush()


def answer(waiting: Waiting) -> None:
    for sender, replies in waiting.items():
        cast(Any, sender.transport).write(b"".join(replies))
