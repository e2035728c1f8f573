"""Deciders and participants of transactions.

A decider says who decides a transaction, a participant is one of its branches. Both
are tuples of a kind and its fields, which stand so on the wire, in the log and in table
rows (docs/FORMATS.md 2.1, 4.2). Code matches their classes and never indexes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class KindTuple(tuple[object, ...]):
    """A tuple whose first element is the constant kind of its class."""

    __slots__ = ()

    def __getnewargs__(self) -> tuple[object, ...]:
        """Return the arguments that pickle and copy pass to `__new__`."""
        return self[1:]


class _Postgres(NamedTuple):
    kind: str
    system_id: int
    timeline: int
    database_oid: int
    xid: int | None
    position: int


class DatabaseId(NamedTuple):
    """A PostgreSQL database, whichever server of its cluster is the primary."""

    system_id: int
    database_oid: int


class ByPostgres(KindTuple, _Postgres):
    """Decided by the token's row in a PostgreSQL database.

    `xid` is the database transaction that writes the row, if it is known. `position` is
    one that the server's write-ahead log had reached on `timeline` before.
    """

    __slots__ = ()

    def __new__(
        cls, system_id: int, timeline: int, database_oid: int, xid: int | None, position: int
    ) -> Self:
        return super().__new__(cls, "postgres", system_id, timeline, database_oid, xid, position)

    @property
    def database(self) -> DatabaseId:
        """The database that has the token's row."""
        return DatabaseId(self.system_id, self.database_oid)


class _Checker(NamedTuple):
    kind: str
    checker: str


class ByChecker(KindTuple, _Checker):
    """Decided by the checker of this name, which answers check-backs."""

    __slots__ = ()

    def __new__(cls, checker: str) -> Self:
        return super().__new__(cls, "checker", checker)


class _Broker(NamedTuple):
    kind: str


class ByBroker(KindTuple, _Broker):
    """Decided by the storing broker together with the seal: a local transaction."""

    __slots__ = ()

    def __new__(cls) -> Self:
        return super().__new__(cls, "local")


class _Job(NamedTuple):
    kind: str
    job: bytes


class ByJob(KindTuple, _Job):
    """Decided by the one decision of a job, whose token is `job`."""

    __slots__ = ()

    def __new__(cls, job: bytes) -> Self:
        return super().__new__(cls, "job", job)


class _Home(NamedTuple):
    kind: str
    log_id: bytes
    token: bytes


class ByHome(KindTuple, _Home):
    """Decided by the home broker of an XA transaction: the broker with log `log_id`."""

    __slots__ = ()

    def __new__(cls, log_id: bytes, token: bytes) -> Self:
        return super().__new__(cls, "home", log_id, token)


class _Foreign(NamedTuple):
    kind: str
    format: int
    gtrid: bytes
    bqual: bytes


class ByForeign(KindTuple, _Foreign):
    """Decided by a foreign XA transaction manager, under this Xid."""

    __slots__ = ()

    def __new__(cls, format: int, gtrid: bytes, bqual: bytes) -> Self:  # noqa: A002  # XA's word
        return super().__new__(cls, "foreign", format, gtrid, bqual)


Decider = ByPostgres | ByChecker | ByBroker | ByJob | ByHome | ByForeign
DECIDER_TYPES: Final = (ByPostgres, ByChecker, ByBroker, ByJob, ByHome, ByForeign)
DECIDERS: Final[dict[object, type[Decider]]] = {
    "postgres": ByPostgres,
    "checker": ByChecker,
    "local": ByBroker,
    "job": ByJob,
    "home": ByHome,
    "foreign": ByForeign,
}

# Their bundles take order tickets when they are stored, not when they are decided: the
# row lock of a business database can order two transactions before either is decided
# here. What a home broker decides reaches other brokers in any order.
ORDERED_WHEN_STORED: Final = (ByPostgres, ByChecker, ByHome)
# Their large bundles hold keys from the first part on. A local transaction is committed
# with its seal, and nothing that is sent later may overtake it.
HOLDING_PART_BY_PART: Final = (*ORDERED_WHEN_STORED, ByBroker)
BY_XA_MANAGER: Final = (ByHome, ByForeign)
COMMITTED_WHEN_STORED: Final = (ByBroker, ByForeign)  # may be: one-phase commit


def read_decider(row: tuple[object, ...]) -> Decider:
    """Return the decider that a log record or a table row holds."""
    return DECIDERS[row[0]]._make(row)


class _PostgresBranch(NamedTuple):
    kind: str
    system_id: int
    database_oid: int
    database: str
    owner: str
    gid: str
    xid: int | None
    timeline: int
    position: int


class BranchPosition(NamedTuple):
    """A position in the write-ahead log: behind the work of a branch, before its
    PREPARE.
    """

    timeline: int
    position: int


class PostgresBranch(KindTuple, _PostgresBranch):
    """A prepared transaction `gid` in a PostgreSQL database."""

    __slots__ = ()

    def __new__(
        cls,
        system_id: int,
        database_oid: int,
        database: str,
        owner: str,
        gid: str,
        xid: int | None,
        timeline: int,
        position: int,
    ) -> Self:
        return super().__new__(
            cls,
            "postgres",
            system_id,
            database_oid,
            database,
            owner,
            gid,
            xid,
            timeline,
            position,
        )

    @property
    def at(self) -> BranchPosition:
        """The position before PREPARE."""
        return BranchPosition(self.timeline, self.position)


class _BrokerBranch(NamedTuple):
    kind: str
    log_id: bytes


class BrokerBranch(KindTuple, _BrokerBranch):
    """A bundle under the same token at the broker with log `log_id`."""

    __slots__ = ()

    def __new__(cls, log_id: bytes) -> Self:
        return super().__new__(cls, "broker", log_id)


Participant = PostgresBranch | BrokerBranch
PARTICIPANTS: Final[dict[object, type[Participant]]] = {
    "postgres": PostgresBranch,
    "broker": BrokerBranch,
}


def postgres_branches(participants: Iterable[Iterable[Any]]) -> Iterator[PostgresBranch]:
    """Yield the database branches among participants in rows or in JSON."""
    for kind, *fields in participants:
        if kind == "postgres":
            yield PostgresBranch._make((kind, *fields))


def decided_by(fields: Sequence[Any]) -> str:
    """Return in words who decides, for the fields of a decider in JSON."""
    kind, *rest = fields or ("",)
    words = {"local": "this broker", "foreign": "another XA transaction manager"}
    match kind:
        case "postgres":
            by = "" if rest[3] is None else f", its transaction {rest[3]}"
            return f"PostgreSQL, database {rest[2]}{by}"
        case "checker" | "job":
            return f"{kind} {rest[0]}"
        case "home":
            return f"its home broker, with log {rest[0]}"
    return words.get(kind, kind)


def branch_in_words(fields: Sequence[Any]) -> str:
    """Return a participant in words, for its fields in JSON."""
    match fields:
        case ["postgres", _system, _oid, database, owner, gid, *_position]:
            return f"{gid} in PostgreSQL database {database}, prepared by {owner}"
        case ["broker", log_id]:
            return f"broker with log {log_id}"
    return " ".join(map(str, fields))
