"""Passes over everything that stands prepared: what is decided is finished, what is
left undecided gets decided.

    each database:  branches of ours ──► their home broker's word ──► COMMIT PREPARED or ROLLBACK PREPARED
    each broker:    undecided groups ──► their home broker's word ──► DECIDE

Any number of recoverers may be at work at once: they all follow the same logs, and who
comes second finds it done. A pass is harmless to live transactions but for those that
take longer than the safety interval between PREPARE and their decision: these are
rolled back, all branches of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random
from threading import Event
from typing import TYPE_CHECKING, Final

from txmq.client.blocking.alarm_reports import source_of
from txmq.recover.alarms import Alarms
from txmq.recover.branches import Branches
from txmq.recover.bundles import Groups
from txmq.recover.committed import Committed
from txmq.recover.databases import Database, Place
from txmq.recover.findings import Finding, Report, Sightings
from txmq.recover.homes import Homes
from txmq.tx.orphans import Action

if TYPE_CHECKING:
    from uuid import UUID

    from txmq.client.blocking.client import Client
    from txmq.config.broker import Xa
    from txmq.tx.postgres.prepared_list import Prepared

SERVICE: Final = "txmq-xa"
REPORTED_S: Final = 30.0
PASSES_REPORTED: Final = 4  # for which an alarm is listed at brokers, unless it is told again
JITTER: Final = 0.25  # of the pause: several recoverers do not stay in step


class XaRecoverer:
    """Recovers what `settings` names, together with the brokers at `urls`. For one
    thread; to be closed in the end.

    `trust_clocks`: for a single pass, whose safety interval is measured by the clocks
    of databases and brokers; else nothing undecided is decided that was not found by an
    earlier pass, so long ago. Of tokens before `since`, no pass compares what was
    committed with the databases.
    """

    def __init__(
        self,
        settings: Xa,
        urls: Iterable[str] = (),
        *,
        trust_clocks: bool = False,
        connect: Callable[[str], Client] | None = None,
        since: UUID | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.homes = Homes((*urls, *(one.url for one in settings.broker)), connect or _connect)
        self.databases = [Database(one.name, one.dsn) for one in settings.database]
        self._sightings = Sightings(clock)
        self._branches = Branches(
            self.homes, self._sightings, settings.safety_s, trust_clocks=trust_clocks
        )
        self._groups = Groups(
            self.homes, self._branches, self._sightings, trust_clocks=trust_clocks
        )
        self._committed = Committed(self._branches, self.databases, since)
        self._alarms = Alarms(settings.alarm_s, clock)
        self._source = source_of("xa-recovery")

    def go(self) -> Report:
        """One pass. Databases and brokers that fail are left for the next one, and told
        of in the report.
        """
        report = self._pass(act=True)
        self._alarms.tell(report)
        return report

    def look(self) -> Report:
        """What a pass would find, with all that it locks and blocks; nothing is
        done.
        """
        return self._pass(act=False)

    def verify(self, since: UUID) -> Report:
        """The branches that are rolled back though their transactions, of tokens after
        `since`, were committed.
        """
        self.homes.meet()
        for database in self.databases:
            database.standing()  # finds out where it leads to
        found = [
            one
            for home in self.homes.all
            if not home.trouble
            for one in self._committed.compare(home, since)
        ]
        return Report(tuple(found), self._troubles())

    def run(self, stop: Event) -> None:
        """Passes until `stop` is set."""
        random = Random()  # jitter
        while True:
            self.tell_brokers(self.go())
            if stop.wait(self.settings.every_s * random.uniform(1 - JITTER, 1 + JITTER)):
                return

    def tell_brokers(self, report: Report) -> None:
        """Has the alarms of a pass listed by all brokers, until a few passes later."""
        alarms, for_s = (
            self._alarms.of(report),
            max(REPORTED_S, PASSES_REPORTED * self.settings.every_s),
        )
        for home in self.homes.all:
            if not home.trouble:
                home.tell(self._source, alarms, for_s)

    def close(self) -> None:
        for database in self.databases:
            database.close()
        self.homes.close()

    def _pass(self, *, act: bool) -> Report:
        self.homes.meet()
        findings = [*self._in_databases(act=act)]
        standing = None if act else {one.what for one in findings if one.prepared is not None}
        for home in self.homes.all:
            if not home.trouble:
                findings += self._groups.go_through(home, act=act, standing=standing)
            if act and not home.trouble:
                findings += self._committed.follow(home)
        return Report(tuple(findings), self._troubles())

    def _troubles(self) -> tuple[tuple[str, str], ...]:
        databases = [(one.name, one.trouble) for one in self.databases if one.trouble]
        return (*databases, *((home.url, home.trouble) for home in self.homes.all if home.trouble))

    def _in_databases(self, *, act: bool) -> Iterator[Finding]:
        elsewhere: dict[tuple[Place, str], Finding] = {}
        for database in self.databases:
            standing = database.standing()
            if database.place is None or database.trouble:
                continue
            yield from self._in_database(database, [one for one in standing if one.here], act=act)
            others = [one for one in standing if not one.here and one.branch is not None]
            server = database.place[0]
            elsewhere |= {
                ((server, one.database), one.gid): _elsewhere(database, one) for one in others
            }
        places = {database.place for database in self.databases}
        if None not in places:  # one that was never met may be the one
            yield from (
                finding for (place, _gid), finding in elsewhere.items() if place not in places
            )

    def _in_database(
        self, database: Database, here: list[Prepared], *, act: bool
    ) -> Iterator[Finding]:
        if act:
            yield from self._branches.look_for_gone(database, here)
        findings = [self._branches.judge(database, one, act=act) for one in here]
        if act:
            findings = [self._branches.finish(database, one) for one in findings]
        told = [one for one in findings if not act or (not one.done and self._alarms.is_due(one))]
        holds = (
            database.holds([one.prepared for one in told if one.prepared is not None])
            if told
            else {}
        )
        yield from (
            replace(one, hold=holds[one.what]) if one.what in holds else one for one in findings
        )


def _elsewhere(database: Database, one: Prepared) -> Finding:
    """Of the same server, but of a database that this one's session cannot reach
    into.
    """
    assert one.branch is not None, "only ours are told of"
    reason = f"it is of database {one.database}: name that in an [[xa.database]] of its own"
    where = f"{database.name}/{one.database}"
    return Finding(
        where,
        one.gid,
        one.branch.token,
        one.age_s,
        Action.LEAVE,
        reason,
        needs_hand=True,
        prepared=one,
    )


def _connect(url: str) -> Client:
    from txmq.client.blocking.client import connect  # what a recoverer is given in tests needs it not

    return connect(url, service=SERVICE)
