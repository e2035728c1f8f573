"""An inbox whose database is away: its workers wait, and the log has one line of it."""

from __future__ import annotations

from typing import Any

from structlog.testing import capture_logs

from txmq.client.log import LastingTrouble
from txmq.client.protocol.awaited.inbox import Database, InboxWork
from txmq.errors import DatabaseUnavailable
from txmq.faces import run


class Away(Database):
    """A database that is back at the last of so many attempts to connect."""

    def __init__(self, attempts: int) -> None:
        self.left = attempts

    @property
    def open(self) -> Any:
        return None if self.left else "driver"

    async def connect(self) -> Any:
        self.left -= 1
        if self.left:
            raise DatabaseUnavailable("connection refused")

    async def close(self) -> None:
        """There is nothing to close."""


class Open:
    """A member's inbox and a consumer that is open, as far as a worker asks them."""

    closed = False
    away = LastingTrouble("inbox.database_away", group="billing")


class Worker(InboxWork):
    """A worker that never really waits."""

    async def _finished(self, answer: object) -> None:
        """There is no handler."""

    async def _sleep(self, seconds: float) -> None:
        """Wait for nothing."""


def test_workers_whose_database_is_away_log_it_once_and_its_end() -> None:
    inboxes: Any = {None: Open()}
    source: Any = Open()
    workers = [Worker(source, inboxes, print, Away(9), lists=False) for _ in range(2)]
    with capture_logs() as logs:
        for worker in workers:
            connected: Any = run(worker._connected())
            assert connected == "driver"
    assert [one["event"] for one in logs] == [
        "inbox.database_away",
        "inbox.database_away_over",
        "inbox.database_away",
        "inbox.database_away_over",
    ]
