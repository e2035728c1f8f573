"""An operator's hand on a prepared branch of ours: never silent, never on a foreign
one.

Where the home broker can still decide, it is made to decide so, for all branches alike.
Where it has decided otherwise, or nobody can tell, the branch is ended against or
without a decision: that is heuristic, and the journal says so first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from txmq.client.log import get_logger
from txmq.errors import AlreadyResolved, RequestRejected, TransactionError, TxmqError
from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN, Decision
from txmq.tx.orphans import Word, word_of

if TYPE_CHECKING:
    from txmq.recover.findings import Finding
    from txmq.recover.homes import Home
    from txmq.recover.recoverer import XaRecoverer
    from txmq.tx.xid import Branch

DONE: Final = {COMMIT: "committed", ROLLBACK: "rolled back"}
ASKS: Final = 127  # characters that a broker takes for whoever asks
log = get_logger()


class ByHand(NamedTuple):
    """What an operator wants, and why."""

    gid: str
    outcome: Decision
    operator: str
    reason: str


class Forced(NamedTuple):
    """What came of it. `journal` is the URL of the broker whose journal keeps it, ""
    where none could.
    """

    gid: str
    where: str
    decided: str
    ending: str
    journal: str


def force(recoverer: XaRecoverer, wish: ByHand) -> Forced:
    """Ends a branch as an operator says. Raises TransactionError where it must not be,
    TxmqError where it cannot be.
    """
    finding = _find(recoverer, wish.gid)
    one, word = finding.prepared, finding.word
    assert one is not None, "only what is prepared was looked for"
    assert one.branch is not None, "and of ours alone"
    assert word is not None, "which have a home"
    if word in (Word.UNDECIDED, Word.UNHEARD_OF):
        word = _decide_at_home(recoverer, one.branch, word, wish)
        journal = _journal(recoverer, one.branch, word, wish)
    else:
        journal = (
            "" if word.decision is wish.outcome else _journal(recoverer, one.branch, word, wish)
        )
    database = next(database for database in recoverer.databases if database.name == finding.where)
    ending = database.finish(one, wish.outcome)
    forced = Forced(wish.gid, finding.where, word.value, ending.name, journal)
    log.warning(
        "xa.forced",
        **forced._asdict(),
        outcome=wish.outcome.name,
        operator=wish.operator,
        reason=wish.reason,
    )
    return forced


def _find(recoverer: XaRecoverer, gid: str) -> Finding:
    found = [
        one for one in recoverer.look().findings if one.prepared is not None and one.what == gid
    ]
    if not found:
        raise TransactionError("nothing of that gid stands prepared", hint="see: txmq xa doctor")
    if found[0].token is None:
        raise TransactionError(
            "that branch is foreign", hint="its own transaction manager has to finish it"
        )
    here = [one for one in found if one.prepared is not None and one.prepared.here]
    if not here:
        raise TransactionError(found[0].reason, hint="see: txmq xa doctor")
    return here[0]


def _decide_at_home(recoverer: XaRecoverer, branch: Branch, word: Word, wish: ByHand) -> Word:
    """The home decides by the operator's hand, for all branches. Raises AlreadyResolved
    where it has, meanwhile.
    """
    home = recoverer.homes.find(branch.log)
    assert home is not None, "it has just answered"
    if word is Word.UNDECIDED:
        by = {"operator": wish.operator, "reason": wish.reason}
        reply = home.call("tx.decide", token=branch.token.hex, outcome=wish.outcome.name, **by)
    elif wish.outcome is ROLLBACK:
        by_whom = f"operator {wish.operator}: {wish.reason}"[:ASKS]
        printable = "".join(char if " " <= char <= "~" else "?" for char in by_whom)
        asked = {"log_id": str(home.log_id), "decide": True, "by": printable}
        reply = home.call("xa.outcome", token=branch.token.hex, **asked)
    else:
        raise TransactionError(
            "its home broker has nothing of it", hint="it can only be rolled back"
        )
    decided = word_of(reply["state"])
    if decided.decision is not wish.outcome:
        raise AlreadyResolved(
            f"its home broker has {decided} it",
            decision=decided.decision.name,
            hint="txmq xa recover",
        )
    return decided


def _journal(recoverer: XaRecoverer, branch: Branch, word: Word, wish: ByHand) -> str:
    """Writes down what is about to be done: at the home broker, else at any that knows
    the transaction, or at last at any at all, which then first notes the transaction as
    rolled back there. Gives its URL.
    """
    home = recoverer.homes.find(branch.log)
    candidates = [
        one for one in (home, *recoverer.homes.all) if one is not None and not one.trouble
    ]
    decided = wish.outcome if word.decision is UNKNOWN else word.decision
    for known in (True, False):
        for one in candidates:
            if _note(one, branch.token, decided, wish, known=known):
                return one.url
    return ""


def _note(home: Home, token: UUID, decided: Decision, wish: ByHand, *, known: bool) -> bool:
    entry = {
        "branch": wish.gid,
        "found": DONE[wish.outcome],
        "operator": wish.operator,
        "reason": wish.reason,
    }
    try:
        if not known:
            home.call(
                "xa.outcome",
                token=token.hex,
                log_id=str(home.log_id),
                decide=True,
                by=f"operator {wish.operator}",
            )
        home.call("xa.heuristic", token=token.hex, decided=decided.name, **entry)
    except RequestRejected:
        return False
    except TxmqError as error:
        home.trouble = str(error)
        return False
    return True
