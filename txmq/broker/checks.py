"""Check-backs: whoever can tell is asked what became of an undecided transaction.

Due checks are rows of the log's state, so nothing is forgotten over a restart; what is volatile here is only who is
being asked just now. A database's token row is asked by a resolver, a service's checker by a long poll of the
service's, and a job whose driver is gone is rolled back, because it is the broker that decides it: likewise what this
broker is the home of. What another home broker or a foreign manager decides is asked of nobody here, it only gets its
flag in time: a prepared branch is never rolled back by a clock.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from txmq.broker.core import branches
from txmq.broker.core import tables as t
from txmq.broker.core.decisions import Decide
from txmq.broker.core.jobs import DecideJob
from txmq.broker.core.state import Rejected
from txmq.broker.core.transactions import Transaction, get
from txmq.broker.core.upkeep import PlanCheck
from txmq.message import Decision
from txmq.tx.group import GroupState

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from txmq.broker.engine import Engine
    from txmq.broker.resolving import Resolves
    from txmq.tx.checkback import CheckSchedule

ASKED_AT_ONCE = 10_000  # transactions that are being asked about; the rest stay due
SCANNED_AT_ONCE = 1_000  # due rows looked at in one tick, so that no tick takes long
log = structlog.get_logger()


class Offer(NamedTuple):
    """A transaction that a checker of the service is to be asked about."""

    token: bytes
    row: Transaction


class CheckBacks:
    """Finds what is due, passes it on, and records the answers. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, schedule: CheckSchedule, resolving: Resolves, chance: Random) -> None:
        self._engine, self._schedule, self._resolving, self._chance = engine, schedule, resolving, chance
        self._asked: set[bytes] = set()
        self._offers: dict[str, deque[bytes]] = {}
        self._after = b""  # the last due row looked at: all before it are being asked about

    def tick(self) -> None:
        """Pass on what has become due."""
        now = self._engine.now()
        stop = t.DUE_KEY.pack(now + 1, 0, 0)
        rows = self._engine.state.tables[t.DUE].range(self._after + b"\0", stop)
        due = [(key, row[0]) for (key, row), _ in zip(rows, range(SCANNED_AT_ONCE), strict=False)]
        for key, token in due:
            if len(self._asked) >= ASKED_AT_ONCE:
                return
            self._after = key
            if t.DUE_KEY.unpack(key)[1] == t.DUE_CHECK:
                self._ask(token)

    def _ask(self, token: bytes) -> None:
        row = get(self._engine.state, token)
        if row is None or row.state is not GroupState.UNDECIDED or token in self._asked:
            return
        self._asked.add(token)
        kind = row.decider[0]
        if kind == "postgres":
            self._resolving.ask(token, row, self.answered)
        elif kind == "job":
            self._asked.discard(token)
            self._time_out(row)
        elif kind in branches.KINDS:
            self._asked.discard(token)
            self._due_branch(token, row)
        else:
            self._offer(token, row.service)

    def _time_out(self, row: Transaction) -> None:
        job: Any = row.decider[1]
        log.warning("job.timed_out", job=job.hex())
        self._engine.submit(DecideJob(job, Decision.ROLLBACK, (), "timeout"), _ignore)

    def _due_branch(self, token: bytes, row: Transaction) -> None:
        """Not before its time, whoever asks: a transaction at work is not to be rolled back by an operator's check."""
        if not row.check_at or row.check_at > self._engine.now():
            return
        if row.decider[:2] == ("home", self._engine.store.log_id.bytes):
            log.warning("transaction.timed_out", token=token.hex(), service=row.service)
            self._engine.submit(Decide(token, Decision.ROLLBACK, "timeout"), _ignore)
        else:
            self._plan(token, row, row.tries + 1)

    def _offer(self, token: bytes, service: str) -> None:
        """To whoever asks next for work of the service: its long polls look here now and then."""
        self._offers.setdefault(service, deque()).append(token)

    def take(self, service: str, most: int) -> list[Offer]:
        """Transactions for a checker of this service; each is given to one, and again later if that one does not
        answer.
        """
        queue = self._offers.get(service, deque())
        offers: list[Offer] = []
        while queue and len(offers) < most:
            token = queue.popleft()
            row = get(self._engine.state, token)
            if row is not None and row.state is GroupState.UNDECIDED:
                offers.append(Offer(token, row))
                self._plan(token, row, row.tries)
            self._asked.discard(token)
        return offers

    def answered(
        self, token: bytes, answer: Decision, by: str, reason: str = "", deliver: Callable[[Any], None] | None = None
    ) -> None:
        """Record an answer. UNKNOWN, which every refusal and error is, only moves the next check."""
        self._asked.discard(token)
        if answer is not Decision.UNKNOWN:
            self._engine.submit(Decide(token, answer, by, reason), deliver or _ignore)
            return
        row = get(self._engine.state, token)
        if row is not None and row.state is GroupState.UNDECIDED:
            self._plan(token, row, row.tries + 1, deliver)

    def _plan(self, token: bytes, row: Transaction, tries: int, deliver: Callable[[Any], None] | None = None) -> None:
        at = self._engine.now() + self._schedule.delay(max(tries, 1), self._chance.random())
        in_doubt = self._schedule.in_doubt(tries)
        if in_doubt and not row.in_doubt:
            log.error("transaction.in_doubt", token=token.hex(), service=row.service, tries=tries)
        self._engine.submit(PlanCheck(token, at, tries, in_doubt), deliver or _ignore)

    def check_now(self, token: bytes | None) -> int:
        """Ask about one transaction, or all undecided ones, now; returns how many were passed on."""
        tokens = (
            [token]
            if token is not None
            else [row[0] for _key, row in self._engine.state.tables[t.UNDECIDED].range(b"")]
        )
        before = len(self._asked)
        for name in tokens[: ASKED_AT_ONCE - before]:
            self._ask(name)
        return len(self._asked) - before


def _ignore(reply: object) -> None:
    """A decision that lost against another one is recorded as a conflict by the core; here it is only worth a line."""
    if isinstance(reply, Rejected):
        log.warning("transaction.refused", message=reply.message)
