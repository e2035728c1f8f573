"""Meter of what one user uses up, beside the user's quota.

A frame is judged once, whatever it holds. Decisions, acks, answers to check-backs and
what keeps a member alive are never refused: work that has begun comes to its end.
Counts are in memory, and begin anew with the broker.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from txmq.core.token_bucket import LONGEST_WAIT_S, LimitBuckets
from txmq.core.transactions.model import get
from txmq.errors import RemoteProtocolError, Throttled
from txmq.model.bundle import BundleState
from txmq.wire.batched import unpack_requests
from txmq.wire.bundle import token_of_part
from txmq.wire.data_requests import Opcode

if TYPE_CHECKING:
    from txmq.core.state.state import State
    from txmq.model.quota import Quota

HALVES = frozenset((Opcode.GROUP, Opcode.GROUPS))
WRITES = HALVES | {Opcode.SEND, Opcode.SENDS}
COUNTED = WRITES | {Opcode.FETCH, Opcode.READ}
# calls that end what has begun
FREE_CALLS = frozenset(
    ("checks.wait", "checks.answer", "consumer.heartbeat", "consumer.join", "consumer.leave",
     "consumer.nack", "consumer.return", "consumer.extend", "tx.decide", "tx.states", "user.me",
     "xa.outcome", "xa.decided", "xa.committed", "job.decide", "producer.register")
)  # fmt: skip
RECOUNT_S = 1.0  # between looks at which half messages are decided
UNDECIDED = (BundleState.OPEN, BundleState.UNDECIDED)
HINT = "an admin can raise it: txmq user quota"


class Meter:
    """The use of one user. `now` is the reactor's time."""

    def __init__(self, user: str, quota: Quota, now: float) -> None:
        self.user = user
        self._buckets = LimitBuckets()
        self.change(quota, now)
        self._halves: dict[bytes, None] = {}
        self._counted_at = float("-inf")
        self.refused: Counter[str] = Counter()  # by limit
        self.seconds = 0.0  # that the user was told to wait
        self.last_at = float("-inf")  # a refusal, by the reactor's time

    def change(self, quota: Quota, now: float) -> None:
        """Have another quota from now on. What was used up still counts."""
        self.quota = quota
        self._bytes = self._buckets.change("bytes_per_s", quota.bytes_per_s, now)
        self._requests = self._buckets.change("requests_per_s", quota.requests_per_s, now)

    def check_request(self, state: State, opcode: int, payload: bytes, now: float) -> None:
        """Count a request. Raises Throttled where the user has to wait."""
        if opcode not in COUNTED:
            return
        if self._requests is not None and (wait := self._requests.wait_s(now)):
            raise self._refused("requests_per_s", wait, now)
        if opcode in WRITES:
            if self._bytes is not None:
                if wait := self._bytes.wait_s(now):
                    raise self._refused("bytes_per_s", wait, now)
                self._bytes.take(len(payload))
            if self.quota.undecided and opcode in HALVES:
                self._count_halves(state, opcode, payload, now)
        if self._requests is not None:
            self._requests.take(1)

    def check_call(self, name: str, now: float) -> None:
        """Count a call. Raises Throttled where the user has to wait."""
        if self._requests is None or name in FREE_CALLS:
            return
        if wait := self._requests.wait_s(now):
            raise self._refused("requests_per_s", wait, now)
        self._requests.take(1)

    def _count_halves(self, state: State, opcode: int, payload: bytes, now: float) -> None:
        """Count half messages, further parts of one once. Those of before may have been
        decided meanwhile: that is looked up once a second.
        """
        try:
            parts = [payload] if opcode == Opcode.GROUP else unpack_requests(payload)
            new = {token for token in map(token_of_part, parts) if token not in self._halves}
        except RemoteProtocolError:
            return  # whoever carries it out refuses it
        if not new:
            return
        if len(self._halves) >= self.quota.undecided and now >= self._counted_at + RECOUNT_S:
            self._counted_at = now
            self._halves = dict.fromkeys(one for one in self._halves if _is_undecided(state, one))
        if len(self._halves) >= self.quota.undecided:
            raise self._refused("undecided", RECOUNT_S, now)
        self._halves |= dict.fromkeys(new)

    def refused_connection(self, now: float) -> Throttled:
        """Count a login beyond the number of connections, and return its error."""
        return self._refused("connections", LONGEST_WAIT_S, now)

    def _refused(self, limit: str, wait_s: float, now: float) -> Throttled:
        wait_s = min(wait_s, LONGEST_WAIT_S)
        self.refused[limit] += 1
        self.seconds += wait_s
        self.last_at = now
        most = getattr(self.quota, limit)
        return Throttled.after(
            wait_s, f"user {self.user!r} is beyond the quota {limit} of {most}", hint=HINT
        )

    def view(self, now: float) -> dict[str, object]:
        """Return what was refused, for operators."""
        return {
            "refused": dict(self.refused),
            "waited_s": round(self.seconds, 3),
            "last_s_ago": round(now - self.last_at, 3) if self.refused else None,
        }


def _is_undecided(state: State, token: bytes) -> bool:
    row = get(state, token)
    return row is not None and row.state in UNDECIDED
