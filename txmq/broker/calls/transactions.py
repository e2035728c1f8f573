"""Control calls of transactions, jobs and checkers."""

from __future__ import annotations

from base64 import b64encode
from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.broker.calls import transaction_views as views
from txmq.broker.calls.control import Asking, Handler, then
from txmq.broker.checkback.checkers import Taker
from txmq.broker.log_reader import before_damage
from txmq.core.state.state import Rejected
from txmq.core.transactions import listed, undecided, watermarks
from txmq.core.transactions.jobs import DecideJob, members
from txmq.core.transactions.model import Transaction, every_batch, get, unknown
from txmq.core.transactions.xa import DecideByHand
from txmq.model.message import Decision
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.broker.checkback.checkback_service import CheckBacks, Offer
    from txmq.broker.engine import Engine
    from txmq.broker.fetch_service import Fetching
    from txmq.core.topics.key_order import HeldBatch
    from txmq.wire import calls as wire
    from txmq.wire import calls_topics as topics

LISTS = {"open": listed.Kind.OPEN, "in-doubt": listed.Kind.IN_DOUBT, "waiting": listed.Kind.WAITING}
OFFERED_BYTES = 1 << 20  # of the batches in one offer to a checker, of which a reply holds several


class TransactionCalls:
    """What producers, checkers and operators ask of transactions."""

    def __init__(self, engine: Engine, checks: CheckBacks, fetching: Fetching) -> None:
        self._engine, self._checks, self._fetching = engine, checks, fetching
        self.handlers: dict[str, Handler] = {
            "tx.list": self.listed,
            "tx.show": self.show,
            "tx.decide": self.decide,
            "tx.check": self.check,
            "tx.oldest": self.oldest,
            "mark.show": self.mark,
            "job.show": self.job,
            "job.decide": self.decide_job,
            "checks.wait": self.wait,
            "checks.answer": self.answer,
        }

    def listed(self, asking: Asking, args: wire.TxList) -> None:
        self._engine.tell(
            asking.answer, {"transactions": list(islice(self._chosen(args.state), args.limit))}
        )

    def _chosen(self, state: str) -> Iterator[dict[str, Any]]:
        if state == "conflicts":
            return views.conflict_lines(self._engine.state)
        kind = LISTS.get(state)
        tokens = (
            undecided.tokens(self._engine.state)
            if kind is None
            else listed.tokens(self._engine.state, kind)
        )
        return (self._line(token, self._get(token)) for token in tokens)

    def _get(self, token: bytes) -> Transaction:
        row = get(self._engine.state, token)
        assert row is not None, "it is on a list, so it is stored"
        return row

    def _line(self, token: bytes, row: Transaction) -> dict[str, Any]:
        return views.line(token, row, self._checks.last(token))

    def show(self, asking: Asking, args: wire.TxShow) -> None:
        state, token = self._engine.state, bytes.fromhex(args.token)
        row = get(state, token)
        if row is None:
            asking.answer(unknown(bytes.fromhex(args.token)))
            return
        told = self._line(token, row) | views.contents(state, token, row)
        if args.detail:
            wanted = views.Wanted(args.after, args.limit, args.bodies)
            told |= (
                views.order(state, token, row)
                | views.page(self._engine.store, state, token, row, wanted)._asdict()
            )
        self._engine.tell(asking.answer, told)

    def decide(self, asking: Asking, args: wire.TxDecide) -> None:
        token, log_id = bytes.fromhex(args.token), self._engine.store.log_id.bytes
        command = DecideByHand(token, Decision[args.outcome], args.operator, args.reason, log_id)
        self._engine.submit(
            command, then(asking.answer, lambda r: {"state": r.state.name, "repeated": r.repeated})
        )

    def check(self, asking: Asking, args: wire.TxCheck) -> None:
        token = None if args.token is None else bytes.fromhex(args.token)
        if token is not None and get(self._engine.state, token) is None:
            asking.answer(unknown(token))
            return
        asking.answer({"due": self._checks.check_now(token)})

    def oldest(self, asking: Asking, args: wire.NoArgs) -> None:
        del args
        state, token = self._engine.state, undecided.oldest(self._engine.state)
        told = {"log_id": str(self._engine.store.log_id), "undecided": state.undecided}
        self._engine.tell(asking.answer, told | {"oldest": None if token is None else token.hex()})

    def mark(self, asking: Asking, args: topics.TopicName) -> None:
        place, at, token = watermarks.get(self._engine.state, args.name)
        self._engine.tell(
            asking.answer,
            {"name": args.name, "place": place, "at": at, "token": token.hex() or None},
        )

    def job(self, asking: Asking, args: wire.TokenArgs) -> None:
        token = bytes.fromhex(args.token)
        row: Any = self._engine.state.tables[t.JOBS].get(token)
        outcome = None if row is None else Decision(row[0]).name
        told = {
            "outcome": outcome,
            "groups": [group.hex() for group in members(self._engine.state, token)],
        }
        self._engine.tell(asking.answer, told)

    def decide_job(self, asking: Asking, args: wire.JobDecide) -> None:
        winners = tuple(bytes.fromhex(token) for token in args.winners)
        command = DecideJob(bytes.fromhex(args.token), Decision[args.outcome], winners, "job")
        self._engine.submit(
            command,
            then(asking.answer, lambda r: {"outcome": r.outcome.name, "repeated": r.repeated}),
        )

    def wait(self, asking: Asking, args: wire.ChecksWait) -> None:
        """A long poll: answered when a transaction of the service is due."""
        taker = Taker(args.service, args.checkers, asking.session.origin)
        self._checks.listen(asking.session, taker)

        def attempt(*, last: bool) -> bool:
            offers = self._checks.take(taker, args.max)
            if offers or last:
                checks = [self._offered(offer) for offer in offers]
                self._engine.tell(asking.answer, {"checks": checks})
            return bool(offers) or last

        if not attempt(last=args.wait_ms == 0):
            self._fetching.wait(asking.session, None, args.wait_ms, attempt)

    def _offered(self, offer: Offer) -> dict[str, Any]:
        row, topics = offer.row, self._engine.state.topics_by_id
        shown = list(_beginning(b for b, _at in every_batch(self._engine.state, offer.token, row)))
        wanted = [((b.topic_id, b.partition), (b.position, b.length)) for b in shown]
        datas, _damaged = before_damage(self._engine.store, wanted)
        batches = [
            {
                "topic": topics[b.topic_id].name,
                "partition": b.partition,
                "batch": b64encode(data).decode(),
            }
            for b, data in zip(shown, datas, strict=True)
            if data is not None  # the checker goes by the token
        ]
        return {
            "token": offer.token.hex(),
            "checker": row.decider[1],
            "tries": row.tries,
            "stored_at": row.stored_at,
            "service": row.service,
            "batches": batches,
        }

    def answer(self, asking: Asking, args: wire.ChecksAnswer) -> None:
        token = bytes.fromhex(args.token)

        def told(reply: object) -> None:
            if isinstance(reply, Rejected):
                asking.answer(reply)
                return
            row = get(self._engine.state, token)
            asking.answer({"state": "UNKNOWN" if row is None else row.state.name})

        self._checks.answered(token, Decision[args.answer], "checker", args.reason, told)


def _beginning(batches: Iterable[HeldBatch]) -> Iterator[HeldBatch]:
    """As much of a group as fits in a reply, at least one batch: a checker looks at
    what it is about, not at all.
    """
    size = 0
    for batch in batches:
        size += batch.length
        if size > OFFERED_BYTES and size > batch.length:
            return
        yield batch
