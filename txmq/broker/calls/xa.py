"""Control calls of XA, and of producer instances."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.broker.calls.dispatcher import CallContext, Handler, then
from txmq.broker.calls.operators import audited, transaction
from txmq.broker.calls.transaction_views import json_fields, summary
from txmq.core.transactions import branches
from txmq.core.transactions.instances import RegisterInstance
from txmq.core.transactions.model import get
from txmq.core.transactions.xa import ForgetHeuristics, NoteHeuristic, ResolveOutcome
from txmq.errors import OtherLog, RequestRejected, UnknownTransaction
from txmq.model.bundle import COMMITTED, BundleState
from txmq.model.decider import ByForeign, ByHome, DatabaseId, Decider, postgres_branches
from txmq.model.message import Decision
from txmq.tx.xid import Xid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from txmq.broker.checkback.resolvers import Resolvers
    from txmq.broker.checkback.transaction_listeners import TransactionListeners
    from txmq.broker.engine.engine import Engine
    from txmq.core.events.transactions import Decided
    from txmq.core.transactions.branches import Heuristic
    from txmq.wire.calls import xa as wire

MAX_RECENT = 100_000


class XaCalls:
    """Calls of transaction managers, recoverers and operators about branches."""

    def __init__(
        self, engine: Engine, listeners: TransactionListeners, resolvers: Resolvers
    ) -> None:
        self._engine, self._resolvers = engine, resolvers
        # the last transactions that this broker committed as their home
        self._recent: deque[bytes] = deque(maxlen=MAX_RECENT)
        self._last = 0  # number of the newest of them since the start
        listeners.on_decision_by(ByHome, self._note_commit)
        self.handlers: dict[str, Handler] = {
            "producer.register": self.register,
            "xa.list": self.list_branches,
            "xa.decided": self.list_decided,
            "xa.committed": self.list_committed,
            "xa.find": self.find,
            "xa.outcome": self.outcome,
            "xa.heuristic": self.heuristic,
            "xa.forget": self.forget,
        }

    def register(self, call: CallContext, args: wire.ProducerRegister) -> None:
        """Register an instance. The connection of the call belongs to the new
        incarnation.
        """
        session = call.session

        def registered(reply: Any) -> None:  # noqa: ANN401  # whatever the core says
            if not isinstance(reply, RequestRejected) and session.instance == (
                args.service,
                args.instance,
            ):
                session.incarnation = reply
            then(call.answer, lambda epoch: {"epoch": epoch})(reply)

        self._engine.submit(RegisterInstance(args.service, args.instance), registered)

    def list_branches(self, call: CallContext, args: wire.XaList) -> dict[str, Any]:
        after = bytes.fromhex(args.after) if args.after else b""
        tokens = branches.xa_tokens(self._engine.state, after, heuristic=args.heuristic)
        found = list(islice(self._branch_views(tokens, args), args.limit))
        following = found[-1]["token"] if len(found) == args.limit else None
        return {"transactions": found, "next": following}

    def _branch_views(self, tokens: Iterator[bytes], args: wire.XaList) -> Iterator[dict[str, Any]]:
        for token in tokens:
            row = get(self._engine.state, token)
            assert row is not None, "a listed transaction is stored"
            if args.kind in (None, row.decider.kind) and args.owner in (None, row.service):
                yield summary(token, row) | {
                    "xid": _xid_view(branches.xid_of(row.decider))
                    if isinstance(row.decider, ByForeign)
                    else None,
                    "participants": [json_fields(one) for one in row.participants],
                    "heuristics": [
                        _heuristic_view(one)
                        for one in branches.heuristics(self._engine.state, token)
                    ],
                }

    def list_decided(self, call: CallContext, args: wire.XaDecided) -> dict[str, Any]:
        """List committed transactions of this home, for comparison with the databases.
        They have no list of their own, so a page covers `limit` transactions of all
        kinds; `next` is where it ended.
        """
        state, own = self._engine.state, self._engine.store.log_id.bytes
        after = bytes.fromhex(args.after) + b"\0" if args.after else b""
        tokens = [token for token, _row in islice(state.transactions.range(after), args.limit)]
        rows = [(token, get(state, token)) for token in tokens]
        found = [
            summary(token, row) | {"participants": [json_fields(one) for one in row.participants]}
            for token, row in rows
            if row is not None
            and isinstance(row.decider, ByHome)
            and row.decider.log_id == own
            and row.state in COMMITTED
        ]
        following = tokens[-1].hex() if len(tokens) == args.limit else None
        return {"transactions": found, "next": following}

    def _note_commit(self, event: Decided, decider: Decider) -> None:
        assert isinstance(decider, ByHome), "a listener to these only"
        if event.outcome == Decision.COMMIT and decider.log_id == self._engine.store.log_id.bytes:
            self._recent.append(event.token)
            self._last += 1
            row = get(self._engine.state, event.token)
            # All branches are prepared: copies from before lack the report.
            for one in postgres_branches(() if row is None else row.participants):
                self._resolvers.note_bundle(DatabaseId(one.system_id, one.database_oid))

    def list_committed(self, call: CallContext, args: wire.XaCommitted) -> dict[str, Any]:
        """List recent commits of this home in the order of decisions, for followers."""
        epoch, first = self._engine.state.boot_epoch, self._last - len(self._recent)
        after = args.after if args.boot_epoch == epoch else 0
        start = min(max(after - first, 0), len(self._recent))
        tokens = list(islice(self._recent, start, start + args.limit))
        rows = [(token, get(self._engine.state, token)) for token in tokens]
        return {
            "boot_epoch": epoch,
            "transactions": [
                {
                    "token": token.hex(),
                    "participants": [json_fields(one) for one in row.participants],
                }
                for token, row in rows
                if row is not None
            ],
            "next": first + start + len(tokens),
            "missed": args.boot_epoch != epoch or after < first,
        }

    def find(self, call: CallContext, args: wire.XaFind) -> dict[str, Any]:
        xid = Xid(args.format, b64decode(args.gtrid), b64decode(args.bqual))
        token = branches.find_token(self._engine.state, xid)
        if token is None:
            raise UnknownTransaction("XAER_NOTA: the broker has no branch of this Xid")
        row = get(self._engine.state, token)
        assert row is not None, "an Xid is kept as long as its transaction"
        return {"token": token.hex(), "state": row.state.name, "service": row.service}

    def outcome(self, call: CallContext, args: wire.XaOutcome) -> None:
        if self._refuse_other_log(call, args.log_id):
            return
        command = ResolveOutcome(bytes.fromhex(args.token), args.log_id.bytes, args.decide, args.by)
        self._engine.submit(command, then(call.answer, _state_view))

    def _refuse_other_log(self, call: CallContext, log_id: UUID) -> bool:
        own = self._engine.store.log_id
        if log_id != own:
            message = f"the call is for log {log_id}, and this is log {own}"
            call.answer(
                OtherLog(message, hint="ask the home broker itself, and decide nothing from this")
            )
        return log_id != own

    def heuristic(self, call: CallContext, args: wire.XaHeuristicArgs) -> None:
        token, decided = bytes.fromhex(args.token), Decision[args.decided]
        command = NoteHeuristic(token, args.branch, decided, args.found, args.operator, args.reason)
        acted = audited("xa.heuristic", transaction(args.token), args, command)
        self._engine.submit(acted, then(call.answer, lambda dealt: {"dealt": dealt}))

    def forget(self, call: CallContext, args: wire.XaForget) -> None:
        command = ForgetHeuristics(bytes.fromhex(args.token), args.operator, args.reason)
        acted = audited("xa.forget", transaction(args.token), args, command)
        self._engine.submit(acted, then(call.answer, _nothing))


def _state_view(state: BundleState | None) -> dict[str, Any]:
    return {"state": "UNKNOWN" if state is None else state.name}


def _nothing(_reply: object) -> dict[str, Any]:
    return {}


def _xid_view(xid: Xid) -> dict[str, Any]:
    return {
        "format": xid.format,
        "gtrid": b64encode(xid.gtrid).decode(),
        "bqual": b64encode(xid.bqual).decode(),
    }


def _heuristic_view(seen: Heuristic) -> dict[str, Any]:
    return seen._asdict() | {"decided": Decision(seen.decided).name}
