"""Rounds of a resolver: questions to the databases, and answers to the broker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import pytest
import structlog
from structlog.testing import capture_logs

from tests.cli.support import ScriptedClient
from txmq.cli.resolver_rounds import MAINTENANCE_US, PAGE, ResolvedBroker, ResolverRounds
from txmq.errors import BrokerUnavailable, Conflict, LogChanged, UnknownTopic
from txmq.model.message import Decision
from txmq.tx.postgres.brokers import DatabaseLease
from txmq.tx.postgres.identity import ServerIdentity
from txmq.tx.postgres.outbox import OutboxRow, PublishedRow, SetAside
from txmq.tx.postgres.partitions import CallerTime, MaintenanceReport
from txmq.tx.postgres.resolver import Answer, Check

LOG = UUID(int=7)
BROKER = ResolvedBroker(LOG, "b-1")
NOW = 1_782_907_200_000_000
FIRST = 6_000_000
COMMIT, ROLLBACK = Answer(Decision.COMMIT), Answer(Decision.ROLLBACK)


class StubDatabase:
    """A database that answers by token, and knows no other transactions."""

    def __init__(self, **answers: Answer) -> None:
        self._answers = answers
        self.asked: list[Check] = []
        self.output: list[tuple[UUID, str, UUID | None]] = []
        self.callers: list[CallerTime | None] = []
        self.trouble = self.refusal = ""
        self.lease: DatabaseLease | None = None
        self.waiting: list[OutboxRow] = []

    def fetch(self, log_id: UUID, done: Sequence[PublishedRow], aside: SetAside) -> list[OutboxRow]:
        assert log_id == LOG
        self.waiting = [row for row in self.waiting if row.published not in done]
        free = [row for row in self.waiting if row.seq not in aside.rows and not aside.holds(row)]
        return free[:2]

    def maintain(
        self,
        log_id: UUID,
        name: str,
        oldest_of: Callable[[ServerIdentity], UUID | None],
        caller: CallerTime | None,
    ) -> MaintenanceReport | None:
        self.callers.append(caller)
        oldest = oldest_of(ServerIdentity(11, 2, 5))
        self.output.append((log_id, name, oldest))
        return (
            None
            if self.trouble
            else MaintenanceReport([], [], {"txmq_token_1": "too young"} if oldest else {})
        )

    def resolve(self, checks: Sequence[Check]) -> list[Answer]:
        self.asked += checks
        unknown = Answer(Decision.UNKNOWN, "another database")
        return [self._answers.get(name_of(check), unknown) for check in checks]


def name_of(check: Check) -> str:
    return check.token.bytes.rstrip(b"\0").decode()


def row(name: str, decider: list[Any] | None = None, age: int = FIRST) -> dict[str, Any]:
    token = name.encode().ljust(16, b"\0").hex()
    return {
        "token": token,
        "decider": decider or ["postgres", 11, 1, 5, 99, 1],
        "stored_at": NOW - age,
    }


def page(*rows: dict[str, Any], following: int | None = None) -> dict[str, Any]:
    return {"transactions": list(rows), "next": following}


def handed_over(row: OutboxRow) -> None:
    """Refuse rows with contents."""
    if row.content:
        raise UnknownTopic("refused")


def rounds(client: ScriptedClient, **databases: StubDatabase) -> ResolverRounds:
    """Rounds that have just maintained the token tables."""
    made = ResolverRounds(client, BROKER, databases, FIRST, structlog.get_logger(), handed_over)  # type: ignore[arg-type]  # alike
    client.replies.insert(0, page())
    client.replies.insert(0, {"databases": [], "now": 5_000, "certain": 4_000})
    made.run_round(NOW)
    client.calls.clear()
    return made


def answers(client: ScriptedClient) -> list[tuple[str, str]]:
    given = [args for call, args in client.calls if call == "checks.answer"]
    return [(bytes.fromhex(args["token"]).rstrip(b"\0").decode(), args["answer"]) for args in given]


def test_answers_of_the_databases_are_sent_to_the_broker() -> None:
    client = ScriptedClient(
        [
            page(row("a"), following=7),
            {"state": "PUBLISHED"},
            page(following=9),
            page(row("b"), row("c"), row("young", age=FIRST - 1)),
            {"state": "ROLLED_BACK"},
        ]
    )
    one, other = StubDatabase(a=COMMIT), StubDatabase(b=ROLLBACK)
    rounds(client, one=one, other=other).run_round(NOW)
    assert [args for call, args in client.calls if call == "tx.pending"] == [
        {"after": after, "limit": PAGE} for after in (0, 7, 9)
    ]
    assert answers(client) == [("a", "COMMIT"), ("b", "ROLLBACK")]
    assert [name_of(check) for check in one.asked] == ["a", "b", "c"]
    assert [name_of(check) for check in other.asked] == ["b", "c"]
    assert one.asked[0] == Check(
        UUID(bytes=b"a".ljust(16, b"\0")), LOG, ServerIdentity(11, 1, 5), 99, 1
    )


def test_databases_are_not_asked_without_undecided_transactions() -> None:
    client, database = ScriptedClient([page(row("young", age=0))]), StubDatabase()
    rounds(client, one=database).run_round(NOW)
    assert database.asked == []


def test_a_round_without_a_broker_is_repeated() -> None:
    client = ScriptedClient([BrokerUnavailable("away"), page(row("a")), {"state": "PUBLISHED"}])
    resolver = rounds(client, one=StubDatabase(a=COMMIT))
    with capture_logs() as logs:
        resolver.run_round(NOW)
        resolver.run_round(NOW)
    assert answers(client) == [("a", "COMMIT")]
    assert [log["event"] for log in logs] == ["resolver.interrupted", "resolver.decided"]


def test_a_refused_answer_does_not_stop_the_others() -> None:
    client = ScriptedClient([page(row("a"), row("b")), Conflict("decided"), {"state": "PUBLISHED"}])
    with capture_logs() as logs:
        rounds(client, one=StubDatabase(a=COMMIT, b=COMMIT)).run_round(NOW)
    assert answers(client) == [("a", "COMMIT"), ("b", "COMMIT")]
    assert [log["event"] for log in logs] == ["resolver.refused", "resolver.decided"]


def test_another_log_at_the_broker_s_address_ends_it() -> None:
    with pytest.raises(LogChanged):
        rounds(ScriptedClient([LogChanged("another log")]), one=StubDatabase()).run_round(NOW)


def test_a_trouble_is_logged_once() -> None:
    client = ScriptedClient([page(*listed) for listed in ([row("a")], [row("a")], [], [row("a")])])
    resolver = rounds(client, one=StubDatabase())
    with capture_logs() as logs:
        for _ in range(4):
            resolver.run_round(NOW)
    assert [log["reason"] for log in logs] == ["another database"] * 2


def test_the_broker_is_reported_to_every_database_each_hour() -> None:
    oldest = UUID(int=9)
    databases = [[11, 5, oldest.hex], [11, 6, UUID(int=8).hex]]
    told = {"databases": databases, "now": 8_000, "certain": 7_000}
    client = ScriptedClient([page(), told, page()])
    one, other = StubDatabase(), StubDatabase()
    resolver = rounds(client, one=one, other=other)
    other.trouble = "no such database"
    with capture_logs() as logs:
        resolver.run_round(NOW + MAINTENANCE_US - 1)
        resolver.run_round(NOW + MAINTENANCE_US)
    assert one.output == other.output == [(LOG, "b-1", None), (LOG, "b-1", oldest)]
    assert one.callers == [CallerTime(5, 4), CallerTime(8, 7)], (
        "its time bounds that of the databases"
    )
    assert [(log["event"], log["resolver"]) for log in logs] == [
        ("resolver.upkeep", "one"),
        ("resolver.no_upkeep", "other"),
    ]


def test_a_refused_outbox_row_holds_up_those_of_its_keys_only() -> None:
    database = StubDatabase()
    resolver = rounds(ScriptedClient([page()]), one=database)
    contents = (b"", b"", b"", b"unknown", b"", b"")
    database.waiting = [
        OutboxRow(n, UUID(int=n), "", [n % 2], content) for n, content in enumerate(contents)
    ]
    with capture_logs() as logs:
        resolver.run_round(NOW)
    assert [row.seq for row in database.waiting] == [3, 5]
    assert [log["event"] for log in logs].count("outbox.stuck") == 1
