"""A member with local stores on a real disk, and the broker's answers given by the
test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

from tests.client.scripted_member import ScriptedMember
from txmq.client.blocking.consumer.local_stores import LocalStores
from txmq.client.protocol.consumer.local_recovery import LocalRecovery
from txmq.client.protocol.consumer.member import Member
from txmq.model.retry import RetryPolicy

LOG_ID = UUID(int=77)
TOPIC_ID = 5


class StoredMember(ScriptedMember):
    """A member whose store's work is done when the test says so (`disk`)."""

    def __init__(self, directory: Path, mode: str = "concurrent", **options: Any) -> None:
        options = {"on_failure": "local", "local_store": str(directory), **options}
        super().__init__(mode, **options)
        self.member = Member(self.member.settings, "i-1", owner=self, wall_us=self.wall_us)
        self.operations = type(self.operations)(self.member)
        self.retry: dict[str, Any] | None = None
        self.stores = LocalStores(self.member.settings, lambda: LOG_ID, self.wall_us)

    @property
    def recovery(self) -> LocalRecovery:
        assert self.member.recovery is not None
        return self.member.recovery

    def wall_us(self) -> int:
        return int(self.now * 1_000_000)

    def join_reply(
        self, *partitions: int, generation: int = 1, group: str = "billing"
    ) -> dict[str, Any]:
        reply = super().join_reply(*partitions, generation=generation, group=group)
        retry = self.retry or (self.member.settings.retry or RetryPolicy()).to_json()
        return reply | {"topics": {"orders": TOPIC_ID}, "retry": retry}

    def disk(self) -> None:
        """Do all the store's work, without waiting for more of it."""
        for store in self.recovery.stores.values():
            store.linger_until = 0.0
        while self.member.failure is None and (jobs := self.recovery.jobs(self.now)):
            for job in jobs:
                self.recovery.finished(self.stores.perform(job), self.now)
                self.recovery.stores[job.topic].linger_until = 0.0

    def serving(self, *partitions: int, generation: int = 1) -> StoredMember:
        """Join, with an empty store that the broker has been told of."""
        self.joined(*partitions, generation=generation)
        self.disk()
        self.told()
        self.disk()
        return self

    def told(self, *verdicts: str, fences: tuple[int, ...] = (), **more: Any) -> list[Any]:
        """Answer the report in flight; return its entries, as (offset, state,
        attempt).
        """
        entries = self.args_of("consumer.stored")["entries"]
        fences = fences or (0,) * len(entries)
        words = verdicts or ("kept",) * len(entries)
        reply: dict[str, Any] = {"orders": [], "more": False} | more
        self.answer("consumer.stored", verdicts=words, fences=fences, **reply)
        return [(entry[3], entry[4], entry[5]) for entry in entries]

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.recovery.tick(self.now)
        self.disk()

    def crash(self) -> None:
        """End without a word to disk or broker."""
        self.stores.close()
