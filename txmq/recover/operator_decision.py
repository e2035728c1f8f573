"""Decision of an operator about a prepared branch of txmq; foreign ones are refused.

If the home broker can still decide, it decides as the operator says, for all branches.
Otherwise the branch is ended against a decision, or without one. That is a heuristic
outcome, which a broker's journal records before the branch is ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from txmq.client.log import get_logger
from txmq.client.protocol.transaction.home_decision import DECIDED_BY_LIMIT
from txmq.errors import AlreadyResolved, RequestRejected, TransactionError, TxmqError
from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN, Decision
from txmq.tx.orphans import KnownOutcome, known_outcome

if TYPE_CHECKING:
    from txmq.recover.findings import Finding
    from txmq.recover.home_brokers import HomeBroker
    from txmq.recover.recoverer import XaRecoverer
    from txmq.tx.xid import XaBranch

FOUND_STATE: Final = {COMMIT: "committed", ROLLBACK: "rolled back"}
log = get_logger()


class OperatorDecision(NamedTuple):
    """The request of an operator, with the reason."""

    gid: str
    outcome: Decision
    operator: str
    reason: str


class ForcedBranch(NamedTuple):
    """The result of an operator's request.

    `journal` is the URL of the broker that has recorded it, "" = none.
    """

    gid: str
    where: str
    decided: str
    ending: str
    journal: str


def force_branch(recoverer: XaRecoverer, request: OperatorDecision) -> ForcedBranch:
    """End a branch as an operator says.

    Raises TransactionError if that is not allowed, TxmqError if it fails.
    """
    finding = _find(recoverer, request.gid)
    one, outcome = finding.prepared, finding.outcome
    assert one is not None, "_find returns prepared branches"
    assert one.branch is not None, "of txmq only"
    assert outcome is not None, "which have a home broker"
    if outcome in (KnownOutcome.UNDECIDED, KnownOutcome.UNHEARD_OF):
        outcome = _decide_at_home(recoverer, one.branch, outcome, request)
        journal = _journal(recoverer, one.branch, outcome, request)
    else:
        journal = (
            ""
            if outcome.decision is request.outcome
            else _journal(recoverer, one.branch, outcome, request)
        )
    database = next(database for database in recoverer.databases if database.name == finding.place)
    ending = database.finish(one, request.outcome)
    forced = ForcedBranch(request.gid, finding.place, outcome.value, ending.name, journal)
    log.warning(
        "xa.forced",
        **forced._asdict(),
        outcome=request.outcome.name,
        operator=request.operator,
        reason=request.reason,
    )
    return forced


def _find(recoverer: XaRecoverer, gid: str) -> Finding:
    found = [
        one for one in recoverer.inspect().findings if one.prepared is not None and one.name == gid
    ]
    if not found:
        raise TransactionError(f"No branch {gid} is prepared", hint="see `txmq xa doctor`")
    if found[0].token is None:
        raise TransactionError(
            f"Branch {gid} is foreign", hint="let its own transaction manager finish it"
        )
    here = [one for one in found if one.prepared is not None and one.prepared.here]
    if not here:
        raise TransactionError(found[0].reason, hint="see `txmq xa doctor`")
    return here[0]


def _decide_at_home(
    recoverer: XaRecoverer, branch: XaBranch, outcome: KnownOutcome, request: OperatorDecision
) -> KnownOutcome:
    """Let the home broker decide as the operator says, for all branches.

    Raises AlreadyResolved if it has decided otherwise meanwhile.
    """
    home = recoverer.homes.find(branch.log)
    assert home is not None, "the home broker has just answered"
    if outcome is KnownOutcome.UNDECIDED:
        by = {"operator": request.operator, "reason": request.reason}
        reply = home.call("tx.decide", token=branch.token.hex, outcome=request.outcome.name, **by)
    elif request.outcome is ROLLBACK:
        by_whom = f"operator {request.operator}: {request.reason}"[:DECIDED_BY_LIMIT]
        printable = "".join(char if " " <= char <= "~" else "?" for char in by_whom)
        asked = {"log_id": str(home.log_id), "decide": True, "by": printable}
        reply = home.call("xa.outcome", token=branch.token.hex, **asked)
    else:
        raise TransactionError(
            f"The home broker does not know transaction {branch.token}",
            hint="roll the branch back: it cannot be committed",
        )
    decided = known_outcome(reply["state"])
    if decided.decision is not request.outcome:
        raise AlreadyResolved(
            f"The home broker has {decided} transaction {branch.token}",
            decision=decided.decision.name,
            hint="run `txmq xa recover`, which follows that decision",
        )
    return decided


def _journal(
    recoverer: XaRecoverer, branch: XaBranch, outcome: KnownOutcome, request: OperatorDecision
) -> str:
    """Record the request in a broker's journal; return the broker's URL.

    The home broker comes first, then brokers that know the transaction. The last choice
    is any broker, which first records the transaction as rolled back there.
    """
    home = recoverer.homes.find(branch.log)
    candidates = [
        one for one in (home, *recoverer.homes.all) if one is not None and not one.trouble
    ]
    decided = request.outcome if outcome.decision is UNKNOWN else outcome.decision
    for known in (True, False):
        for one in candidates:
            if _record(one, branch.token, decided, request, known=known):
                return one.url
    return ""


def _record(
    home: HomeBroker, token: UUID, decided: Decision, request: OperatorDecision, *, known: bool
) -> bool:
    entry = {
        "branch": request.gid,
        "found": FOUND_STATE[request.outcome],
        "operator": request.operator,
        "reason": request.reason,
    }
    try:
        if not known:
            home.call(
                "xa.outcome",
                token=token.hex,
                log_id=str(home.log_id),
                decide=True,
                by=f"operator {request.operator}",
            )
        home.call("xa.heuristic", token=token.hex, decided=decided.name, **entry)
    except RequestRejected:
        return False
    except TxmqError as error:
        home.trouble = str(error)
        return False
    return True
