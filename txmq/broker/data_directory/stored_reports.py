"""The broker's memory of its reports to databases, in the file `reports`.

A database that lacks a report which is remembered here is a copy, or has lost commits.
One that holds more reports has those of another copy of this directory.
The memory outlives the broker, because a copy may take the original's place while the
broker is down.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Final

from txmq.broker.data_directory.private_files import replace_file
from txmq.model.decider import DatabaseId
from txmq.tx.postgres.brokers import KnownReports

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME: Final = "reports"
NEVER: Final = KnownReports(remembered=True)


class StoredReports:
    """The reports that each database is known to hold.

    It is used by the threads of several resolvers.
    """

    def __init__(self, data: Path) -> None:
        self._path, self._lock = data / NAME, Lock()
        self._known: dict[DatabaseId, KnownReports] = {}
        if self._path.exists():
            for line in self._path.read_text("ascii").splitlines():
                system_id, database_oid, stored, most = map(int, line.split())
                known = KnownReports(stored, most, remembered=True)
                self._known[DatabaseId(system_id, database_oid)] = known

    def get(self, database: DatabaseId) -> KnownReports:
        """Return what is known of a database."""
        return self._known.get(database, NEVER)

    def stored(self) -> Mapping[DatabaseId, int]:
        """Return the number of the last stored report, by database."""
        return {database: known.stored for database, known in self._known.items()}

    def put(self, database: DatabaseId, known: KnownReports) -> None:
        """Remember what is known of a database, durably."""
        with self._lock:
            if self._known.get(database) != known:
                changed = self._known | {database: known}
                replace_file(self._path, lambda _inode: _lines(changed))
                self._known = changed  # not before it is on disk


def _lines(reports: Mapping[DatabaseId, KnownReports]) -> str:
    return "".join(
        f"{system_id} {database_oid} {known.stored} {known.most}\n"
        for (system_id, database_oid), known in reports.items()
    )
