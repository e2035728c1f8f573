"""Rounds of `txmq resolver`: check-backs by token rows, outboxes, and upkeep.

Several resolvers may run at once, beside the one in the broker: the token row decides,
whichever process reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from txmq.errors import RequestRejected, TxmqError
from txmq.model.message import UNKNOWN
from txmq.model.units import HOUR, MILLISECOND

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from txmq.cli.command import CommandClient
    from txmq.tx.postgres.brokers import DatabaseLease
    from txmq.tx.postgres.identity import ServerIdentity
    from txmq.tx.postgres.outbox import OutboxRow, PublishedRow, SetAside
    from txmq.tx.postgres.resolver import Answer, Check, TokenResolver

PAGE = 5_000  # undecided transactions that one call looks through
MAINTENANCE_US = HOUR  # the interval of the broker's own resolver


class ResolvedBroker(NamedTuple):
    """The broker whose transactions are resolved."""

    log_id: UUID
    name: str


class ResolverRounds:
    """Rounds of reading undecided transactions and deciding them.

    Transactions younger than `first_us` are left to their producers. Once an hour the
    databases learn the oldest undecided token of the broker, and their token tables are
    maintained.
    """

    def __init__(
        self,
        client: CommandClient,
        broker: ResolvedBroker,
        databases: dict[str, TokenResolver],
        first_us: int,
        log: FilteringBoundLogger,
        publish_row: Callable[[OutboxRow], None],
    ) -> None:
        self._publish_row = publish_row
        self._client, self._broker, self._databases = client, broker, databases
        self._first_us, self._log = first_us, log
        self._troubles: dict[str, set[str]] = {}
        self._maintenance_at = 0

    def run_round(self, now: int) -> None:
        """Run one round. If the broker is unreachable, the next round tries again."""
        try:
            refused = any(database.refusal for database in self._databases.values())
            if refused or now >= self._maintenance_at:
                self._maintain_tokens()
                self._maintenance_at = now + MAINTENANCE_US
            self._publish_outboxes()
            for page in self._pages():
                self._decide([row for row in page if row["stored_at"] + self._first_us <= now])
        except TxmqError as error:
            if not error.retriable:
                raise
            self._log.warning("resolver.interrupted", error=str(error))

    def _pages(self) -> Iterator[list[dict[str, Any]]]:
        """Yield what databases are to decide, the oldest first; others stand between
        them.
        """
        after: int | None = 0
        while after is not None:
            reply = self._client.call("tx.pending", after=after, limit=PAGE)
            yield reply["transactions"]
            after = reply["next"]

    def _maintain_tokens(self) -> None:
        from txmq.tx.postgres.partitions import CallerTime

        reply = self._client.call("tx.oldest")
        tokens = {
            (system_id, database_oid): UUID(token)
            for system_id, database_oid, token in reply["databases"]
        }
        times = CallerTime(reply["now"] // MILLISECOND, reply["certain"] // MILLISECOND)

        def oldest(found: ServerIdentity) -> UUID | None:
            return tokens.get((found.system_id, found.database_oid))

        for name, database in self._databases.items():
            if database.refusal:  # the broker may have started anew meanwhile
                database.lease = broker_lease(self._client, self._broker)
            report = database.maintain(*self._broker, oldest, times)
            if report is None:
                self._log.warning("resolver.no_upkeep", resolver=name, reason=database.trouble)
            elif any(report):
                self._log.info("resolver.upkeep", resolver=name, **report._asdict())

    def _publish_outboxes(self) -> None:
        """Publish the rows of the outboxes, in order; delete a row once the broker has
        it.
        """
        from txmq.tx.postgres.outbox import SetAside

        for name, database in self._databases.items():
            done: list[PublishedRow] = []
            aside = SetAside()
            while rows := database.fetch(self._broker.log_id, done, aside):
                if aside.full:
                    break
                done = self._publish_rows(rows, aside)
                self._log.info("outbox.published", resolver=name, transactions=len(done))

    def _publish_rows(self, rows: Sequence[OutboxRow], aside: SetAside) -> list[PublishedRow]:
        """Publish rows, and return those that the broker has. A refused row is set
        aside, and those of its keys wait. Raises what would stop others, too.
        """
        done: list[PublishedRow] = []
        for row in rows:
            if aside.holds(row):
                continue
            try:
                self._publish_row(row)
            except TxmqError as error:
                self._log.error("outbox.stuck", token=row.token.hex, reason=str(error))
                if error.retriable:
                    raise
                aside.add(row, str(error))
            else:
                done.append(row.published)
        return done

    def _decide(self, rows: Sequence[dict[str, Any]]) -> None:
        """Ask the databases in turn; the next one gets what is still unknown."""
        for name, database in self._databases.items():
            answers = (
                database.resolve([_check(row, self._broker.log_id) for row in rows]) if rows else []
            )
            self._log_troubles(
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
        except RequestRejected as error:  # decided otherwise by now; the broker recorded it
            self._log.error("resolver.refused", resolver=name, token=token, error=str(error))
        else:
            self._log.info(
                "resolver.decided",
                resolver=name,
                token=token,
                answer=answer.verdict.name,
                state=reply["state"],
            )

    def _log_troubles(self, name: str, reasons: set[str]) -> None:
        """Log each reason once, not in every round."""
        for reason in sorted(reasons - self._troubles.get(name, set())):
            self._log.warning("resolver.unknown", resolver=name, reason=reason)
        self._troubles[name] = reasons


def broker_lease(client: CommandClient, broker: ResolvedBroker) -> DatabaseLease | None:
    """Return the lease of the broker, which this process uses as well."""
    from txmq.tx.postgres.brokers import DatabaseLease

    claim = client.call("tx.lease")
    if claim["directory"] is None:
        return None
    return DatabaseLease(broker.log_id, UUID(claim["directory"]), claim["boot_epoch"])


def _check(row: dict[str, Any], log_id: UUID) -> Check:
    from txmq.model.decider import ByPostgres
    from txmq.tx.postgres.identity import ServerIdentity
    from txmq.tx.postgres.resolver import Check

    decider = ByPostgres._make(row["decider"])
    server = ServerIdentity(decider.system_id, decider.timeline, decider.database_oid)
    return Check(UUID(row["token"]), log_id, server, decider.xid, decider.position)
