"""Places in a COMMIT where transactions can be held, so that a kill is sure to meet
them there.

`BeforeTheRecord`: a deferred trigger waits for a lock; whoever is killed there has not
committed, unless the server goes on without its client. `AfterTheRecord`: COMMIT is in
the log and waits for a standby that does not exist; it stands, whoever is killed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Final

import psycopg2

from tests.system.placing import application
from txmq.testing.postgres import OwnServer
from txmq.testing.wait import wait_until

LOCK: Final = 7
TRIGGER: Final = f"""
CREATE FUNCTION pass_gate() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock_shared({LOCK}); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON placed DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION pass_gate()
"""
HELD: Final = """
SELECT split_part(application_name, ' ', 2), pid FROM pg_stat_activity
WHERE application_name LIKE %s AND query LIKE 'COMMIT%%' AND wait_event = %s
"""
PATIENCE_S: Final = 60.0


class Gate(ABC):
    """Closed, it holds every COMMIT of an order. On the database named `dbname`, with
    TRIGGER on its orders.
    """

    wait_event: str
    stands: bool  # what it holds is committed, whatever happens to its backend

    def __init__(self, server: OwnServer, dbname: str) -> None:
        self._server, self._dbname = server, dbname

    @abstractmethod
    def close(self) -> None:
        """From now on nothing gets through."""

    @abstractmethod
    def let_through(self) -> None:
        """Holds nobody any more. The server may have been restarted since `close`."""

    def open(self) -> None:
        """Returns once all that were held have passed."""
        self.let_through()
        wait_until(lambda: not self.held(), PATIENCE_S, what="nobody at the gate")

    def hold(self, number: int) -> dict[int, int]:
        """Closes, and returns once so many are held: the pid of each worker and of its
        backend.
        """
        self.close()
        wait_until(
            lambda: len(self.held()) >= number, PATIENCE_S, what=f"{number} commits at the gate"
        )
        return self.held()

    def held(self) -> dict[int, int]:
        """Who is held."""
        connection = self._server.connect(self._dbname)
        try:
            with connection.cursor() as cursor:
                cursor.execute(HELD, (application("%"), self.wait_event))
                return {int(worker): int(backend) for worker, backend in cursor.fetchall()}
        finally:
            connection.close()


class BeforeTheRecord(Gate):
    """Held by a lock, which is gone with the server."""

    wait_event = "advisory"
    stands = False

    def close(self) -> None:
        self._keeper = self._server.connect(self._dbname)
        with self._keeper.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s)", (LOCK,))

    def let_through(self) -> None:
        with suppress(psycopg2.Error):
            self._keeper.close()


class AfterTheRecord(Gate):
    """Held by a setting, which outlives the server."""

    wait_event = "SyncRep"
    stands = True

    def close(self) -> None:
        self._set("SET synchronous_standby_names = 'nobody'")

    def let_through(self) -> None:
        self._set("RESET synchronous_standby_names")

    def _set(self, change: str) -> None:
        self._server.execute(f"ALTER SYSTEM {change}")
        self._server.execute("SELECT pg_reload_conf()")


GATES: Final = (BeforeTheRecord, AfterTheRecord)
