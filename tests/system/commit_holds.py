"""Points of COMMIT that hold transactions, so that a kill meets them there.

`BeforeCommitRecord` has a deferred trigger that waits for a lock. A transaction held
there is not committed, but a server that lives on commits it without its client.
`AfterCommitRecord` waits for a standby that does not exist. The commit record of a
transaction held there is in the log, so a kill cannot undo it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Final

import psycopg2

from tests.system.order_worker import application_name
from txmq.testing.postgres_server import OwnServer
from txmq.testing.wait import wait_until

LOCK: Final = 7
TRIGGER: Final = f"""
CREATE FUNCTION wait_for_hold() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock_shared({LOCK}); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON placed DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION wait_for_hold()
"""
HELD: Final = """
SELECT split_part(application_name, ' ', 2), pid FROM pg_stat_activity
WHERE application_name LIKE %s AND query LIKE 'COMMIT%%' AND wait_event = %s
"""


class CommitHold(ABC):
    """A hold for the commits of all orders in the database `dbname`.

    The table of the orders needs TRIGGER.
    """

    wait_event: str
    committed: bool  # held transactions stay committed if their backend dies

    def __init__(self, server: OwnServer, dbname: str) -> None:
        self._server, self._dbname = server, dbname

    @abstractmethod
    def start(self) -> None:
        """Hold commits from now on."""

    @abstractmethod
    def stop(self) -> None:
        """Hold no more commits. The server may have restarted since `start`."""

    def release(self) -> None:
        """Stop, and wait until all held commits have passed."""
        self.stop()
        wait_until(lambda: not self.held(), what="no commit is held")

    def hold_commits(self, number: int) -> dict[int, int]:
        """Start, and wait for so many held commits; return them as `held` does."""
        self.start()
        wait_until(lambda: len(self.held()) >= number, what=f"{number} held commits")
        return self.held()

    def held(self) -> dict[int, int]:
        """Return the pids of the workers whose commits are held, each with its
        backend.
        """
        connection = self._server.connect(self._dbname)
        try:
            with connection.cursor() as cursor:
                cursor.execute(HELD, (application_name("%"), self.wait_event))
                return {int(worker): int(backend) for worker, backend in cursor.fetchall()}
        finally:
            connection.close()


class BeforeCommitRecord(CommitHold):
    """A hold by a lock, which ends with the server."""

    wait_event = "advisory"
    committed = False

    def start(self) -> None:
        self._locker = self._server.connect(self._dbname)
        with self._locker.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s)", (LOCK,))

    def stop(self) -> None:
        with suppress(psycopg2.Error):
            self._locker.close()


class AfterCommitRecord(CommitHold):
    """A hold by a setting, which outlives the server."""

    wait_event = "SyncRep"
    committed = True

    def start(self) -> None:
        self._set("SET synchronous_standby_names = 'missing'")

    def stop(self) -> None:
        self._set("RESET synchronous_standby_names")

    def _set(self, change: str) -> None:
        self._server.execute(f"ALTER SYSTEM {change}")
        self._server.execute("SELECT pg_reload_conf()")


HOLDS: Final = (BeforeCommitRecord, AfterCommitRecord)
