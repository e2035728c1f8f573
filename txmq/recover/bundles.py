"""Recovery of XA bundles: each is decided as its home broker decides.

A home broker that has not decided within the safety interval is made to decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from txmq.client.log import get_logger
from txmq.errors import Conflict, RequestRejected, TxmqError
from txmq.model.bundle import BundleState
from txmq.model.decider import postgres_branches
from txmq.model.message import UNKNOWN
from txmq.model.units import SECOND
from txmq.recover.branches import LOST, verdict_needs_operator
from txmq.recover.findings import Finding
from txmq.recover.home_brokers import RECOVERY_NAME
from txmq.tx.orphans import FOREIGN, BranchAction, KnownOutcome, known_outcome

if TYPE_CHECKING:
    from txmq.recover.branches import BranchRecovery
    from txmq.recover.findings import Observations
    from txmq.recover.home_brokers import HomeBroker, HomeBrokers

log = get_logger()


class BundleRecovery:
    """Judges and decides bundles.

    `trust_clocks` = ages are by the brokers' clocks, not since the first observation.
    """

    def __init__(
        self,
        homes: HomeBrokers,
        branches: BranchRecovery,
        observations: Observations,
        *,
        trust_clocks: bool,
    ) -> None:
        self._homes, self._branches, self._observations = homes, branches, observations
        self._trust_clocks = trust_clocks
        self._now: Callable[[], int] = lambda: time.time_ns() // 1_000

    def recover(
        self, home: HomeBroker, *, act: bool, prepared: Collection[str] | None = None
    ) -> Iterator[Finding]:
        """Yield the findings of a broker, with `act` after deciding them.

        A broker that fails is left to the next pass. With `prepared`, the gids that are
        prepared in the databases, also yields the missing branches of undecided
        bundles.
        """
        present = set[str]()
        try:
            for row in home.list_bundles():
                present.add(row["token"])
                finding = self._judge(home, row, act=act)
                if prepared is not None and finding.outcome is KnownOutcome.UNDECIDED:
                    yield from _not_prepared(finding, row, prepared)
                yield self._finish(home, finding) if act else finding
        except TxmqError as error:
            home.trouble = str(error)
            return
        for key, _observation in self._observations.gone(home.url, present):
            self._observations.drop(key)

    def _judge(self, home: HomeBroker, row: dict[str, Any], *, act: bool) -> Finding:
        age_s = max(0.0, (self._now() - row["stored_at"]) / SECOND)
        finding = Finding(home.url, row["token"], None, age_s, *FOREIGN[:2])
        if row["state"] != BundleState.UNDECIDED.name:
            return self._heuristic(finding, row)
        if row["decider"][0] != "home":
            return finding
        _kind, log_id, token = row["decider"]
        observed_s = self._observations.age(finding.key)
        outcome, verdict = self._branches.home_outcome(
            log_id, UUID(token), age_s if self._trust_clocks else observed_s, act=act
        )
        return replace(
            finding,
            token=UUID(token),
            action=verdict.action,
            reason=verdict.reason,
            outcome=outcome,
            needs_operator=verdict_needs_operator(verdict),
        )

    def _heuristic(self, finding: Finding, row: dict[str, Any]) -> Finding:
        """Return the finding of a bundle with heuristic outcomes."""
        outcome = None
        if row["decider"][0] == "home":
            outcome = self._homes.outcome(row["decider"][1], UUID(row["decider"][2]))
        mixed = outcome is not None and outcome.decision not in (
            UNKNOWN,
            known_outcome(row["state"]).decision,
        )
        entries = "; ".join(
            f"{entry['branch'] or 'the group'} {entry['found']} by {entry['operator']}: "
            f"{entry['reason']}"
            for entry in row["heuristics"]
        )
        mixed_text = f"mixed, its home: {outcome}; " if mixed else ""
        reason = f"{mixed_text}{entries}; once it is dealt with run `txmq xa forget`"
        lost = any(entry["found"] == LOST for entry in row["heuristics"])
        return replace(
            finding,
            action=BranchAction.LOST if lost else BranchAction.HEURISTIC,
            reason=reason,
            outcome=outcome,
            needs_operator=True,
        )

    def _finish(self, home: HomeBroker, finding: Finding) -> Finding:
        outcome = finding.outcome
        if (
            outcome is None
            or outcome.decision is UNKNOWN
            or finding.action is BranchAction.HEURISTIC
        ):
            return finding
        try:
            home.decide(UUID(finding.name), outcome.decision)
        except Conflict as error:
            return _mixed(home, finding, outcome, str(error))
        except RequestRejected as error:  # about this bundle only: go on with the others
            return replace(finding, reason=str(error), needs_operator=True)
        log.info("xa.finished", where=home.url, token=finding.name, decision=outcome.decision.name)
        self._observations.drop(finding.key)
        return replace(finding, done=True)


def _not_prepared(
    bundle: Finding, row: dict[str, Any], prepared: Collection[str]
) -> Iterator[Finding]:
    """Yield the branches of a bundle that are not prepared, or not any more."""
    for branch in postgres_branches(row["participants"]):
        if branch.gid not in prepared:
            reason = "its group waits for it: it is not prepared, or its database was not read"
            yield replace(
                bundle,
                place=branch.database,
                name=branch.gid,
                action=BranchAction.WAIT,
                reason=reason,
                outcome=None,
            )


def _mixed(home: HomeBroker, finding: Finding, outcome: KnownOutcome, found: str) -> Finding:
    """Enter a bundle that contradicts its home's decision in the broker's journal."""
    decided = outcome.decision.name
    log.error("xa.mixed", where=home.url, token=finding.name, decided=decided, found=found)
    try:
        home.call(
            "xa.heuristic",
            token=finding.name,
            branch=f"broker {home.log_id}",
            decided=decided,
            found="decided otherwise",
            operator=RECOVERY_NAME,
            reason="its home broker had decided",
        )
    except RequestRejected as error:
        log.warning("xa.not_journalled", token=finding.name, error=str(error))
    return replace(
        finding,
        action=BranchAction.HEURISTIC,
        reason=f"mixed: decided {decided}; {found}",
        needs_operator=True,
    )
