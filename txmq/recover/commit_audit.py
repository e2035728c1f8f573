"""Audit of committed transactions: branches that were rolled back by hand.

It finds branches that no recoverer had ever seen prepared, and such as a failover has
lost. Their xids and positions are in the bundle at the home broker. All branches of a
committed transaction had been prepared, so each xid is on disk and belongs to no other
transaction, unless that disk was replaced (`server_log`). That is not known of a
transaction that was rolled back.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from txmq.client.log import get_logger
from txmq.client.protocol.transaction.tokens import first_token_at
from txmq.errors import DatabaseError, TxmqError
from txmq.model.decider import postgres_branches
from txmq.model.units import HOUR, MINUTE
from txmq.tx.orphans import KnownOutcome, contradiction
from txmq.tx.xid import XaBranch

if TYPE_CHECKING:
    from txmq.model.decider import BranchPosition
    from txmq.recover.branches import BranchRecovery
    from txmq.recover.databases import DatabaseId, RecoveredDatabase
    from txmq.recover.findings import Finding
    from txmq.recover.home_brokers import HomeBroker

FIRST_TOKEN: Final = UUID(int=0)
MAX_IDS: Final = 1_000  # of one request
# Where commits were missed, tokens of this duration are compared again.
LOOK_BACK_US: Final = 10 * MINUTE
LOOK_BACK_PAGES: Final = 200
# After a failover commits are compared again: of the first duration, and of the next
# one where the first has no branch from before what was lost.
REVIEWED_US: Final = (LOOK_BACK_US, HOUR)
MAX_PENDING: Final = 100_000  # branches of one home whose end is unknown yet
log = get_logger()


class CommittedBranch(NamedTuple):
    """A branch of a committed transaction."""

    database: DatabaseId
    branch: XaBranch
    gid: str
    xid: int
    at: BranchPosition


@dataclass(slots=True)
class AuditPosition:
    """The position in a home's decisions, and the branches whose end is unknown yet."""

    boot_epoch: int = 0
    after: int = 0
    pending: list[CommittedBranch] = field(default_factory=list)
    parted: set[str] = field(default_factory=set)  # databases to compare again, by name
    # the last transaction id that a copy shares with the original, by database
    shared: dict[str, int] = field(default_factory=dict)


class CommitAudit:
    """Comparison of home brokers' commits with the databases.

    Branches that were rolled back are recorded as mixed outcomes. A branch is compared
    once, and again if its database may have lost it since.
    """

    def __init__(
        self,
        branches: BranchRecovery,
        databases: Iterable[RecoveredDatabase],
        since: UUID | None = None,
    ) -> None:
        """`follow` leaves out tokens before `since`."""
        self._branches, self._since = branches, since
        self._databases = list(databases)
        self._positions: dict[str, AuditPosition] = {}
        self._reported: set[str] = set()  # gids, each of which may come twice
        self._found: set[str] = set()  # the same of all calls: journals list them
        self._shared: dict[str, int] = {}  # of the home that is compared
        self._kept: set[str] = set()  # databases that have branches from before a failover

    def compare(self, home: HomeBroker, since: UUID) -> Iterator[Finding]:
        """Yield rolled-back branches of this home's commits with tokens after `since`.

        An error of the broker is left in its `trouble`.
        """
        self._reported.clear()
        self._find_copies(home)
        yield from self._compare(home, since)

    def _compare(
        self, home: HomeBroker, since: UUID, pages: int | None = None
    ) -> Iterator[Finding]:
        try:
            for rows in home.list_committed(since, pages):
                yield from self._find_rolled_back(_branches_of(rows), [])
        except TxmqError as error:
            home.trouble = str(error)

    def review(self, databases: Collection[str]) -> None:
        """Have the next call of `follow` compare recent commits again, because these
        databases may have lost branches that were there before.
        """
        for position in self._positions.values():
            position.parted.update(databases)

    def follow(self, home: HomeBroker) -> Iterator[Finding]:
        """Yield rolled-back branches of this home's commits since the last call.

        The first call, and one after missed commits, look 10 minutes back. Branches
        whose end is unknown are checked again by the next call.
        """
        self._reported.clear()
        position = self._find_copies(home)
        pending, position.pending = position.pending, []
        yield from self._find_rolled_back(pending, position.pending)
        try:
            yield from self._audit_new(home, position)
            yield from self._review(home, position)
        except TxmqError as error:
            home.trouble = str(error)
        if len(position.pending) > MAX_PENDING:
            log.warning(
                "xa.not_followed", where=home.url, branches=len(position.pending) - MAX_PENDING
            )
            del position.pending[:-MAX_PENDING]

    def _find_copies(self, home: HomeBroker) -> AuditPosition:
        """Note the databases that lack reports of this home; return its position."""
        position = self._positions.setdefault(home.url, AuditPosition())
        before, position.shared = position.shared, {}
        self._shared = position.shared
        try:
            reports = home.reports()
        except TxmqError as error:
            home.trouble = str(error)
            return position
        for database in self._databases:
            try:
                shared = database.shared_with(home.log_id, reports)
            except DatabaseError as error:
                database.trouble = str(error)
                continue
            if shared is not None:
                position.shared[database.name] = shared
        position.parted.update(position.shared.keys() - before.keys())
        return position

    def _audit_new(self, home: HomeBroker, position: AuditPosition) -> Iterator[Finding]:
        while True:
            page = home.call(
                "xa.committed", boot_epoch=position.boot_epoch, after=position.after, limit=MAX_IDS
            )
            if page["missed"]:
                since = max(
                    first_token_at(time.time_ns() // 1_000 - LOOK_BACK_US),
                    self._since or FIRST_TOKEN,
                )
                yield from self._compare(home, since, LOOK_BACK_PAGES)
            position.boot_epoch, position.after = page["boot_epoch"], page["next"]
            rows = [
                row
                for row in page["transactions"]
                if self._since is None or row["token"] >= self._since.hex
            ]
            yield from self._find_rolled_back(_branches_of(rows), position.pending)
            if len(page["transactions"]) < MAX_IDS:
                return

    def _review(self, home: HomeBroker, position: AuditPosition) -> Iterator[Finding]:
        """Yield branches that were lost after they had been compared."""
        self._kept.clear()
        for duration in REVIEWED_US:
            if position.parted <= self._kept:
                break
            start = first_token_at(time.time_ns() // 1_000 - duration)
            self._reported |= self._found
            for rows in home.list_committed(max(start, self._since or FIRST_TOKEN)):
                yield from self._find_rolled_back(_branches_of(rows), position.pending)
        position.parted.clear()

    def _find_rolled_back(
        self, branches: Iterable[CommittedBranch], pending: list[CommittedBranch]
    ) -> Iterator[Finding]:
        """Yield rolled-back branches; add those whose end is unknown to `pending`."""
        by_database: dict[DatabaseId, list[CommittedBranch]] = {}
        for one in branches:
            by_database.setdefault(one.database, []).append(one)
        for database in self._databases:
            its_own = by_database.pop(database.id, []) if database.id is not None else []
            for start in range(0, len(its_own), MAX_IDS):
                yield from self._find_rolled_back_in(
                    database, its_own[start : start + MAX_IDS], pending
                )

    def _find_rolled_back_in(
        self,
        database: RecoveredDatabase,
        branches: list[CommittedBranch],
        pending: list[CommittedBranch],
    ) -> Iterator[Finding]:
        try:
            shared = self._shared.get(database.name)
            ends = database.ends([(one.xid, one.at) for one in branches], shared)
        except DatabaseError as error:
            database.trouble = str(error)
            pending += branches
            return
        for one, (status, trace) in zip(branches, ends, strict=True):
            key = database.name, one.gid
            rolled_back = contradiction(KnownOutcome.COMMITTED, status)
            if trace.untold:
                database.trouble = f"branch {one.gid}: {trace.untold}"
                pending.append(one)
            elif trace.lost or rolled_back:
                if one.gid in self._reported:
                    continue
                self._reported.add(one.gid)
                self._found.add(one.gid)
                yield (
                    self._branches.record_lost(key, one.branch, trace.lost)
                    if trace.lost
                    else self._branches.record_mixed(key, one.branch, KnownOutcome.COMMITTED)
                )
            else:
                if one.at.timeline < database.timeline:
                    self._kept.add(database.name)
                if status == "in progress":
                    pending.append(one)


def _branches_of(rows: Iterable[dict[str, Any]]) -> Iterator[CommittedBranch]:
    """Yield the database branches in a broker's rows of transactions."""
    for one in (one for row in rows for one in postgres_branches(row["participants"])):
        branch = XaBranch.parse(one.gid)
        if branch is not None and one.xid is not None:
            yield CommittedBranch((one.system_id, one.database), branch, one.gid, one.xid, one.at)
