"""What a client knows of an outbox: see awaited/outbox.py."""

from __future__ import annotations

from typing import NamedTuple

LOOKS = 1_000  # transactions that look first, behind a stamp that has changed


class KnownStamp(NamedTuple):
    """The stamp of an outbox as a client saw it last; None = unknown, or rows waited.
    So many more transactions look first in any case.
    """

    stamp: int | None = None
    looks: int = 0

    def seen(self, stamp: int | None) -> KnownStamp:
        """Return what is known once a transaction has seen a stamp; 0 = no row was ever
        there.
        """
        if stamp == 0:
            return KnownStamp()
        changed = stamp is None or self.stamp not in (None, stamp)
        return KnownStamp(stamp, LOOKS if changed else max(0, self.looks - 1))
