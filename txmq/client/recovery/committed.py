"""Committed transactions, compared with their databases: the branches that somebody rolled back by hand before any
recoverer had seen them prepared.

Their ids are in the group at the home broker. As the transaction is committed, all its branches had been prepared, so
that each id is on disk and no other transaction's. Of what was rolled back nothing of the kind is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from txmq.errors import DatabaseError, TxmqError
from txmq.tx.orphans import Word, contradiction
from txmq.tx.xid import Branch

if TYPE_CHECKING:
    from txmq.client.recovery.branches import Branches
    from txmq.client.recovery.databases import Database, Place
    from txmq.client.recovery.findings import Finding
    from txmq.client.recovery.homes import Home

POSTGRES: Final = "postgres"


class Committed:
    """Looks through what brokers have committed."""

    def __init__(self, branches: Branches, databases: Iterable[Database]) -> None:
        self._branches = branches
        self._databases = list(databases)

    def compare(self, home: Home, since: UUID) -> Iterator[Finding]:
        """The branches of this broker's committed transactions that are rolled back; each is journalled.

        Of tokens after `since`, in the databases that can be asked. `trouble` tells of a broker that fails meanwhile.
        """
        known: dict[Place, Database] = {one.place: one for one in self._databases if one.place is not None}
        try:
            for row in home.committed(since):
                yield from self._of_transaction(row, known)
        except TxmqError as error:
            home.trouble = str(error)

    def _of_transaction(self, row: dict[str, Any], known: dict[Place, Database]) -> Iterator[Finding]:
        for participant in row["participants"]:
            if participant[0] != POSTGRES:
                continue
            _kind, system_id, _oid, name, _owner, gid, xid = participant
            database, branch = known.get((system_id, name)), Branch.parse(gid)
            if database is None or branch is None or xid is None:
                continue
            try:
                status = database.status_of(xid)
            except DatabaseError as error:
                database.trouble = str(error)
                continue
            if contradiction(Word.COMMITTED, status):
                yield self._branches.mixed((database.name, gid), branch, Word.COMMITTED)
