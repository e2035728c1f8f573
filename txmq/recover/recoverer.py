"""Recovery passes over all prepared branches and undecided bundles.

    databases:  prepared branches ──► home broker's outcome ──► COMMIT|ROLLBACK PREPARED
    brokers:    undecided bundles ──► home broker's outcome ──► DECIDE

Any number of recoverers may run at once, because all follow the same logs. A pass does
not harm live transactions, unless one takes longer than the safety interval between
PREPARE and its decision: that one is rolled back in all its branches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random
from threading import Event
from typing import TYPE_CHECKING, Final

from txmq.client.protocol.alarm_reports import MIN_DURATION_S, alarm_source
from txmq.recover.alarms import RecoveryAlarms
from txmq.recover.branches import BranchRecovery
from txmq.recover.bundles import BundleRecovery
from txmq.recover.commit_audit import CommitAudit
from txmq.recover.databases import DatabaseId, RecoveredDatabase
from txmq.recover.findings import Finding, Observations, PassReport
from txmq.recover.home_brokers import HomeBrokers
from txmq.tx.orphans import BranchAction

if TYPE_CHECKING:
    from uuid import UUID

    from txmq.client.blocking.client import Client
    from txmq.config.broker import XaSettings
    from txmq.tx.postgres.prepared_list import PreparedTransaction

SERVICE: Final = "txmq-xa"
PASSES_REPORTED: Final = 4  # brokers list an alarm for as long, unless it is reported again
JITTER: Final = 0.25  # of the pause, so that several recoverers do not run in step


class XaRecoverer:
    """Recovers the databases and brokers in `settings`, and the brokers at `urls`.

    For one thread; close it in the end. With `trust_clocks`, for a single pass, the
    safety interval is measured by the clocks of databases and brokers. Otherwise it
    counts from the pass that first found a branch or bundle. Commits of tokens before
    `since` are not compared with the databases.
    """

    def __init__(
        self,
        settings: XaSettings,
        urls: Iterable[str] = (),
        *,
        trust_clocks: bool = False,
        connect: Callable[[str], Client] | None = None,
        since: UUID | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.homes = HomeBrokers(
            (*urls, *(one.url for one in settings.broker)), connect or _connect
        )
        self.databases = [RecoveredDatabase(one.name, one.dsn) for one in settings.database]
        self._observations = Observations(clock)
        self._branches = BranchRecovery(
            self.homes, self._observations, settings.safety_s, trust_clocks=trust_clocks
        )
        self._bundles = BundleRecovery(
            self.homes, self._branches, self._observations, trust_clocks=trust_clocks
        )
        self._commit_audit = CommitAudit(self._branches, self.databases, since)
        self._alarms = RecoveryAlarms(settings.alarm_s, clock)
        self._source = alarm_source("xa-recovery")

    def run_pass(self) -> PassReport:
        """Run one pass; the report names databases and brokers that failed."""
        report = self._pass(act=True)
        self._alarms.log_alarms(report)
        return report

    def inspect(self) -> PassReport:
        """Return the findings of a pass, with their locks; end nothing.

        What contradicts the decisions of the last ten minutes is journalled.
        """
        return self._pass(act=False)

    def verify(self, since: UUID) -> PassReport:
        """Return branches that contradict commits of tokens after `since`.

        Lost branches are among them.
        """
        self.homes.identify()
        for database in self.databases:
            database.list_prepared()  # sets the id of the database
        found = [
            one
            for home in self.homes.all
            if not home.trouble
            for one in self._commit_audit.compare(home, since)
        ]
        return PassReport(tuple(found), self._troubles())

    def run(self, stop: Event) -> None:
        """Run passes until `stop` is set."""
        random = Random()  # noqa: S311
        while True:
            self.report_alarms(self.run_pass())
            if stop.wait(self.settings.every_s * random.uniform(1 - JITTER, 1 + JITTER)):
                return

    def report_alarms(self, report: PassReport) -> None:
        """Report the alarms of a pass to all brokers, valid for a few passes."""
        alarms = self._alarms.for_brokers(report)
        for_s = max(MIN_DURATION_S, PASSES_REPORTED * self.settings.every_s)
        for home in self.homes.all:
            if not home.trouble:
                home.report_alarms(self._source, alarms, for_s)

    def close(self) -> None:
        for database in self.databases:
            database.close()
        self.homes.close()

    def _pass(self, *, act: bool) -> PassReport:
        self.homes.identify()
        findings = [*self._judge_databases(act=act)]
        parted = [database for database in self.databases if database.has_parted]
        self._commit_audit.review([database.name for database in parted])
        for database in parted:
            database.has_parted = False
        prepared = None if act else {one.name for one in findings if one.prepared is not None}
        for home in self.homes.all:
            if not home.trouble:
                findings += self._bundles.recover(home, act=act, prepared=prepared)
            if not home.trouble:
                findings += self._commit_audit.follow(home)
        return PassReport(tuple(findings), self._troubles())

    def _troubles(self) -> tuple[tuple[str, str], ...]:
        databases = [(one.name, one.trouble) for one in self.databases if one.trouble]
        return (
            *databases,
            *((home.url, home.trouble) for home in self.homes.all if home.trouble),
        )

    def _judge_databases(self, *, act: bool) -> Iterator[Finding]:
        elsewhere: dict[tuple[DatabaseId, str], Finding] = {}
        for database in self.databases:
            prepared = database.list_prepared()
            if database.id is None or database.trouble:
                continue
            yield from self._judge_database(
                database, [one for one in prepared if one.here], act=act
            )
            others = [one for one in prepared if not one.here and one.branch is not None]
            server = database.id[0]
            elsewhere |= {
                ((server, one.database), one.gid): _unreachable(database, one) for one in others
            }
        known = {database.id for database in self.databases}
        if None not in known:  # else a database that never answered may have the branch
            yield from (
                finding
                for (database_id, _gid), finding in elsewhere.items()
                if database_id not in known
            )

    def _judge_database(
        self, database: RecoveredDatabase, here: list[PreparedTransaction], *, act: bool
    ) -> Iterator[Finding]:
        if act:
            yield from self._branches.find_mixed(database, here)
        findings = [self._branches.judge(database, one, act=act) for one in here]
        if act:
            findings = [self._branches.finish(database, one) for one in findings]
        shown = [one for one in findings if not act or (not one.done and self._alarms.is_due(one))]
        holds = (
            database.holds([one.prepared for one in shown if one.prepared is not None])
            if shown
            else {}
        )
        yield from (
            replace(one, locks=holds[one.name]) if one.name in holds else one for one in findings
        )


def _unreachable(database: RecoveredDatabase, one: PreparedTransaction) -> Finding:
    """Return the finding of a branch in another database of the same server.

    A branch can only be ended from its own database.
    """
    assert one.branch is not None, "only branches of txmq are listed"
    reason = f"it is of database {one.database}: name that in an [[xa.database]] of its own"
    return Finding(
        f"{database.name}/{one.database}",
        one.gid,
        one.branch.token,
        one.age_s,
        BranchAction.LEAVE,
        reason,
        needs_operator=True,
        prepared=one,
    )


def _connect(url: str) -> Client:
    from txmq.client.blocking.connect import connect  # noqa: PLC0415  # tests give their own

    return connect(url, service=SERVICE)
