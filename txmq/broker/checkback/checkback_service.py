"""Check-backs: whoever can tell is asked what became of an undecided transaction.

Due checks are rows of the log's state, so nothing is forgotten over a restart; what is
volatile here is only who is being asked just now. A database's token row is asked by a
resolver, a service's checker by a long poll of the service's, and a job whose driver is
gone is rolled back, because it is the broker that decides it: likewise what this broker
is the home of. What another home broker or a foreign manager decides is asked of nobody
here, it only gets its flag in time: a prepared branch is never rolled back by a clock.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from txmq.broker.checkback.checkers import Offers
from txmq.core.events.transactions import Decided
from txmq.core.state.state import Rejected
from txmq.core.transactions import branches, lost_records, undecided
from txmq.core.transactions.decisions import Decide
from txmq.core.transactions.jobs import DecideJob
from txmq.core.transactions.model import Transaction, get
from txmq.core.transactions.timers import PlanCheck
from txmq.model.bundle import GroupState, decided
from txmq.model.message import Decision
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from txmq.broker.checkback.checkers import Taker
    from txmq.broker.checkback.listeners import Watching
    from txmq.broker.checkback.resolver_service import Resolves
    from txmq.broker.engine import Engine
    from txmq.broker.protocol import Session
    from txmq.core.events.base import Place
    from txmq.tx.checkback import CheckSchedule

ASKED_AT_ONCE = 10_000  # transactions that databases are being asked about; the rest stay due
OFFERED_AT_ONCE = 10_000  # of one service, whose processes may all be gone; the rest stay due
SCANNED_AT_ONCE = 1_000  # due rows looked at in one tick, so that no tick takes long
log = structlog.get_logger()


class Offer(NamedTuple):
    """A transaction that a checker of the service is to be asked about."""

    token: bytes
    row: Transaction


class LastCheck(NamedTuple):
    """What became of the last check of a transaction that it left undecided: when, who
    was asked, and what was said.
    """

    at: int
    by: str
    reason: str


class CheckBacks:
    """Finds what is due, passes it on, and records the answers. All methods belong to
    the reactor's thread.

    Only checks that are due count as tries: an operator or a client that waits may ask
    as often as it likes without bringing a transaction closer to being in doubt.
    """

    def __init__(
        self,
        engine: Engine,
        schedule: CheckSchedule,
        resolving: Resolves,
        chance: Random,
        watching: Watching,
    ) -> None:
        self._engine, self._schedule, self._resolving, self._chance = (
            engine,
            schedule,
            resolving,
            chance,
        )
        self._watching = watching
        self._asked: dict[bytes, bool] = {}  # whether the check was due
        self._given: dict[bytes, bool] = {}  # to a checker, which has yet to answer
        self._last: dict[bytes, LastCheck] = {}
        self._offers = Offers()
        self._after = (
            b""  # the last due row looked at: all before it are being asked about, but for those
        )
        self._left: dict[
            str, bytes
        ] = {}  # of services with too many offers: the row before the first one left
        engine.listen(Decided, self._forget)

    def last(self, token: bytes) -> LastCheck | None:
        """What the last check of an undecided transaction came to, as far as this
        process has seen one.
        """
        return self._last.get(token)

    def _forget(self, event: Decided, place: Place) -> None:
        del place
        self._given.pop(event.token, None)
        self._last.pop(event.token, None)
        self._offers.forget(event.token)

    def tick(self) -> None:
        """Pass on what has become due. A service that does not answer leaves only its
        own transactions waiting.
        """
        now = self._engine.now()
        self._offers.tick(now)
        if self._asking >= ASKED_AT_ONCE:
            return
        stop = t.DUE_KEY.pack(now + 1, 0, 0)
        rows = self._engine.state.tables[t.DUE].range(self._after + b"\0", stop)
        due = [(key, row[0]) for (key, row), _ in zip(rows, range(SCANNED_AT_ONCE), strict=False)]
        for key, token in due:
            if self._asking >= ASKED_AT_ONCE:
                return
            before, self._after = self._after, key
            if (
                t.DUE_KEY.unpack(key)[1] == t.DUE_CHECK
                and (service := self._ask(token, due=True)) is not None
            ):
                self._left.setdefault(service, before)

    @property
    def _asking(self) -> int:
        """How many transactions databases are being asked about."""
        return len(self._asked) - len(self._offers)

    def _ask(self, token: bytes, *, due: bool) -> str | None:
        """Passes a check on; the name of the service, if there are too many for it
        already.
        """
        row = get(self._engine.state, token)
        if row is None or decided(row.state):
            return None
        if row.state is GroupState.OPEN and not due:  # what is still coming is not to be cut short
            return None
        if token in self._asked:
            self._asked[token] |= due
            return None
        return self._pass_on(token, row, due=due)

    def _pass_on(self, token: bytes, row: Transaction, *, due: bool) -> str | None:
        kind = row.decider[0]
        if (
            kind == "job"
            or kind in branches.KINDS
            or (row.state is GroupState.OPEN and kind != "postgres")
        ):
            if due:  # only time ends these, whoever asks: what is at work may be alive and well
                self._end(token, row)
            return None
        if kind != "postgres" and self._offers.count(row.service) >= OFFERED_AT_ONCE:
            return row.service
        self._asked[token] = due
        if kind == "postgres":
            self._resolving.ask(token, row, self.answered)
        else:
            self._offers.add(token, row, self._engine.now())
            self._note(
                token,
                "broker",
                f"no process of service {row.service!r} has taken the check-back yet",
            )
        return None

    def _end(self, token: bytes, row: Transaction) -> None:
        if lost_records.may_be_decided(self._engine.state, row):
            self._note(token, "broker", lost_records.WHY)
            self._plan(token, row, row.tries + 1)
        elif row.state is GroupState.OPEN:
            self._give_up(token, row)
        elif row.decider[0] == "job":
            self._time_out(row)
        else:
            self._due_branch(token, row)

    def _give_up(self, token: bytes, row: Transaction) -> None:
        """Its producer is gone. Nobody was told that it is stored, so nobody can have
        decided it.
        """
        log.warning(
            "transaction.incomplete", token=token.hex(), service=row.service, parts=row.parts
        )
        self._engine.submit(
            Decide(token, Decision.ROLLBACK, "timeout", "the rest of it did not come"), _ignore
        )

    def _time_out(self, row: Transaction) -> None:
        job: Any = row.decider[1]
        log.warning("job.timed_out", job=job.hex())
        self._engine.submit(DecideJob(job, Decision.ROLLBACK, (), "timeout"), _ignore)

    def _due_branch(self, token: bytes, row: Transaction) -> None:
        if row.decider[:2] == ("home", self._engine.store.log_id.bytes):
            log.warning("transaction.timed_out", token=token.hex(), service=row.service)
            self._engine.submit(Decide(token, Decision.ROLLBACK, "timeout"), _ignore)
        else:
            self._note(token, "broker", "whoever decides it has not decided yet")
            self._plan(token, row, row.tries + 1)

    def listen(self, session: Session, taker: Taker) -> None:
        """A process begins to ask for work of a service; it is one to ask until its
        connection is lost.
        """
        self._offers.listen(session, taker)

    def take(self, taker: Taker, most: int) -> list[Offer]:
        """Transactions for the checkers of this process; each is given to one, and
        again later if that one does not answer.
        """
        offers: list[Offer] = []
        for token in self._offers.take(taker):
            row = get(self._engine.state, token)
            due = self._asked.pop(token, False)
            if row is not None and row.state is GroupState.UNDECIDED:
                offers.append(Offer(token, row))
                self._given[token] = due
                by = f"given to a process of service {taker.service!r}, which has not answered yet"
                self._note(token, "broker", by)
                if due:
                    self._plan(token, row, row.tries)
            if len(offers) >= most:
                break
        if (
            taker.service in self._left
            and self._offers.count(taker.service) <= OFFERED_AT_ONCE // 2
        ):
            self._after = min(self._after, self._left.pop(taker.service))
        return offers

    def answered(
        self,
        token: bytes,
        answer: Decision,
        by: str,
        reason: str = "",
        deliver: Callable[[Any], None] | None = None,
    ) -> None:
        """Record an answer. UNKNOWN, which every refusal and error is, only moves the
        next check.
        """
        due = self._asked.pop(token, False) | self._given.pop(token, False)
        row = get(self._engine.state, token)
        if row is not None:
            self._watching.checked(str(row.decider[0]), answer)
        if answer is Decision.COMMIT and row is not None and row.state is GroupState.OPEN:
            answer, reason = Decision.UNKNOWN, "said to be committed, but parts are missing"
        if answer is not Decision.UNKNOWN:
            self._engine.submit(Decide(token, answer, by, reason), deliver or _ignore)
            return
        if row is not None and not decided(row.state):
            self._note(token, by, reason)
            if due:
                self._plan(token, row, row.tries + 1, deliver)
                return
        if deliver is not None:
            self._engine.tell(deliver, None)

    def _note(self, token: bytes, by: str, reason: str) -> None:
        self._last[token] = LastCheck(self._engine.now(), by, reason)

    def _plan(
        self,
        token: bytes,
        row: Transaction,
        tries: int,
        deliver: Callable[[Any], None] | None = None,
    ) -> None:
        at = self._engine.now() + self._schedule.delay(max(tries, 1), self._chance.random())
        in_doubt = row.in_doubt or self._schedule.in_doubt(tries)
        if in_doubt and not row.in_doubt:
            reason = self._last[token].reason if token in self._last else ""
            log.error(
                "transaction.in_doubt",
                token=token.hex(),
                service=row.service,
                tries=tries,
                reason=reason,
            )
        self._engine.submit(PlanCheck(token, at, tries, in_doubt), deliver or _ignore)

    def check_now(self, token: bytes | None) -> int:
        """Ask about one transaction, or all undecided ones, now; returns how many were
        passed on.
        """
        before = len(self._asked)
        tokens = list(
            [token]
            if token is not None
            else islice(undecided.tokens(self._engine.state), ASKED_AT_ONCE - before)
        )
        for name in tokens:
            self._ask(name, due=False)
        return len(self._asked) - before


def _ignore(reply: object) -> None:
    """A decision that lost against another one is recorded as a conflict by the core;
    here it is only worth a line.
    """
    if isinstance(reply, Rejected):
        log.warning("transaction.refused", message=reply.message)
