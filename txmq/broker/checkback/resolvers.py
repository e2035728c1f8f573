"""Resolvers as the rest of the broker sees them: questions, answers and health."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from txmq.model.decider import ByPostgres

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from txmq.core.transactions.model import Transaction
    from txmq.model.decider import DatabaseId
    from txmq.model.message import Decision
    from txmq.tx.postgres.outbox import OutboxRow, PublishedRow, SetAside


class ResolverStatus(NamedTuple):
    """The health of a resolver. Times are microseconds since the epoch; 0 = never, or
    no failure.
    """

    name: str
    seen_at: int  # the last answer of its database
    failing_since: int
    trouble: str  # why it is failing
    cleanup_failing_since: int  # of the token table
    cleanup_error: str
    outbox_stuck_since: int = 0  # the next row cannot be published
    outbox_error: str = ""
    time: int = 0  # now, by the database's clock; 0 = it has not been read lately
    busy_since: int = 0  # the call under way
    blocked_since: int = 0  # other sessions hold locks in front of it
    blocked: str = ""
    refusal: str = ""  # why this broker may not work on the database


class LeaseStatus(NamedTuple):
    """The lease that this broker may have of a database."""

    held: bool
    directory: UUID | None  # the data directory; None = this broker asks for no lease


# is called with a function that tells whether the database decides a transaction
DatabaseBack = Callable[[Callable[[ByPostgres], bool]], object]


class PublishRows(Protocol):
    """Publishes rows in their order. One that is refused is set aside, and those of its
    keys wait. `over` gets the published rows once they are durable, and the error that
    has stopped the work.
    """

    def __call__(
        self,
        rows: Sequence[OutboxRow],
        by: str,
        aside: SetAside,
        over: Callable[[list[PublishedRow], str], None],
    ) -> None: ...


class Resolvers(Protocol):
    """The resolvers that the broker can ask for the decision of a database."""

    def may_resolve(self, decider: ByPostgres) -> bool: ...

    def left_behind(self, decider: ByPostgres) -> str: ...

    def resolve(
        self, token: bytes, row: Transaction, answered: Callable[[bytes, Decision, str, str], None]
    ) -> None: ...

    def status(self) -> Sequence[ResolverStatus]: ...

    def lease_of(self, database: DatabaseId) -> LeaseStatus: ...

    def note_bundle(self, database: DatabaseId | ByPostgres) -> None: ...

    def reports(self) -> Mapping[DatabaseId, int]: ...
