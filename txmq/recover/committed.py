"""Committed transactions, compared with their databases: the branches that somebody
rolled back by hand before any recoverer had seen them prepared.

Their ids are in the group at the home broker. As the transaction is committed, all its
branches had been prepared, so that each id is on disk and no other transaction's. Of
what was rolled back nothing of the kind is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from txmq.client.log import get_logger
from txmq.client.protocol.transaction.tokens import first_token
from txmq.errors import DatabaseError, TxmqError
from txmq.tx.orphans import Word, contradiction
from txmq.tx.xid import Branch

if TYPE_CHECKING:
    from txmq.recover.branches import Branches
    from txmq.recover.databases import Database, Place
    from txmq.recover.findings import Finding
    from txmq.recover.homes import Home

POSTGRES: Final = "postgres"
NONE: Final = UUID(int=0)
AT_ONCE: Final = 1_000  # ids in one question
LOOK_BACK_US: Final = (
    600 * 1_000_000
)  # by the tokens' times, where the broker has started meanwhile
LOOK_BACK_PAGES: Final = 200
MOST_LEFT: Final = 100_000  # branches of one home that cannot be told yet
log = get_logger()


class Committing(NamedTuple):
    """A branch of a committed transaction."""

    place: Place
    branch: Branch
    gid: str
    xid: int


@dataclass(slots=True)
class Followed:
    """How far a home's decisions were followed, and which branches still stood
    prepared, or could not be asked for.
    """

    boot_epoch: int = 0
    after: int = 0
    left: list[Committing] = field(default_factory=list)


class Committed:
    """Looks through what brokers have committed. What it finds is journalled."""

    def __init__(
        self, branches: Branches, databases: Iterable[Database], since: UUID | None = None
    ) -> None:
        """Nothing with a token before `since` is followed."""
        self._branches, self._since = branches, since
        self._databases = list(databases)
        self._followed: dict[str, Followed] = {}
        self._found: set[str] = (
            set()
        )  # gids; what was missed and what has just come may be the same

    def compare(self, home: Home, since: UUID) -> Iterator[Finding]:
        """The branches of this broker's committed transactions that are rolled back.

        Of tokens after `since`, in the databases that can be asked. `trouble` tells of
        a broker that fails meanwhile.
        """
        self._found.clear()
        yield from self._compare(home, since)

    def _compare(self, home: Home, since: UUID, pages: int | None = None) -> Iterator[Finding]:
        try:
            for rows in home.committed(since, pages):
                yield from self._aborted(_branches_of(rows), [])
        except TxmqError as error:
            home.trouble = str(error)

    def follow(self, home: Home) -> Iterator[Finding]:
        """The same of what was committed since the last call; at the first one, and
        where some was missed, of the last minutes, too. What cannot be told yet is
        asked for again.
        """
        self._found.clear()
        known = self._followed.setdefault(home.url, Followed())
        left, known.left = known.left, []
        yield from self._aborted(left, known.left)
        try:
            yield from self._news(home, known)
        except TxmqError as error:
            home.trouble = str(error)
        if len(known.left) > MOST_LEFT:
            log.warning("xa.not_followed", where=home.url, branches=len(known.left) - MOST_LEFT)
            del known.left[:-MOST_LEFT]

    def _news(self, home: Home, known: Followed) -> Iterator[Finding]:
        while True:
            page = home.call(
                "xa.committed", boot_epoch=known.boot_epoch, after=known.after, limit=AT_ONCE
            )
            if page["missed"]:
                since = max(
                    first_token(time.time_ns() // 1_000 - LOOK_BACK_US), self._since or NONE
                )
                yield from self._compare(home, since, LOOK_BACK_PAGES)
            known.boot_epoch, known.after = page["boot_epoch"], page["next"]
            rows = [
                row
                for row in page["transactions"]
                if self._since is None or row["token"] >= self._since.hex
            ]
            yield from self._aborted(_branches_of(rows), known.left)
            if len(page["transactions"]) < AT_ONCE:
                return

    def _aborted(self, branches: Iterable[Committing], left: list[Committing]) -> Iterator[Finding]:
        """Those of the branches that are rolled back; `left` gets those that may yet
        be.
        """
        by_place: dict[Place, list[Committing]] = {}
        for one in branches:
            by_place.setdefault(one.place, []).append(one)
        for database in self._databases:
            of_it = by_place.pop(database.place, []) if database.place is not None else []
            for start in range(0, len(of_it), AT_ONCE):
                yield from self._of_database(database, of_it[start : start + AT_ONCE], left)

    def _of_database(
        self, database: Database, branches: list[Committing], left: list[Committing]
    ) -> Iterator[Finding]:
        try:
            statuses = database.statuses(one.xid for one in branches)
        except DatabaseError as error:
            database.trouble = str(error)
            left += branches
            return
        for one in branches:
            status = statuses[one.xid]
            if contradiction(Word.COMMITTED, status):
                if one.gid in self._found:
                    continue
                self._found.add(one.gid)
                yield self._branches.mixed((database.name, one.gid), one.branch, Word.COMMITTED)
            elif status == "in progress":
                left.append(one)


def _branches_of(rows: Iterable[dict[str, Any]]) -> Iterator[Committing]:
    """The branches in databases of transactions, as a broker tells of them."""
    for participant in (one for row in rows for one in row["participants"] if one[0] == POSTGRES):
        _kind, system_id, _oid, name, _owner, gid, xid = participant
        branch = Branch.parse(gid)
        if branch is not None and xid is not None:
            yield Committing((system_id, name), branch, gid, xid)
