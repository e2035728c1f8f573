"""Check-backs: the outcome of an undecided transaction, asked of its decider.

Due checks are rows of the log's state, so a restart forgets none of them; only the
questions under way are volatile. The decider says how the broker finds the outcome:

- PostgreSQL: a resolver reads the token's row in the database.
- Checker: a process of the service gets the check-back as the answer to a long poll.
- Job, or this broker as the home of an XA transaction: the broker itself decides, and
  rolls back when time is up.
- Another home broker, or a foreign transaction manager: nobody is asked. The broker
  only flags the transaction in doubt: no clock may roll back a prepared branch.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from txmq.broker.checkback.checkers import CheckQueue
from txmq.core.events.base import TimeNoted
from txmq.core.transactions import indexes, lost_records
from txmq.core.transactions.decisions import DecideTransaction
from txmq.core.transactions.indexes import ListKind
from txmq.core.transactions.jobs import DecideJob
from txmq.core.transactions.model import Transaction, get
from txmq.core.transactions.timers import PlanCheck
from txmq.core.transactions.unverified import CompareDecision, ForceDecision
from txmq.errors import Conflict, ReadOnly, RequestRejected
from txmq.model.bundle import DECIDED, BundleState
from txmq.model.decider import BY_XA_MANAGER, ByChecker, ByHome, ByJob, ByPostgres
from txmq.model.message import Decision
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from txmq.broker.checkback.checkers import CheckerProcess
    from txmq.broker.checkback.resolvers import Resolvers
    from txmq.broker.checkback.transaction_listeners import TransactionListeners
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.protocol import ClientSession
    from txmq.core.events.base import RecordContext
    from txmq.core.transactions.xa import DecideByHand
    from txmq.tx.checkback import CheckSchedule

MAX_ASKED = 10_000  # transactions that databases are being asked about; the rest stay due
MAX_QUEUED = 10_000  # of one service, whose processes may all be gone; the rest stay due
SCANNED_PER_TICK = 1_000  # due rows, so that no tick takes long
COMPARED_AT_ONCE = 100  # forced decisions
SWEPT_PER_TICK = 250  # undecided transactions, when a database is back
ENDED_BY_TIME = (ByJob, *BY_XA_MANAGER)
log = structlog.get_logger()


class CheckRequest(NamedTuple):
    """A transaction for a checker of its service."""

    token: bytes
    checker: str
    row: Transaction


class LastCheck(NamedTuple):
    """The last check of a transaction that left it undecided: its time, the party that
    was asked, and the reason it gave.
    """

    at: int
    by: str
    reason: str


class _ByHand(NamedTuple):
    """An operator's decision that waits for the database's answer."""

    command: DecideByHand
    act: Callable[[object], object]
    deliver: Callable[[Any], None]
    force: bool


class CheckBackService:
    """Starts due checks and records their answers. All methods belong to the reactor's
    thread.

    Only due checks count as tries. An operator or a waiting client may ask for any
    number of checks, and brings the transaction no closer to being in doubt.
    """

    def __init__(
        self,
        engine: Engine,
        schedule: CheckSchedule,
        resolvers: Resolvers,
        random: Random,
        listeners: TransactionListeners,
    ) -> None:
        self._engine, self._schedule, self._resolvers = engine, schedule, resolvers
        self._random, self._listeners = random, listeners
        # by token: whether the check was due, or an operator's
        self._asked: dict[bytes, bool] = {}  # the check waits for a database or a checker
        self._delivered: dict[bytes, bool] = {}  # a checker has it, and has yet to answer
        self._last: dict[bytes, LastCheck] = {}
        self._queue = CheckQueue()
        # All due rows up to this key are being checked, but for those of services with
        # too many queued checks: for each of them, the key before its first row left
        # out.
        self._scanned_to = b""
        self._left_out: dict[str, bytes] = {}
        engine.listen(TimeNoted, self._time_noted)
        self._by_hand: dict[bytes, list[_ByHand]] = {}
        self._comparing: set[bytes] = set()
        # by a database that answers again: the key of the last row of table `undecided`
        # that was looked at for it
        self._sweeps: dict[Callable[[ByPostgres], bool], bytes] = {}

    def last_check(self, token: bytes) -> LastCheck | None:
        """Return the last check of an undecided transaction, if this process has made
        one.
        """
        return self._last.get(token)

    def _forget(self, token: bytes) -> None:
        self._delivered.pop(token, None)
        self._last.pop(token, None)
        self._queue.forget(token)

    def use(self, schedule: CheckSchedule) -> None:
        """Go by another schedule, from the next check of each transaction on."""
        self._schedule = schedule

    def tick(self) -> None:
        """Timer: start the checks that have become due. A service that does not answer
        delays only its own transactions.
        """
        now = self._engine.now()
        self._queue.tick(now)
        # While the log takes no writes, no answer could be recorded.
        if self._asking >= MAX_ASKED or self._engine.store.read_only:
            return
        self._sweep()
        stop = t.DUE_KEY.pack(now + 1, 0, 0)
        rows = self._engine.state.tables[t.DUE].range(self._scanned_to + b"\0", stop)
        due = [(key, row[0]) for key, row in islice(rows, SCANNED_PER_TICK)]
        for key, token in due:
            if self._asking >= MAX_ASKED:
                return
            before, self._scanned_to = self._scanned_to, key
            if (
                t.DUE_KEY.unpack(key)[1] == t.DUE_CHECK
                and (service := self._check(token, due=True)) is not None
            ):
                self._left_out.setdefault(service, before)
            if self._scanned_to != key:  # what this check came to was refused
                return

    def _time_noted(self, event: TimeNoted, _context: RecordContext) -> None:
        """Scan all rows again after the time was set back: theirs went back as well."""
        if event.back:
            self._scanned_to = b""
            self._left_out.clear()

    def database_is_back(self, decided_by: Callable[[ByPostgres], bool]) -> None:
        """Check what was checked in vain while a database was away. The next check by
        the schedule may be ten minutes away.
        """
        self._sweeps[decided_by] = b""

    def _sweep(self) -> None:
        """Check, in steps, what databases that are back are to decide."""
        for decided_by, position in list(self._sweeps.items()):
            rows: Any = self._engine.state.tables[t.UNDECIDED].range(position + b"\0")
            page = list(islice(rows, SWEPT_PER_TICK))
            for key, (token, *_database) in page:
                if self._asking >= MAX_ASKED:
                    return
                self._sweeps[decided_by] = key
                row = get(self._engine.state, token)
                if (
                    row is not None
                    and isinstance(row.decider, ByPostgres)
                    and row.tries  # else its producer may be at work
                    and decided_by(row.decider)
                ):
                    self._check(token, due=False)
            if len(page) < SWEPT_PER_TICK:
                del self._sweeps[decided_by]

    @property
    def _asking(self) -> int:
        """The number of transactions that databases are being asked about."""
        return len(self._asked) - len(self._queue)

    def _check(self, token: bytes, *, due: bool) -> str | None:
        """Begin a check. Return the name of the service if it has too many already."""
        row = get(self._engine.state, token)
        if row is None or row.state in DECIDED:
            return None
        if row.state is BundleState.OPEN and not due:  # its parts may still be on their way
            return None
        if token in self._asked:
            self._asked[token] |= due
            return None
        if isinstance(row.decider, ByPostgres):
            self._asked[token] = due
            self._resolvers.resolve(token, row, self.record_answer)
        elif row.state is BundleState.OPEN or isinstance(row.decider, ENDED_BY_TIME):
            if due:  # before that, its producer or manager may be alive and well
                self._end(token, row)
        elif self._queue.count(row.service) >= MAX_QUEUED:
            return row.service
        else:
            assert isinstance(row.decider, ByChecker), "no bundle waits for its own broker"
            self._asked[token] = due
            self._queue.add(token, row.decider.checker, row, self._engine.now())
            self._note(
                token,
                "broker",
                f"no process of service {row.service!r} has taken the check-back yet",
            )
        return None

    def _end(self, token: bytes, row: Transaction) -> None:
        if lost_records.may_have_lost_decision(self._engine.state, row):
            self._note(token, "broker", lost_records.WHY)
            self._schedule_check(token, row, row.tries + 1)
        elif row.state is BundleState.OPEN:
            self._roll_back_incomplete(token, row)
        elif isinstance(row.decider, ByJob):
            log.warning("job.timed_out", job=row.decider.job.hex())
            command = DecideJob(row.decider.job, Decision.ROLLBACK, (), "timeout")
            self._submit(token, command)
        else:
            self._end_branch(token, row)

    def _roll_back_incomplete(self, token: bytes, row: Transaction) -> None:
        """Roll back a bundle whose producer is gone: nobody got a receipt for all of
        it, so nobody can have decided it.
        """
        log.warning(
            "transaction.incomplete", token=token.hex(), service=row.service, parts=row.parts
        )
        self._submit(
            token,
            DecideTransaction(token, Decision.ROLLBACK, "timeout", "the rest of it did not come"),
        )

    def _end_branch(self, token: bytes, row: Transaction) -> None:
        decider, own = row.decider, self._engine.store.log_id.bytes
        if isinstance(decider, ByHome) and decider.log_id == own:
            log.warning("transaction.timed_out", token=token.hex(), service=row.service)
            self._submit(token, DecideTransaction(token, Decision.ROLLBACK, "timeout"))
        else:
            self._note(token, "broker", "its transaction manager has not decided yet")
            self._schedule_check(token, row, row.tries + 1)

    def add_process(self, session: ClientSession, process: CheckerProcess) -> None:
        """Count a process of a service among those that take check-backs, until its
        connection is lost.
        """
        self._queue.add_process(session, process)

    def next_checks(self, process: CheckerProcess, limit: int) -> list[CheckRequest]:
        """Return transactions for the checkers of this process. Each goes to one
        process, and later to another if that one does not answer.
        """
        checks: list[CheckRequest] = []
        for token in self._queue.pop(process):
            row = get(self._engine.state, token)
            due = self._asked.pop(token, False)
            if row is not None and row.state is BundleState.UNDECIDED:
                assert isinstance(row.decider, ByChecker), "queued for checkers only"
                checks.append(CheckRequest(token, row.decider.checker, row))
                self._delivered[token] = due
                reason = (
                    f"given to a process of service {process.service!r}, which has not answered yet"
                )
                self._note(token, "broker", reason)
                if due:
                    self._schedule_check(token, row, row.tries)
            if len(checks) >= limit:
                break
        if (
            process.service in self._left_out
            and self._queue.count(process.service) <= MAX_QUEUED // 2
        ):
            self._scanned_to = min(self._scanned_to, self._left_out.pop(process.service))
        return checks

    def note_work(self, token: bytes, *, is_open: bool) -> None:
        """Leave a transaction to its origin while its local work goes on there."""
        row = get(self._engine.state, token)
        if row is not None and row.state is BundleState.UNDECIDED:
            self._queue.note_work(token, is_open=is_open)
            self._listeners.by_token[token] = self._forget

    def pass_on(self, token: bytes) -> None:
        """Ask any process of the service: the local work is over at the origin, which
        does not know its outcome.
        """
        self.note_work(token, is_open=False)
        self._check(token, due=self._delivered.pop(token, False))

    def record_answer(
        self,
        token: bytes,
        answer: Decision,
        by: str,
        reason: str = "",
        deliver: Callable[[Any], None] | None = None,
    ) -> None:
        """Record the answer to a check. UNKNOWN, which stands for every refusal and
        error, only moves the next check.
        """
        due = self._asked.pop(token, False) | self._delivered.pop(token, False)
        row = get(self._engine.state, token)
        if row is not None:
            self._listeners.checked(row.decider.kind, answer)
        if answer is Decision.COMMIT and row is not None and row.state is BundleState.OPEN:
            answer, reason = Decision.UNKNOWN, "said to be committed, but parts are missing"
        by_hand = self._by_hand.pop(token, ())
        for request in by_hand:
            if request.command.outcome is answer:  # it is the operator's decision then
                self._engine.submit(request.act(request.command), request.deliver)
        if answer is Decision.UNKNOWN:
            self._record_unknown(token, by, reason, deliver, due=due)
        elif indexes.is_listed(self._engine.state, ListKind.UNVERIFIED, token):
            self._submit(token, CompareDecision(token, answer, by, reason), deliver)
        else:
            self._submit(token, DecideTransaction(token, answer, by, reason), deliver)
        for request in by_hand:
            if request.command.outcome is not answer:
                self._answer_by_hand(request, answer, reason)

    def _record_unknown(
        self,
        token: bytes,
        by: str,
        reason: str,
        deliver: Callable[[Any], None] | None,
        *,
        due: bool,
    ) -> None:
        row = get(self._engine.state, token)
        if row is not None and row.state not in DECIDED:
            self._note(token, by, reason)
            if due:
                self._schedule_check(token, row, row.tries + 1, deliver)
                return
        if deliver is not None:
            self._engine.answer_when_durable(deliver, None)

    def decide_by_hand(
        self,
        command: DecideByHand,
        act: Callable[[object], object],
        deliver: Callable[[Any], None],
        *,
        force: bool,
    ) -> None:
        """Let an operator decide. If a database is the decider, it is asked first: it
        fences a token without a row, so that the transaction can no longer commit.

        `act` makes an operator's command of what is submitted. `force`: decide although
        the database does not know, and ask it later; the second time, ask it no more.
        """
        token, row = command.token, get(self._engine.state, command.token)
        owed = force and indexes.is_listed(self._engine.state, ListKind.UNVERIFIED, token)
        decided = row is None or (row.state in DECIDED and not owed)
        if row is None or decided or not isinstance(row.decider, ByPostgres):
            self._engine.submit(act(command), deliver)
            return
        self._by_hand.setdefault(token, []).append(_ByHand(command, act, deliver, force))
        if token not in self._asked:
            self._asked[token] = False
            self._resolvers.resolve(token, row, self.record_answer)

    def _answer_by_hand(self, request: _ByHand, answer: Decision, reason: str) -> None:
        """Answer an operator whom the database did not confirm."""
        if answer is not Decision.UNKNOWN:  # the broker refuses it now, and says why
            self._engine.submit(request.act(request.command), request.deliver)
        elif request.force:
            self._engine.submit(request.act(ForceDecision(request.command)), request.deliver)
        else:
            refused = Conflict(
                f"transaction {request.command.token.hex()} is its database's to decide, "
                f"which did not answer: {reason or 'no reason given'}",
                hint="mend the database; or, if it is lost, add --force: "
                "it is compared when it is back",
            )
            self._engine.answer_when_durable(request.deliver, refused)

    def compare(self) -> None:
        """Timer: ask databases about decisions that operators made without them."""
        if self._engine.store.read_only:
            return
        state = self._engine.state
        for token in islice(indexes.listed_tokens(state, ListKind.UNVERIFIED), COMPARED_AT_ONCE):
            row = get(state, token)
            assert row is not None, "what is not confirmed does not expire"
            if token not in self._asked and token not in self._comparing:
                self._comparing.add(token)
                self._resolvers.resolve(token, row, self._compared)

    def _compared(self, token: bytes, answer: Decision, by: str, reason: str) -> None:
        self._comparing.discard(token)
        self.record_answer(token, answer, by, reason)  # if refused, it stays on the list

    def _note(self, token: bytes, by: str, reason: str) -> None:
        self._last[token] = LastCheck(self._engine.now(), by, reason)
        self._listeners.by_token[token] = self._forget

    def _schedule_check(
        self,
        token: bytes,
        row: Transaction,
        tries: int,
        deliver: Callable[[Any], None] | None = None,
    ) -> None:
        at = self._engine.now() + self._schedule.delay(max(tries, 1), self._random.random())
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
        self._submit(token, PlanCheck(token, at, tries, in_doubt), deliver)

    def _submit(
        self, token: bytes, command: object, deliver: Callable[[Any], None] | None = None
    ) -> None:
        """Submit the result of a check. Where it is refused, the check is made again:
        the row of a transaction that stays undecided is still due.
        """

        def replied(reply: object) -> None:
            if isinstance(reply, RequestRejected):
                log.warning("transaction.refused", token=token.hex(), message=reply.message)
                self._check_again(token, reply)
            if deliver is not None:
                deliver(reply)

        self._engine.submit(command, replied)

    def _check_again(self, token: bytes, refusal: RequestRejected) -> None:
        row = get(self._engine.state, token)
        if row is None or row.state in DECIDED or not row.check_at:
            return
        if isinstance(refusal, ReadOnly):
            due = t.DUE_KEY.pack(row.check_at, t.DUE_CHECK, row.ticket)
            self._scanned_to = min(self._scanned_to, due[:-1])  # a key just before it
        elif row.check_at <= self._engine.now():
            self._note(token, "broker", refusal.message)
            self._schedule_check(token, row, row.tries + 1)

    def check_now(self, token: bytes | None) -> int:
        """Check one transaction, or all undecided ones, now. Return the number of
        checks begun.
        """
        before = len(self._asked)
        if token is not None:
            self._check(token, due=False)
        else:
            tokens = islice(indexes.undecided_tokens(self._engine.state), MAX_ASKED - before)
            for one in list(tokens):
                self._check(one, due=False)
        return len(self._asked) - before
