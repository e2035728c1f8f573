"""The counters of a consumer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ConsumerStats:
    """Counts of messages since the consumer was made.

    `filtered`: not wanted, by tags or selector. `returned`: given back unprocessed.
    `duplicates`: passed over by the inbox. `retried`: handled again in place, after a
    conflict in the database or as one of the `attempts_in_place`. `refused`: acked
    after the lease had run out, so that they are delivered again. `rejoined` counts how
    often the consumer joined its group anew.
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
