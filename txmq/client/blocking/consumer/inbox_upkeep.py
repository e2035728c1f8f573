"""The upkeep of an inbox, every few seconds: open the partitions that the member got,
and fold rows to ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from txmq.client.blocking.consumer.inbox_opening import InboxMember, InboxOpenings
from txmq.client.log import get_logger
from txmq.client.protocol.alarm_reports import AlarmReport, alarm_source, report_alarms
from txmq.errors import TxmqError
from txmq.faces import run
from txmq.tx.postgres.blocking import compact
from txmq.tx.postgres.drivers import blocking_driver
from txmq.tx.postgres.errors import translated

if TYPE_CHECKING:
    from txmq.tx.postgres.driver import BlockingConnection

EVERY_S = 5.0
REPORTED_S = 3_600.0
log = get_logger()


def open_connection(connect: Callable[[], BlockingConnection]) -> BlockingConnection:
    """Return a connection made by the user's function, in autocommit mode. Raises
    DatabaseUnavailable, DatabaseError.
    """
    with translated("connecting to PostgreSQL"):
        connection = connect()
        connection.autocommit = True
    return connection


class InboxUpkeep:
    """A thread with a connection of its own, as long as handlers run."""

    def __init__(self, member: InboxMember, connect: Callable[[], BlockingConnection]) -> None:
        self._member, self._connect = member, connect
        self._stopped = Event()
        self._thread = Thread(
            target=self._run, name=f"txmq-{member.settings.group}-inbox", daemon=True
        )
        self._connection: BlockingConnection | None = None
        self._folded_acks = 0  # the count of acks at the last fold
        self.openings = InboxOpenings(member)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Fold a last time and end."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._run_once()
                self._stopped.wait(EVERY_S)
            self._run_once()
        finally:
            if self._connection is not None:
                self._connection.close()

    def _run_once(self) -> None:
        """Run one round. After an error the next round tries again."""
        try:
            if self._connection is None or self._connection.closed:
                if self._connection is not None:
                    self.openings.forget()
                self._connection = open_connection(self._connect)
            if not self._stopped.is_set():
                run(self.openings.check_server(blocking_driver(self._connection)))
                self._open_assigned(self._connection)
            self._report_lost()
            acked = self._member.stats.acked
            if acked != self._folded_acks:
                compact(self._connection, self._member.group, str(self._member.log_id))
                self._folded_acks = acked
        except TxmqError as error:
            log.warning("inbox.not_tended", group=self._member.group, error=str(error))

    def _open_assigned(self, connection: BlockingConnection) -> None:
        """Open what no handler has opened: a partition may lack effects and have no new
        messages.
        """
        for position, topic in self.openings.assigned():
            self.openings.open(connection, position, topic)

    def _report_lost(self) -> None:
        """Report the alarm while the consumer runs, and for an hour after: nothing else
        would show it later.
        """
        if self.openings.lost:
            lost = ", ".join(self.openings.lost.values())[:900]
            text = f"group {self._member.group}: the database was restored to before {lost}"
            action = (
                "restore the effects of these messages by other means: they are not retained"
                " any more"
            )
            alarm = AlarmReport("inbox.lost", "critical", text, action)
            report_alarms(self._call, alarm_source("inbox"), [alarm], REPORTED_S)

    def _call(self, name: str, **args: object) -> dict[str, Any]:
        return self._member.core.call(name, args, repeat=True)
