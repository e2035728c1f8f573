"""Groups of XA transactions at brokers: those that another broker decides get its
decision, and what is undecided at home for too long is decided there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from txmq.client.log import get_logger
from txmq.errors import Conflict, RequestRejected, TxmqError
from txmq.model.bundle import GroupState
from txmq.model.message import UNKNOWN
from txmq.recover.branches import needs_a_hand
from txmq.recover.findings import Finding
from txmq.recover.homes import BY
from txmq.tx.orphans import FOREIGN, Action, Word, word_of

if TYPE_CHECKING:
    from txmq.recover.branches import Branches
    from txmq.recover.findings import Sightings
    from txmq.recover.homes import Home, Homes

SECOND: Final = 1_000_000
log = get_logger()


class Groups:
    """What is to be done with groups. `trust_clocks`: their age is by the brokers'
    clocks.
    """

    def __init__(
        self, homes: Homes, branches: Branches, sightings: Sightings, *, trust_clocks: bool
    ) -> None:
        self._homes, self._branches, self._sightings = homes, branches, sightings
        self._trust_clocks = trust_clocks
        self._now: Callable[[], int] = lambda: time.time_ns() // 1_000

    def go_through(
        self, home: Home, *, act: bool, standing: Collection[str] | None = None
    ) -> Iterator[Finding]:
        """What a broker lists, and with `act` decides. A broker that fails meanwhile is
        left for the next pass.

        `standing`: the gids that stand prepared in the databases; the branches of
        undecided groups that do not are told of, too.
        """
        present = set[str]()
        try:
            for row in home.groups():
                present.add(row["token"])
                finding = self._judge(home, row, act=act)
                if standing is not None and finding.word is Word.UNDECIDED:
                    yield from _not_prepared(finding, row, standing)
                yield self._finish(home, finding) if act else finding
        except TxmqError as error:
            home.trouble = str(error)
            return
        for key, _seen in self._sightings.gone(home.url, present):
            self._sightings.drop(key)

    def _judge(self, home: Home, row: dict[str, Any], *, act: bool) -> Finding:
        told_s = max(0.0, (self._now() - row["stored_at"]) / SECOND)
        finding = Finding(home.url, row["token"], None, told_s, *FOREIGN[:2])
        if row["state"] != GroupState.UNDECIDED.name:
            return self._heuristic(finding, row)
        if row["decider"][0] != "home":
            return finding
        _kind, log_id, token = row["decider"]
        seen_s = self._sightings.age(finding.key)
        word, verdict = self._branches.ask(
            log_id, UUID(token), told_s if self._trust_clocks else seen_s, act=act
        )
        finding = replace(finding, action=verdict.action, reason=verdict.reason)
        return replace(finding, token=UUID(token), word=word, needs_hand=needs_a_hand(verdict))

    def _heuristic(self, finding: Finding, row: dict[str, Any]) -> Finding:
        """Somebody ended a part of it by hand; it is told of until it is dealt with."""
        word = None
        if row["decider"][0] == "home":
            word = self._homes.word(row["decider"][1], UUID(row["decider"][2]))
        mixed = word is not None and word.decision not in (UNKNOWN, word_of(row["state"]).decision)
        entries = "; ".join(
            f"{entry['branch'] or 'the group'} {entry['found']} by {entry['operator']}: {entry['reason']}"
            for entry in row["heuristics"]
        )
        reason = f"{f'mixed, its home: {word}; ' if mixed else ''}{entries}; when it is dealt with: txmq xa forget"
        return replace(finding, action=Action.HEURISTIC, reason=reason, word=word, needs_hand=True)

    def _finish(self, home: Home, finding: Finding) -> Finding:
        word = finding.word
        if word is None or word.decision is UNKNOWN or finding.action is Action.HEURISTIC:
            return finding
        try:
            home.decide(UUID(finding.what), word.decision)
        except Conflict as error:
            return _mixed(home, finding, word, str(error))
        except RequestRejected as error:  # of this one alone: the others may fare better
            return replace(finding, reason=str(error), needs_hand=True)
        log.info("xa.finished", where=home.url, token=finding.what, decision=word.decision.name)
        self._sightings.drop(finding.key)
        return replace(finding, done=True)


def _not_prepared(
    group: Finding, row: dict[str, Any], standing: Collection[str]
) -> Iterator[Finding]:
    """What a group names as its branches and does not stand prepared: not yet, or
    never, or ended by hand.
    """
    for participant in row["participants"]:
        if participant[0] == "postgres" and participant[5] not in standing:
            reason = "its group waits for it: it is not prepared, or its database was not looked at"
            yield replace(
                group,
                where=participant[3],
                what=participant[5],
                action=Action.WAIT,
                reason=reason,
                word=None,
            )


def _mixed(home: Home, finding: Finding, word: Word, found: str) -> Finding:
    """The group was decided otherwise than its home has, just now: the broker's journal
    keeps that.
    """
    decided = word.decision.name
    log.error("xa.mixed", where=home.url, token=finding.what, decided=decided, found=found)
    try:
        home.call(
            "xa.heuristic", token=finding.what, branch=f"broker {home.log_id}", decided=decided,
            found="decided otherwise", operator=BY, reason="its home broker had decided",
        )  # fmt: skip
    except RequestRejected as error:
        log.warning("xa.not_journalled", token=finding.what, error=str(error))
    return replace(
        finding,
        action=Action.HEURISTIC,
        reason=f"mixed: decided {decided}; {found}",
        needs_hand=True,
    )
