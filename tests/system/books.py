"""A shop with two books: each order is a row in both databases and a message, or
nothing anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event, Thread

from tests.system.orders import Outcome, faults
from tests.system.placing import TABLES, told
from tests.system.shop import Shop
from txmq.config.broker import Xa, XaDatabase
from txmq.recover.recoverer import XaRecoverer
from txmq.testing.wait import wait_until

EVERY_S = 0.5
PATIENCE_S = 120.0
PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"


class Books:
    """A shop whose orders are in two databases."""

    def __init__(self, shop: Shop, other: str) -> None:
        self.shop, self.dsns = shop, (shop.dsn, other)
        self.there = shop._replace(dsn=other)
        self.there.query(TABLES)

    @contextmanager
    def recovering(self, safety_s: float) -> Iterator[None]:
        """Recovery is at work all the while, whatever is down just now."""
        databases = tuple(XaDatabase(name=f"db{n}", dsn=dsn) for n, dsn in enumerate(self.dsns))
        settings = Xa(every_s=EVERY_S, safety_s=safety_s, database=databases)
        over = Event()
        with closing(XaRecoverer(settings, [self.shop.broker.url])) as recoverer:
            thread = Thread(target=recoverer.run, args=(over,))
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()

    def prepared(self) -> list[tuple[object, ...]]:
        """What stands prepared."""
        return [row for shop in (self.shop, self.there) for row in shop.query(PREPARED)]

    def commits(self) -> int:
        return sum(outcome is Outcome.COMMITTED for outcome in told(self.shop.journals).values())

    def judge(self) -> dict[str, int]:
        """Fails where the databases and the topic do not have the same orders. A COMMIT
        may have come too late.
        """
        wait_until(lambda: not self.prepared(), PATIENCE_S, what="nothing is prepared")
        counts = self.shop.judge(timed=True)
        rows, there = self.shop.rows(), self.there.rows()
        assert sorted(rows) == sorted(there)
        assert faults(told(self.shop.journals), there, self.shop.messages()) == []
        return counts | {"rows there": len(there)}
