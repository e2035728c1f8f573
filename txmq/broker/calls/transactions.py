"""Control calls of transactions, jobs and checkers."""

from __future__ import annotations

from base64 import b64encode
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from txmq.batch import single_row
from txmq.broker.calls import transaction_views as views
from txmq.broker.calls.dispatcher import CallContext, Handler, Reply, then
from txmq.broker.calls.operators import audited, transaction
from txmq.broker.checkback.checkers import CheckerProcess
from txmq.broker.engine.log_reader import read_before_damage
from txmq.broker.search.audit_log import with_operations
from txmq.core.transactions import indexes, watermarks
from txmq.core.transactions.jobs import DecideJob, undecided_bundles
from txmq.core.transactions.model import Transaction, every_batch, get, unknown_transaction
from txmq.core.transactions.xa import DecideByHand
from txmq.errors import NotPermitted
from txmq.model.bundle import COMMITTED
from txmq.model.decider import ByChecker, ByPostgres, DatabaseId
from txmq.model.message import Decision
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t
from txmq.wire.calls.audit import AuditList
from txmq.wire.json import dump

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.broker.checkback.checkback_service import CheckBackService, CheckRequest
    from txmq.broker.checkback.resolvers import Resolvers
    from txmq.broker.delivery.long_polls import LongPolls
    from txmq.broker.engine.engine import Engine
    from txmq.core.audit import Audited
    from txmq.core.steps import Steps
    from txmq.core.topics.key_order import UnplacedBatch
    from txmq.wire.calls import topics
    from txmq.wire.calls import transactions as calls
    from txmq.wire.calls.arguments import NoArgs

LISTS = {
    "open": indexes.ListKind.OPEN,
    "in-doubt": indexes.ListKind.IN_DOUBT,
    "waiting": indexes.ListKind.WAITING,
}
# of the batches of one transaction, and of all in one reply to a checker, unless the
# first message of one is larger
CHECK_BYTES = 1 << 20
REPLY_BYTES = 2 << 20
STATES_PER_STEP = 100  # about a millisecond
LIST_BYTES = 8 << 20  # of a list of transactions


class TransactionCalls:
    """Calls of producers, checkers and operators about transactions."""

    def __init__(
        self,
        engine: Engine,
        checks: CheckBackService,
        polls: LongPolls,
        resolvers: Resolvers,
    ) -> None:
        self._engine, self._checks, self._polls = engine, checks, polls
        self._resolvers = resolvers
        self.handlers: dict[str, Handler] = {
            "tx.list": self.list_transactions,
            "tx.pending": self.list_pending,
            "tx.show": self.show,
            "tx.states": self.states,
            "tx.committed": self.list_committed,
            "tx.decide": self.decide,
            "tx.check": self.check,
            "tx.oldest": self.oldest,
            "tx.lease": self.lease,
            "mark.show": self.show_watermark,
            "job.show": self.show_job,
            "job.decide": self.decide_job,
            "checks.wait": self.wait_for_checks,
            "checks.answer": self.answer_check,
        }

    def lease(self, call: CallContext, args: calls.TxLease) -> None:
        """Return this broker's claim to a database, and whether it is granted there."""
        lease = self._resolvers.lease_of(DatabaseId(args.system_id, args.database_oid))
        call.answer(
            {
                "held": lease.held,
                "directory": None if lease.directory is None else str(lease.directory),
                "boot_epoch": self._engine.state.boot_epoch,
            }
        )

    def list_transactions(self, call: CallContext, args: calls.TxList) -> Steps[dict[str, Any]]:
        """List transactions, in steps, as far as they fit in a reply: reasons are texts
        of users.
        """
        if args.state == "conflicts":
            found = list(islice(views.conflict_entries(self._engine.state), args.limit))
            tokens: list[bytes] = []
        else:
            found, tokens = [], list(islice(self._tokens(args.state), args.limit))
        listed: list[dict[str, Any]] = []
        size = 0
        for entry in chain(found, filter(None, map(self._entry_if_known, tokens))):
            size += len(dump(entry))
            if listed and size > LIST_BYTES:
                break
            listed.append(entry)
            yield
        return {"transactions": listed}

    def list_pending(self, call: CallContext, args: calls.TxPending) -> dict[str, Any]:
        """List a page of what databases are to decide. It scans `limit` undecided
        transactions, so it may be empty and not the last.
        """
        tokens, end = indexes.undecided_by_databases(self._engine.state, args.after, args.limit)
        if not args.after:
            unverified = indexes.listed_tokens(self._engine.state, indexes.ListKind.UNVERIFIED)
            tokens += islice(unverified, args.limit)
        found = [self._entry(token, self._get(token)) for token in tokens]
        return {"transactions": found, "next": end}

    def _tokens(self, state: str) -> Iterator[bytes]:
        kind = LISTS.get(state)
        if kind is None:
            return indexes.undecided_tokens(self._engine.state)
        return indexes.listed_tokens(self._engine.state, kind)

    def _entry_if_known(self, token: bytes) -> dict[str, Any] | None:
        """Return an entry, None where the transaction was forgotten meanwhile."""
        row = get(self._engine.state, token)
        return None if row is None else self._entry(token, row)

    def _get(self, token: bytes) -> Transaction:
        row = get(self._engine.state, token)
        assert row is not None, "it is on a list, so it is stored"
        return row

    def _entry(self, token: bytes, row: Transaction) -> dict[str, Any]:
        return views.list_entry(token, row, self._checks.last_check(token))

    def show(self, call: CallContext, args: calls.TxShow) -> Reply:
        state, token = self._engine.state, bytes.fromhex(args.token)
        row = get(state, token)
        if row is None:
            raise unknown_transaction(token)
        view = self._entry(token, row) | views.contents(state, token, row)
        if args.detail:
            wanted = views.MessagePageQuery(args.after, args.limit, args.bodies)
            view |= (
                views.order(state, token, row)
                | views.page(self._engine.store, state, token, row, wanted)._asdict()
            )
            about = AuditList(about=transaction(args.token))
            return with_operations(self._engine, view, about)
        return view

    def states(self, call: CallContext, args: calls.TxStates) -> Steps[dict[str, Any]]:
        """Return the states of many transactions; those that are not known are left
        out.
        """
        found: dict[str, list[Any]] = {}
        for number, token in enumerate(args.tokens):
            if row := get(self._engine.state, bytes.fromhex(token)):
                found[token] = [row.state.name, views.json_fields(row.decider)]
            if number % STATES_PER_STEP == 0:
                yield
        return {"transactions": found}

    def list_committed(self, call: CallContext, args: calls.TxCommitted) -> Steps[dict[str, Any]]:
        """List a page of what a database has committed, for comparison with its rows.

        It scans `limit` transactions of all kinds, so it may be empty and not the last.
        """
        database = DatabaseId(args.system_id, args.database_oid)
        after = bytes.fromhex(args.after) + b"\0" if args.after else b""
        rows = islice(self._engine.state.transactions.range(after), args.limit)
        tokens = [token for token, _row in rows]
        found: list[dict[str, Any]] = []
        for number, token in enumerate(tokens):
            row = get(self._engine.state, token)
            if (
                row is not None
                and row.state in COMMITTED
                and isinstance(row.decider, ByPostgres)
                and row.decider.database == database
            ):
                found.append(views.summary(token, row))
            if number % STATES_PER_STEP == 0:
                yield
        following = tokens[-1].hex() if len(tokens) == args.limit else None
        return {"transactions": found, "next": following}

    def decide(self, call: CallContext, args: calls.TxDecide) -> None:
        token, log_id = bytes.fromhex(args.token), self._engine.store.log_id.bytes
        command = DecideByHand(token, Decision[args.outcome], args.operator, args.reason, log_id)
        answer = then(call.answer, lambda r: {"state": r.state.name, "repeated": r.repeated})

        def act(made: object) -> Audited:
            return audited("tx.decide", transaction(args.token), args, made)

        self._checks.decide_by_hand(command, act, answer, force=args.force)

    def check(self, call: CallContext, args: calls.TxCheck) -> None:
        token = None if args.token is None else bytes.fromhex(args.token)
        if token is not None and get(self._engine.state, token) is None:
            raise unknown_transaction(token)
        call.answer({"due": self._checks.check_now(token)})

    def oldest(self, call: CallContext, args: NoArgs) -> dict[str, Any]:
        state, token = self._engine.state, indexes.oldest_undecided(self._engine.state)
        return {
            "log_id": str(self._engine.store.log_id),
            "undecided": state.undecided,
            "oldest": None if token is None else token.hex(),
            "databases": [
                [*database, oldest.hex()]
                for database, oldest in indexes.oldest_by_database(state).items()
            ],
            "reports": [
                [*database, stored] for database, stored in self._resolvers.reports().items()
            ],
            "now": self._engine.now(),
            "certain": self._engine.certain(),
        }

    def show_watermark(self, call: CallContext, args: topics.TopicName) -> dict[str, Any]:
        place, at, token = watermarks.get(self._engine.state, args.name)
        return {"name": args.name, "place": place, "at": at, "token": token.hex() or None}

    def show_job(self, call: CallContext, args: calls.TokenArgs) -> dict[str, Any]:
        token = bytes.fromhex(args.token)
        row: Any = self._engine.state.tables[t.JOBS].get(token)
        outcome = None if row is None else Decision(row[0]).name
        return {
            "outcome": outcome,
            "groups": [group.hex() for group in undecided_bundles(self._engine.state, token)],
        }

    def decide_job(self, call: CallContext, args: calls.JobDecide) -> None:
        winners = tuple(bytes.fromhex(token) for token in args.winners)
        command = DecideJob(bytes.fromhex(args.token), Decision[args.outcome], winners, "job")
        self._engine.submit(
            command,
            then(call.answer, lambda r: {"outcome": r.outcome.name, "repeated": r.repeated}),
        )

    def wait_for_checks(self, call: CallContext, args: calls.ChecksWait) -> None:
        """Answer a long poll when a transaction of the service is due for a
        check-back.
        """
        process = CheckerProcess(args.service, args.checkers, call.session.origin, args.own)
        self._checks.add_process(call.session, process)

        def attempt(*, last: bool) -> bool:
            views = self._next_check_views(process, args.max)
            if views or last:
                self._engine.answer_when_durable(call.answer, {"checks": views})
            return bool(views) or last

        if not attempt(last=args.wait_ms == 0):
            nothing = partial(call.answer, {"checks": []})
            self._polls.wait(call.session, args.wait_ms, attempt, nothing, timed=True)

    def _next_check_views(self, process: CheckerProcess, most: int) -> list[dict[str, Any]]:
        """Return the next check-backs of a process, as many as fit in a reply."""
        found: list[dict[str, Any]] = []
        size = 0
        while len(found) < most and size < REPLY_BYTES:
            checks = self._checks.next_checks(process, 1)
            if not checks:
                break
            found.append(self._check_view(checks[0]))
            size += sum(len(batch["batch"]) for batch in found[-1]["batches"])
        return found

    def _check_view(self, check: CheckRequest) -> dict[str, Any]:
        row, topics = check.row, self._engine.state.topics_by_id
        shown = list(
            _first_batches(b for b, _at in every_batch(self._engine.state, check.token, row))
        )
        spans = [(TopicPartition(b.topic_id, b.partition), (b.position, b.length)) for b in shown]
        datas, _damaged = read_before_damage(self._engine.store, spans)
        batches = [
            {
                "topic": topics[b.topic_id].name,
                "partition": b.partition,
                "batch": b64encode(_first_row_if_large(data)).decode(),
            }
            for b, data in zip(shown, datas, strict=True)
            if data is not None  # the token alone identifies the transaction
        ]
        return {
            "token": check.token.hex(),
            "checker": check.checker,
            "tries": row.tries,
            "stored_at": row.stored_at,
            "service": row.service,
            "batches": batches,
        }

    def answer_check(self, call: CallContext, args: calls.ChecksAnswer) -> None:
        token = bytes.fromhex(args.token)
        found, hello = get(self._engine.state, token), call.session.hello
        if (
            found is not None
            and isinstance(found.decider, ByChecker)
            and (hello is None or hello.service != found.service)
        ):
            message = f"transaction {args.token} is decided by service {found.service!r}"
            raise NotPermitted(message, hint="connect as that service, or ask it")

        def state_now(_reply: object) -> dict[str, Any]:
            row = get(self._engine.state, token)
            return {"state": "UNKNOWN" if row is None else row.state.name}

        answer = then(call.answer, state_now)
        if args.passed:
            self._checks.pass_on(token)
            self._engine.answer_when_durable(answer, None)
            return
        self._checks.note_work(token, is_open=args.open)
        self._checks.record_answer(token, Decision[args.answer], "checker", args.reason, answer)


def _first_batches(batches: Iterable[UnplacedBatch]) -> Iterator[UnplacedBatch]:
    """Return as many batches of a bundle as fit in a reply, at least one: a checker
    needs to recognise the bundle, not to see all of it.
    """
    size = 0
    for batch in batches:
        size += batch.length
        if size > CHECK_BYTES and size > batch.length:
            return
        yield batch


def _first_row_if_large(batch: bytes) -> bytes:
    """Return the first message alone of a batch that is too large for a reply."""
    return batch if len(batch) <= CHECK_BYTES else single_row(batch, 0)
