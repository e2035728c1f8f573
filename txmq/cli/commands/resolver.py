"""`txmq resolver`: finds out what became of a broker's half messages, and fetches what
waits for it in outboxes.

A process of its own, for a database that the broker itself cannot reach, or that keeps
it too busy. Any number of them, and the broker's own, may work at once: the token's row
decides, whoever reads it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from uuid import UUID

import typer

from txmq.cli.command import Client, Session, remote
from txmq.errors import RequestRejected, TxmqError
from txmq.model.message import UNKNOWN

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from txmq.tx.postgres.outbox import Queued
    from txmq.tx.postgres.resolver import Answer, Check, TokenResolver

AT_ONCE = 10_000  # undecided transactions looked at in one round, the oldest first
SECOND = 1_000_000
UPKEEP_US = 3_600 * SECOND  # as the broker does it itself

Config = Annotated[
    Path,
    typer.Option(metavar="FILE", help="Settings, as TOML: its [[resolver]] sections are used."),
]
Every = Annotated[
    float, typer.Option(min=0.05, metavar="SECONDS", help="The pause between two rounds.")
]


def add_to(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    remote(app, "resolver")(resolver)


def resolver(session: Session, *, config: Config, every: Every = 2.0) -> None:
    """Decide undecided transactions by their databases' token rows, until SIGTERM."""
    import structlog

    from txmq.cli import logs
    from txmq.config.broker import load_resolvers
    from txmq.tx.postgres.resolver import ResolverPolicy, TokenResolver

    chosen = load_resolvers(config)
    logs.configure(as_json=session.out.as_json)
    databases = {
        one.name: TokenResolver(
            one.dsn, policy=ResolverPolicy(end_stuck_after_s=one.end_backend_after_s)
        )
        for one in chosen.resolver
    }
    shown = session.client.call("broker.show")
    broker = Broker(UUID(shown["log_id"]), shown["name"])
    rounds = Rounds(
        session.client,
        broker,
        databases,
        int(chosen.checks.first_s * SECOND),
        structlog.get_logger(),
        partial(_hand_over, session.client),
    )
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    session.out.line({"ready": list(databases)}, f"ready {' '.join(databases)}")
    while not stop.wait(every):
        rounds.go(time.time_ns() // 1_000)


class Broker(NamedTuple):
    """Whose transactions these are."""

    log_id: UUID
    name: str


class Rounds:
    """Rounds of questions and answers. Transactions younger than `first_us` are left to
    their producers.

    Now and then the broker is reported to the databases, and their token tables are
    kept in order.
    """

    def __init__(
        self,
        client: Client,
        broker: Broker,
        databases: dict[str, TokenResolver],
        first_us: int,
        log: FilteringBoundLogger,
        hand_over: Callable[[Queued], None],
    ) -> None:
        self._hand_over = hand_over
        self._client, self._broker, self._databases = client, broker, databases
        self._first_us, self._log = first_us, log
        self._troubles: dict[str, set[str]] = {}
        self._upkeep_at = 0

    def go(self, now: int) -> None:
        """One round; a broker that cannot be reached now is asked again in the next
        one.
        """
        try:
            if now >= self._upkeep_at:
                self._look_after_tokens()
                self._upkeep_at = now + UPKEEP_US
            rows = self._client.call("tx.list", state="undecided", limit=AT_ONCE)["transactions"]
            self._publish()
            self._decide(
                [
                    row
                    for row in rows
                    if row["decider"][0] == "postgres" and row["stored_at"] + self._first_us <= now
                ]
            )
        except TxmqError as error:
            if not error.retriable:
                raise
            self._log.warning("resolver.interrupted", error=str(error))

    def _look_after_tokens(self) -> None:
        oldest = self._client.call("tx.oldest")["oldest"]
        for name, database in self._databases.items():
            report = database.maintain(*self._broker, None if oldest is None else UUID(oldest))
            if report is None:
                self._log.warning("resolver.no_upkeep", resolver=name, reason=database.trouble)
            elif any(report):
                self._log.info("resolver.upkeep", resolver=name, **report._asdict())

    def _publish(self) -> None:
        """What waits in the outboxes goes to the broker, in order; a row is deleted
        once the broker has it.
        """
        for name, database in self._databases.items():
            done: list[int] = []
            while rows := database.fetch(self._broker.log_id, done):
                done = [row.seq for row in takewhile(self._handed_over, rows)]
                self._log.info("outbox.published", resolver=name, transactions=len(done))
                if len(done) < len(rows):
                    database.fetch(self._broker.log_id, done)
                    break

    def _handed_over(self, row: Queued) -> bool:
        """Whether the broker has the row. If not, those after it have to wait: they may
        have its keys.
        """
        try:
            self._hand_over(row)
        except TxmqError as error:
            self._log.error("outbox.stuck", token=row.token.hex, reason=str(error))
            return False
        return True

    def _decide(self, rows: Sequence[dict[str, Any]]) -> None:
        """The databases in turn: what one does not know, the next one is asked."""
        for name, database in self._databases.items():
            answers = (
                database.resolve([_check(row, self._broker.log_id) for row in rows]) if rows else []
            )
            self._tell_troubles(
                name, {answer.reason for answer in answers if answer.verdict is UNKNOWN}
            )
            for row, answer in zip(rows, answers, strict=True):
                if answer.verdict is not UNKNOWN:
                    self._answer(name, row["token"], answer)
            rows = [
                row for row, answer in zip(rows, answers, strict=True) if answer.verdict is UNKNOWN
            ]

    def _answer(self, name: str, token: str, answer: Answer) -> None:
        try:
            reply = self._client.call("checks.answer", token=token, answer=answer.verdict.name)
        except (
            RequestRejected
        ) as error:  # decided otherwise meanwhile, which the broker has recorded
            self._log.error("resolver.refused", resolver=name, token=token, error=str(error))
        else:
            self._log.info(
                "resolver.decided",
                resolver=name,
                token=token,
                answer=answer.verdict.name,
                state=reply["state"],
            )

    def _tell_troubles(self, name: str, reasons: set[str]) -> None:
        """Each reason once, not in every round."""
        for reason in sorted(reasons - self._troubles.get(name, set())):
            self._log.warning("resolver.unknown", resolver=name, reason=reason)
        self._troubles[name] = reasons


def _hand_over(client: Client, row: Queued) -> None:
    from txmq.client.blocking.client import Client as Blocking
    from txmq.client.blocking.transaction.outbox_handover import hand_over

    assert isinstance(client, Blocking), "what txmq.cli.command.connect gives"
    hand_over(client.core, row)


def _check(row: dict[str, Any], log_id: UUID) -> Check:
    from txmq.tx.postgres.identity import ServerIdentity
    from txmq.tx.postgres.resolver import Check

    _kind, system_id, timeline, database_oid, xid = row["decider"]
    return Check(UUID(row["token"]), log_id, ServerIdentity(system_id, timeline, database_oid), xid)
