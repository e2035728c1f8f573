"""Control calls of XA, and of producer instances."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.broker.calls.control import Asking, Handler, then
from txmq.broker.calls.views import plain, told
from txmq.core.events.transactions import Decided
from txmq.core.state.state import Rejected
from txmq.core.transactions import branches
from txmq.core.transactions.instances import RegisterInstance
from txmq.core.transactions.model import Transaction, get
from txmq.core.transactions.xa import AskOutcome, ForgetHeuristics, NoteHeuristic
from txmq.errors import OtherLog, UnknownTransaction
from txmq.model.bundle import GroupState
from txmq.model.message import Decision
from txmq.tx.xid import Xid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from txmq.broker.engine import Engine
    from txmq.core.events.base import Place
    from txmq.core.transactions.branches import Heuristic
    from txmq.wire import calls_xa as wire

RECENT = 100_000
DECIDER = Transaction._fields.index("decider")
COMMITTED = frozenset({GroupState.COMMITTED, GroupState.PUBLISHED})


class XaCalls:
    """What transaction managers, their recoverers and operators ask of branches."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recent: deque[bytes] = deque(
            maxlen=RECENT
        )  # committed by this broker as their home, the last ones
        self._last = 0  # number of the last of them since the start
        engine.listen(Decided, self._note)
        self.handlers: dict[str, Handler] = {
            "producer.register": self.register,
            "xa.list": self.listed,
            "xa.decided": self.decided,
            "xa.committed": self.committed,
            "xa.find": self.find,
            "xa.outcome": self.outcome,
            "xa.heuristic": self.heuristic,
            "xa.forget": self.forget,
        }

    def register(self, asking: Asking, args: wire.ProducerRegister) -> None:
        """The connection that asks counts as the new incarnation's."""
        session = asking.session

        def registered(reply: Any) -> None:  # whatever the core says
            if not isinstance(reply, Rejected) and session.instance == (
                args.service,
                args.instance,
            ):
                session.incarnation = reply
            then(asking.answer, lambda epoch: {"epoch": epoch})(reply)

        self._engine.submit(RegisterInstance(args.service, args.instance), registered)

    def listed(self, asking: Asking, args: wire.XaList) -> None:
        after = bytes.fromhex(args.after) if args.after else b""
        tokens = branches.listed(self._engine.state, after, heuristic=args.heuristic)
        found = [row for row, _ in zip(self._chosen(tokens, args), range(args.limit), strict=False)]
        following = found[-1]["token"] if len(found) == args.limit else None
        self._engine.tell(asking.answer, {"transactions": found, "next": following})

    def _chosen(self, tokens: Iterator[bytes], args: wire.XaList) -> Iterator[dict[str, Any]]:
        for token in tokens:
            row = get(self._engine.state, token)
            assert row is not None, "it is on the list, so it is stored"
            if args.kind in (None, row.decider[0]) and args.owner in (None, row.service):
                xid = branches.xid_of(row.decider)
                yield told(token, row) | {
                    "xid": None if xid is None else _xid(xid),
                    "participants": [plain(one) for one in row.participants],
                    "heuristics": [
                        _heuristic(one) for one in branches.heuristics(self._engine.state, token)
                    ],
                }

    def decided(self, asking: Asking, args: wire.XaDecided) -> None:
        """For whoever compares them with the databases. As they have no list of their
        own, so many of all are looked at, and `next` tells how far that came.
        """
        state, own = self._engine.state, ("home", self._engine.store.log_id.bytes)
        after = bytes.fromhex(args.after) + b"\0" if args.after else b""
        tokens = [token for token, _row in islice(state.transactions.range(after), args.limit)]
        rows = [(token, get(state, token)) for token in tokens]
        found = [
            told(token, row) | {"participants": [plain(one) for one in row.participants]}
            for token, row in rows
            if row is not None and row.decider[:2] == own and row.state in COMMITTED
        ]
        following = tokens[-1].hex() if len(tokens) == args.limit else None
        self._engine.tell(asking.answer, {"transactions": found, "next": following})

    def _note(self, event: Decided, place: Place) -> None:
        del place
        row: Any = self._engine.state.transactions.get(event.token)
        if event.outcome == Decision.COMMIT and row[DECIDER][:2] == (
            "home",
            self._engine.store.log_id.bytes,
        ):
            self._recent.append(event.token)
            self._last += 1

    def committed(self, asking: Asking, args: wire.XaCommitted) -> None:
        """For whoever follows them as they come. In the order of their decisions, which
        no token tells.
        """
        epoch, first = self._engine.state.boot_epoch, self._last - len(self._recent)
        after = args.after if args.boot_epoch == epoch else 0
        start = max(after - first, 0)
        tokens = list(islice(self._recent, start, start + args.limit))
        rows = [(token, get(self._engine.state, token)) for token in tokens]
        told = {
            "boot_epoch": epoch,
            "transactions": [
                {"token": token.hex(), "participants": [plain(one) for one in row.participants]}
                for token, row in rows
                if row is not None
            ],
            "next": first + start + len(tokens),
            "missed": args.boot_epoch != epoch or after < first,
        }
        self._engine.tell(asking.answer, told)

    def find(self, asking: Asking, args: wire.XaFind) -> None:
        xid = Xid(args.format, b64decode(args.gtrid), b64decode(args.bqual))
        token = branches.find(self._engine.state, xid)
        if token is None:
            unknown = Rejected(
                UnknownTransaction, "XAER_NOTA: the broker has no branch of this Xid"
            )
            self._engine.tell(asking.answer, unknown)
            return
        row = get(self._engine.state, token)
        assert row is not None, "its Xid is kept as long as it is"
        self._engine.tell(
            asking.answer, {"token": token.hex(), "state": row.state.name, "service": row.service}
        )

    def outcome(self, asking: Asking, args: wire.XaOutcome) -> None:
        if self._another_log(asking, args.log_id):
            return
        command = AskOutcome(bytes.fromhex(args.token), args.log_id.bytes, args.decide, args.by)
        self._engine.submit(command, then(asking.answer, _state))

    def _another_log(self, asking: Asking, log_id: UUID) -> bool:
        own = self._engine.store.log_id
        if log_id != own:
            message = f"log {log_id} was asked, and this is log {own}"
            asking.answer(
                Rejected(
                    OtherLog, message, "ask the home broker itself, and decide nothing from this"
                )
            )
        return log_id != own

    def heuristic(self, asking: Asking, args: wire.XaHeuristic) -> None:
        token, decided = bytes.fromhex(args.token), Decision[args.decided]
        command = NoteHeuristic(token, args.branch, decided, args.found, args.operator, args.reason)
        self._engine.submit(command, then(asking.answer, lambda dealt: {"dealt": dealt}))

    def forget(self, asking: Asking, args: wire.XaForget) -> None:
        command = ForgetHeuristics(bytes.fromhex(args.token), args.operator, args.reason)
        self._engine.submit(command, then(asking.answer, _nothing))


def _state(state: GroupState | None) -> dict[str, Any]:
    return {"state": "UNKNOWN" if state is None else state.name}


def _nothing(reply: object) -> dict[str, Any]:
    del reply
    return {}


def _xid(xid: Xid) -> dict[str, Any]:
    return {
        "format": xid.format,
        "gtrid": b64encode(xid.gtrid).decode(),
        "bqual": b64encode(xid.bqual).decode(),
    }


def _heuristic(seen: Heuristic) -> dict[str, Any]:
    return seen._asdict() | {"decided": Decision(seen.decided).name}
