"""The counters of a consumer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(slots=True)
class ConsumerStats:
    """Counts of messages since the consumer was made.

    `filtered`: not wanted, by tags or selector. `returned`: given back unprocessed.
    `duplicates`: passed over by the inbox. `retried`: handled again in place, after a
    conflict in the database or as one of the `attempts_in_place`. `refused`: acked
    after the lease had run out, so that they are delivered again. `rejoined` counts how
    often the consumer joined its group anew.

    Of the local store, `stored` and `stored_bytes` are in it now, the oldest for
    `stored_oldest_s` seconds. `stored_attempts`: attempts at stored messages.
    `stores_full`: stores that take nothing more, for which nothing is fetched.
    """

    delivered: int = 0
    acked: int = 0
    nacked: int = 0
    dead_lettered: int = 0
    postponed: int = 0
    filtered: int = 0
    returned: int = 0
    duplicates: int = 0
    retried: int = 0
    rejoined: int = 0
    refused: int = 0
    stored: int = 0
    stored_bytes: int = 0
    stored_oldest_s: float = 0.0
    stored_attempts: int = 0
    stores_full: int = 0

    @classmethod
    def total(cls, each: Iterable[ConsumerStats]) -> ConsumerStats:
        """Return the sum of counters, and the age of the oldest message."""
        each = list(each)
        total = {field.name: sum(getattr(one, field.name) for one in each) for field in fields(cls)}
        oldest = max((one.stored_oldest_s for one in each), default=0.0)
        return cls(**total | {"stored_oldest_s": oldest})
