"""Quotas: limits of what a user may use up."""

from __future__ import annotations

from typing import NamedTuple


class Quota(NamedTuple):
    """Limits of one user; 0 = none.

    `bytes_per_s` are those of sends and half messages. `requests_per_s` are requests
    but for decisions, acks, check-backs and what keeps members alive. `topics` are
    those that the user has made, `undecided` the half messages without a decision.
    """

    bytes_per_s: int = 0
    requests_per_s: int = 0
    topics: int = 0
    undecided: int = 0
    connections: int = 0


NO_QUOTA = Quota()
