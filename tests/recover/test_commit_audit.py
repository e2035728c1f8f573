"""The audit follows all commits of home brokers, and checks unknown ends again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn, cast
from uuid import UUID

import pytest

from txmq.errors import BrokerUnavailable, DatabaseUnavailable
from txmq.recover.branches import BranchRecovery
from txmq.recover.commit_audit import CommitAudit
from txmq.recover.databases import BranchEnd, RecoveredDatabase
from txmq.recover.home_brokers import HomeBroker
from txmq.recover.server_log import BranchTrace
from txmq.tx.orphans import KnownOutcome
from txmq.tx.xid import XaBranch

HERE = (77, "shop")
TOKEN = "018bcfe5-6800-7000-8000-00000000000"


def gid(number: int) -> str:
    """Return the gid of a transaction, whose number is its xid as well."""
    return XaBranch("orders", "0123456789ab", UUID(f"{TOKEN}{number}"), 1).gid


class ListedHomeBroker:
    """A home broker whose commits are in a list."""

    url, trouble, log_id = "txmq://one", "", UUID(int=7)

    def __init__(self) -> None:
        self.boot_epoch, self.xids, self.older = 1, list[int](), list[int]()
        self.asked: list[tuple[int, int]] = []
        self.looks = 0  # at older commits

    def call(self, name: str, /, *, boot_epoch: int, after: int, limit: int) -> dict[str, Any]:
        assert name == "xa.committed"
        self.asked.append((boot_epoch, after))
        start = after if boot_epoch == self.boot_epoch else 0
        page = self.xids[start : start + limit]
        reply = {
            "boot_epoch": self.boot_epoch,
            "next": start + len(page),
            "missed": boot_epoch != self.boot_epoch,
        }
        return reply | {"transactions": [row(xid) for xid in page]}

    def reports(self) -> dict[tuple[int, int], int]:
        return {}

    def list_committed(
        self, since: object, pages: int | None = None
    ) -> Iterator[list[dict[str, Any]]]:
        self.looks += 1
        yield [row(xid) for xid in self.older]


class Server:
    """A database with a table of transaction statuses."""

    name, id, trouble, timeline = "shop", HERE, "", 1

    def __init__(self) -> None:
        self.fates: dict[int, str | None] = {}
        self.traces: dict[int, BranchTrace] = {}
        self.away = False
        self.shared: int | None = None  # with the original, where it is a copy
        self.asked_with: int | None = None

    def shared_with(self, log_id: object, reports: object) -> int | None:
        return self.shared

    def ends(
        self, branches: Iterable[tuple[int, object]], shared: int | None = None
    ) -> list[BranchEnd]:
        self.asked_with = shared
        if self.away:
            raise DatabaseUnavailable("no answer")
        return [
            BranchEnd(self.fates.get(xid, "committed"), self.traces.get(xid, BranchTrace()))
            for xid, _at in branches
        ]


class Noted:
    """A recorder of mixed outcomes."""

    def record_mixed(
        self, key: tuple[str, str], branch: object, word: KnownOutcome
    ) -> tuple[str, str]:
        assert word is KnownOutcome.COMMITTED
        return key

    def record_lost(self, key: tuple[str, str], branch: object, why: str) -> tuple[str, str]:
        return key[0], why


def row(xid: int) -> dict[str, Any]:
    other = ["postgres", 78, 5, "elsewhere", "o", gid(xid), xid, 1, 1]
    return {
        "token": "t",
        "participants": [
            ["postgres", *HERE[:1], 5, "shop", "o", gid(xid), xid, 1, 100 * xid],
            other,
            ["broker", "l"],
        ],
    }


def following() -> tuple[ListedHomeBroker, Server, Callable[[], list[Any]]]:
    broker, server = ListedHomeBroker(), Server()
    committed = CommitAudit(cast("BranchRecovery", Noted()), [cast("RecoveredDatabase", server)])
    return broker, server, lambda: list(committed.follow(cast("HomeBroker", broker)))


def test_each_decision_is_checked_once() -> None:
    broker, server, follow = following()
    broker.xids, server.fates = [1, 2], {2: "aborted"}
    assert follow() == [("shop", gid(2))]
    assert follow() == []
    broker.xids.append(3)
    server.fates[3] = "aborted"
    assert follow() == [("shop", gid(3))]
    assert broker.asked == [(0, 0), (1, 2), (1, 2)]


def test_branches_that_are_still_prepared_are_checked_again() -> None:
    broker, server, follow = following()
    broker.xids, server.fates = [1, 2, 3], {1: "in progress", 2: "in progress", 3: None}
    assert follow() == follow() == []
    server.fates = {1: "aborted", 2: "committed"}
    assert follow() == [("shop", gid(1))]
    server.fates[2] = "aborted"  # it had been found committed
    assert follow() == []


def test_a_lost_branch_is_reported_whatever_its_status_says() -> None:
    broker, server, follow = following()
    broker.xids, server.fates = [1, 2, 3], {2: "aborted", 3: "in progress"}
    server.traces = {xid: BranchTrace(f"lost {xid}") for xid in broker.xids}
    assert follow() == [("shop", f"lost {xid}") for xid in broker.xids]
    assert follow() == []


def test_a_branch_whose_server_cannot_tell_is_checked_again() -> None:
    broker, server, follow = following()
    broker.xids, server.traces = [1], {1: BranchTrace(untold="no history")}
    assert follow() == follow() == []
    assert "no history" in server.trouble
    server.traces = {1: BranchTrace("gone")}
    assert follow() == [("shop", "gone")]


def test_branches_of_a_database_that_is_away_are_checked_again() -> None:
    broker, server, follow = following()
    broker.xids, server.fates, server.away = [1], {1: "aborted"}, True
    assert follow() == []
    assert server.trouble == "no answer"
    server.away = False
    assert follow() == [("shop", gid(1))]


def test_after_a_start_of_the_broker_the_last_minutes_are_looked_through() -> None:
    broker, server, follow = following()
    broker.xids = [1]
    follow()
    broker.boot_epoch, broker.xids, broker.older = 2, [2], [1, 2]
    server.fates = {1: "aborted", 2: "aborted"}
    assert follow() == [("shop", gid(xid)) for xid in (1, 2)]
    assert follow() == []


class Audited(NamedTuple):
    """An audit that has compared the commits 1 and 2, and a server after a failover."""

    broker: ListedHomeBroker
    server: Server
    audit: CommitAudit

    def follow(self) -> list[Any]:
        return list(self.audit.follow(cast("HomeBroker", self.broker)))


def audited() -> Audited:
    broker, server = ListedHomeBroker(), Server()
    audit = CommitAudit(cast("BranchRecovery", Noted()), [cast("RecoveredDatabase", server)])
    broker.xids = [1, 2]
    made = Audited(broker, server, audit)
    assert made.follow() == []
    broker.older, broker.looks, server.timeline = [1, 2], 0, 2
    return made


def test_commits_are_compared_again_when_a_failover_may_have_lost_them() -> None:
    made = audited()
    broker, server, audit = made
    server.traces = {2: BranchTrace("lost 2")}
    assert made.follow() == []
    audit.review(["shop"])
    assert made.follow() == [("shop", "lost 2")]
    assert made.follow() == []
    assert broker.looks == 1  # a branch from before the failover is there


def test_a_longer_time_is_compared_where_all_of_the_last_minutes_is_lost() -> None:
    made = audited()
    broker, server, audit = made
    server.traces = {xid: BranchTrace(f"lost {xid}") for xid in (1, 2)}
    audit.review(["shop"])
    assert made.follow() == [
        ("shop", "lost 1"),
        ("shop", "lost 2"),
    ]
    assert broker.looks == 2


def test_what_could_not_be_compared_again_is_compared_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = audited()
    broker, server, audit = made
    server.traces = {2: BranchTrace("lost 2")}
    audit.review(["shop"])

    def fails(since: object) -> NoReturn:
        raise BrokerUnavailable("gone")

    with monkeypatch.context() as patched:
        patched.setattr(broker, "list_committed", fails)
        assert made.follow() == []
    assert broker.trouble.startswith("gone")
    assert made.follow() == [("shop", "lost 2")]


def test_commits_are_compared_again_when_a_database_turns_out_to_be_a_copy() -> None:
    made = audited()
    broker, server, _audit = made
    server.timeline, server.shared = 1, 150
    server.traces = {2: BranchTrace("another transaction may have its id")}
    assert made.follow() == [("shop", "another transaction may have its id")]
    assert server.asked_with == 150
    assert broker.looks == 2
    assert made.follow() == []
    assert broker.looks == 2


def test_a_broker_that_fails_is_left_for_the_next_pass() -> None:
    broker, server, follow = following()
    broker.xids, server.fates = [1], {1: "aborted"}
    answers = broker.call

    def fails(name: str, /, **args: int) -> dict[str, Any]:
        raise BrokerUnavailable("gone")

    broker.call = fails  # type: ignore[method-assign]
    assert follow() == []
    assert broker.trouble.startswith("gone")
    broker.call = answers  # type: ignore[method-assign]
    assert follow() == [("shop", gid(1))]
