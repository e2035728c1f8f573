"""An order system with two databases: each order is a row in both and a message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event, Thread

from tests.system.order_system import OrderSystem
from tests.system.order_worker import TABLES, reported_outcomes
from tests.system.orders import ReportedOutcome, find_faults
from txmq.config.broker import XaDatabaseSettings, XaSettings
from txmq.recover.recoverer import XaRecoverer
from txmq.testing.wait import wait_until

EVERY_S = 0.5
PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"


class TwoDatabaseSystem:
    """An order system whose orders are rows of two databases."""

    def __init__(self, system: OrderSystem, second_dsn: str) -> None:
        self.system, self.dsns = system, (system.dsn, second_dsn)
        self.second = system._replace(dsn=second_dsn)
        self.second.query(TABLES)

    @contextmanager
    def recovering(self, safety_s: float) -> Iterator[None]:
        """Run XA recovery for the block, over all crashes."""
        databases = tuple(
            XaDatabaseSettings(name=f"db{n}", dsn=dsn) for n, dsn in enumerate(self.dsns)
        )
        settings = XaSettings(every_s=EVERY_S, safety_s=safety_s, database=databases)
        over = Event()
        with closing(XaRecoverer(settings, [self.system.broker.url])) as recoverer:
            thread = Thread(target=recoverer.run, args=(over,))
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()

    def prepared(self) -> list[tuple[object, ...]]:
        """Return the gids of the prepared branches in both databases."""
        return [row for system in (self.system, self.second) for row in system.query(PREPARED)]

    def commits(self) -> int:
        return sum(
            outcome is ReportedOutcome.COMMITTED
            for outcome in reported_outcomes(self.system.journals).values()
        )

    def check(self) -> dict[str, int]:
        """Check that both databases and the topic have the same orders, and return
        counts.

        A COMMIT may have come too late.
        """
        wait_until(lambda: not self.prepared(), what="nothing is prepared")
        counts = self.system.check(may_time_out=True)
        first, second = self.system.rows(), self.second.rows()
        assert sorted(first) == sorted(second)
        reported = reported_outcomes(self.system.journals)
        assert find_faults(reported, second, self.system.messages()) == []
        return counts | {"rows of the second": len(second)}
