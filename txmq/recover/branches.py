"""Prepared branches of databases: each ended as its home broker decided, and what ended
otherwise brought to light.

That a branch is gone is no answer to anything: another recoverer may have been faster,
or somebody's hand. The status of its transaction id tells which, for an id that was
prepared is on disk and never given to another (PROTOCOLS 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from txmq.client.log import get_logger
from txmq.crashpoints import crashpoint
from txmq.errors import DatabaseError, TxmqError
from txmq.model.message import UNKNOWN
from txmq.recover.findings import Finding, Sightings
from txmq.recover.homes import BY
from txmq.tx.orphans import FOREIGN, Action, Verdict, Word, contradiction, judge
from txmq.tx.postgres.branch_finish import BUSY
from txmq.tx.postgres.prepared import Ending
from txmq.tx.postgres.prepared_list import Prepared

if TYPE_CHECKING:
    from uuid import UUID

    from txmq.recover.databases import Database
    from txmq.recover.findings import Key
    from txmq.recover.homes import Homes
    from txmq.tx.xid import Branch

FOUND: Final = {
    Word.COMMITTED: "rolled back",
    Word.ROLLED_BACK: "committed",
}  # what contradicts a decision
log = get_logger()


class Branches:
    """What is to be done with prepared branches. `trust_clocks`: their age is what the
    database says of it, not how long they have been seen.
    """

    def __init__(
        self, homes: Homes, sightings: Sightings, safety_s: float, *, trust_clocks: bool
    ) -> None:
        self._homes, self._sightings, self._safety_s = homes, sightings, safety_s
        self._trust_clocks = trust_clocks

    def judge(self, database: Database, one: Prepared, *, act: bool) -> Finding:
        """What is to be done with a branch; with `act` its home has been made to
        decide, where that was due.
        """
        finding = Finding(database.name, one.gid, None, one.age_s, *FOREIGN[:2], prepared=one)
        if one.branch is None:
            return finding
        seen_s = self._sightings.age(finding.key, one.branch, one.xid)
        word, verdict = self.ask(
            one.branch.log, one.branch.token, one.age_s if self._trust_clocks else seen_s, act=act
        )
        finding = replace(finding, action=verdict.action, reason=verdict.reason)
        return replace(finding, token=one.branch.token, word=word, needs_hand=needs_a_hand(verdict))

    def ask(self, of_log: str, token: UUID, age_s: float, *, act: bool) -> tuple[Word, Verdict]:
        """How the home broker decided and what follows from it; with `act` it is made
        to decide where that is due.
        """
        word = self._homes.word(of_log, token)
        verdict = judge(word, age_s, self._safety_s)
        if verdict.ask and act:
            crashpoint("recovery.before_outcome")
            word = self._homes.word(of_log, token, decide=True)
            crashpoint("recovery.after_outcome")
            verdict = judge(word, age_s, self._safety_s)
        return word, verdict

    def finish(self, database: Database, finding: Finding) -> Finding:
        """Ends a branch as its home has decided. What cannot be ended now stays for a
        later pass.
        """
        one, word = finding.prepared, finding.word
        if one is None or one.branch is None or word is None or word.decision is UNKNOWN:
            return finding
        try:
            crashpoint("recovery.before_finish")
            ending = database.finish(one, word.decision)
            crashpoint("recovery.after_finish")
        except DatabaseError as error:
            return _unfinished(finding, error)
        log.info(
            "xa.finished",
            where=database.name,
            gid=one.gid,
            decision=word.decision.name,
            ending=ending.name,
        )
        if ending is Ending.OTHERWISE:
            return self.mixed(finding.key, one.branch, word)
        self._sightings.drop(finding.key)
        return replace(finding, done=True)

    def look_for_gone(self, database: Database, present: Iterable[Prepared]) -> Iterator[Finding]:
        """Branches of earlier passes that stand no more, and had ended otherwise than
        decided.
        """
        for key, seen in self._sightings.gone(database.name, {one.gid for one in present}):
            if seen.branch is None:
                continue
            word = self._homes.word(seen.branch.log, seen.branch.token)
            try:
                status = database.statuses([seen.xid])[seen.xid]
            except DatabaseError:
                continue  # the next pass looks again
            if contradiction(word, status):
                yield self.mixed(key, seen.branch, word)
            elif _is_over(word, status):
                self._sightings.drop(key)

    def mixed(self, key: Key, branch: Branch, word: Word) -> Finding:
        """A branch has ended otherwise than `word` says: kept in the home broker's
        journal until that is dealt with.

        What could not be noted is found, and noted, by the next pass. What somebody has
        dealt with needs no hand.
        """
        where, gid = key
        found, decided = FOUND[word], word.decision.name
        dealt = False
        reason = f"mixed: decided {decided}, and {found} by somebody else"
        try:
            dealt = self._homes.note(
                branch.log, branch.token, branch=gid, decided=decided, found=found, operator=BY,
                reason=f"found in database {where}",
            )  # fmt: skip
        except TxmqError as error:
            log.warning("xa.not_journalled", gid=gid, error=str(error))
        else:
            self._sightings.drop(key)
        if dealt:
            return Finding(
                where, gid, branch.token, 0.0, Action.LEAVE, f"{reason}, and dealt with", word
            )
        log.error(
            "xa.mixed", where=where, gid=gid, token=branch.token.hex, decided=decided, found=found
        )
        return Finding(
            where, gid, branch.token, 0.0, Action.HEURISTIC, reason, word, needs_hand=True
        )


def needs_a_hand(verdict: Verdict) -> bool:
    """Whether nothing will be done about one of ours until an operator sees to it."""
    return verdict.action in (Action.LEAVE, Action.HEURISTIC)


def _unfinished(finding: Finding, error: DatabaseError) -> Finding:
    if error.sqlstate == BUSY:
        return replace(finding, action=Action.WAIT, reason="another session is ending it just now")
    return replace(finding, reason=f"{finding.reason}; {error}", needs_hand=not error.retriable)


def _is_over(word: Word, status: str | None) -> bool:
    """Whether nothing more will be known of a branch that is gone: undecided ones may
    yet turn out to be mixed.
    """
    undecided = word in (Word.UNDECIDED, Word.SILENT) or (
        word is Word.UNHEARD_OF and status == "committed"
    )
    return not undecided
