"""The broker's memory of its reports to databases, in the file `reports`.

A database that lacks a report which is remembered here is a copy, or has lost commits.
The memory outlives the broker, because a copy may take the original's place while the
broker is down.
"""

from __future__ import annotations

import os
from threading import Lock
from typing import TYPE_CHECKING, Final

from txmq.model.decider import DatabaseId

if TYPE_CHECKING:
    from pathlib import Path

NAME: Final = "reports"


class StoredReports:
    """The number of the last report that each database is known to hold.

    It is used by the threads of several resolvers.
    """

    def __init__(self, data: Path) -> None:
        self._path, self._lock = data / NAME, Lock()
        self._numbers: dict[DatabaseId, int] = {}
        if self._path.exists():
            for line in self._path.read_text("ascii").splitlines():
                system_id, database_oid, number = map(int, line.split())
                self._numbers[DatabaseId(system_id, database_oid)] = number

    def get(self, database: DatabaseId) -> int:
        """Return the number of the database's last report; 0 = it has none."""
        return self._numbers.get(database, 0)

    def put(self, database: DatabaseId, number: int) -> None:
        """Remember a report, durably."""
        with self._lock:
            if self._numbers.get(database) != number:
                self._numbers[database] = number
                self._write()

    def _write(self) -> None:
        draft = self._path.with_suffix(".tmp")
        with draft.open("w", encoding="ascii") as file:
            for (system_id, database_oid), number in self._numbers.items():
                file.write(f"{system_id} {database_oid} {number}\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
