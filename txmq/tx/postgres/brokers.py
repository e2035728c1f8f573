"""Brokers that use a business database, with their last reports.

A token row may be dropped once no broker can ask for it any more. Only the brokers know
that: each writes here, every so often, the token of its oldest undecided transaction.
Silence proves nothing. A broker that stops reporting keeps its rows until it is back,
or until an operator removes it.

The row is also the broker's lease of the database. A copy or a restored backup of its
data directory has the same log, and would decide transactions and delete rows of the
outbox that it never published. So the row names the directory and the boot epoch that
may work here. A restart of the same directory takes the lease with it. Another
directory, or an earlier boot epoch, needs an operator's word (`take_over`). No clock
plays a part.

Reports are counted, here and in the data directory. A database with fewer of them than
the directory knows is a copy. One with more has those of another copy of the directory,
which may have the same id: the clone of a volume, or a backup that was restored in its
place.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from uuid import UUID

from txmq.errors import DatabaseError, LeaseRefused
from txmq.tx.postgres.errors import NO_OBJECT, translated
from txmq.tx.postgres.session import Connection, Notices, plain_cursor

_REPORT: Final = """
INSERT INTO public.txmq_broker AS known (log_id, name, oldest_undecided, reported_at)
VALUES (%s::uuid, %s, %s::uuid, clock_timestamp())
ON CONFLICT (log_id) DO UPDATE SET name = EXCLUDED.name,
    oldest_undecided = EXCLUDED.oldest_undecided,
    reported_at = EXCLUDED.reported_at, forgotten_at = NULL, forgotten_reason = NULL
"""
# The report must survive a crash: a database that does not hold it is taken for a copy.
_LEASED_REPORT: Final = """
SET LOCAL synchronous_commit = on;
INSERT INTO public.txmq_broker AS known
    (log_id, name, oldest_undecided, reported_at, boot_epoch, directory, reports,
    directory_reports)
SELECT %(log_id)s::uuid, %(name)s, %(oldest)s::uuid, clock_timestamp(), %(boot_epoch)s,
    %(directory)s::uuid, 1, %(remembered)s
WHERE %(seen)s = 0 OR EXISTS (SELECT FROM public.txmq_broker WHERE log_id = %(log_id)s::uuid)
ON CONFLICT (log_id) DO UPDATE SET name = EXCLUDED.name,
    oldest_undecided = EXCLUDED.oldest_undecided,
    reported_at = EXCLUDED.reported_at, forgotten_at = NULL, forgotten_reason = NULL,
    boot_epoch = EXCLUDED.boot_epoch, directory = EXCLUDED.directory,
    reports = known.reports + 1, directory_reports = known.directory_reports + %(remembered)s
WHERE coalesce(known.directory, EXCLUDED.directory) = EXCLUDED.directory
    AND coalesce(known.boot_epoch, 0) <= EXCLUDED.boot_epoch
    AND (known.reports >= %(seen)s AND known.directory_reports <= %(most)s
        OR known.directory IS NOT NULL AND known.boot_epoch IS NULL)
RETURNING reports, directory_reports
"""
_CONFIRM: Final = """
SET LOCAL synchronous_commit = on;
UPDATE public.txmq_broker SET reports = reports + 1,
    directory_reports = directory_reports + %(remembered)s
WHERE log_id = %(log_id)s::uuid AND directory = %(directory)s::uuid
    AND boot_epoch = %(boot_epoch)s AND reports >= %(seen)s AND directory_reports <= %(most)s
RETURNING reports, directory_reports
"""
_LEASE: Final = """
SELECT boot_epoch, directory::text, reports, directory_reports
FROM public.txmq_broker WHERE log_id = %s::uuid
"""
_TAKE_OVER: Final = """
INSERT INTO public.txmq_broker (log_id, name, reported_at, forgotten_at, directory, lease_reason)
VALUES (%s::uuid, '', now(), now(), %s::uuid, %s)
ON CONFLICT (log_id) DO UPDATE SET directory = EXCLUDED.directory, boot_epoch = NULL,
    lease_reason = EXCLUDED.lease_reason
"""
# `xmin` is the end of a transaction id, which is the newest one that ends so.
_LAST_REPORT: Final = """
SELECT reports, next - (next - xmin::text::int8 & 4294967295)
FROM (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8 AS next) now, public.txmq_broker
WHERE log_id = %s::uuid
"""
UNBOUNDED: Final = 2**63 - 1
_MICROS: Final = "(extract(epoch FROM {}) * 1000000)::int8"
_REGISTERED: Final = f"""
SELECT log_id::text, name, oldest_undecided::text, {_MICROS.format("reported_at")},
    {_MICROS.format("forgotten_at")},
       forgotten_reason, (SELECT count(*) FROM public.txmq_outbox o WHERE o.log_id = b.log_id),
       boot_epoch, directory::text, lease_reason
FROM public.txmq_broker b ORDER BY name, log_id
"""  # noqa: S608  # constants
_FORGET: Final = """
UPDATE public.txmq_broker SET forgotten_at = now(), forgotten_reason = %s
WHERE log_id = %s::uuid
"""


class Broker(NamedTuple):
    """The last report of a broker; times are microseconds by the database's clock.

    `oldest_undecided` is a token, None where everything is decided. `waiting` is the
    number of its rows in the outbox. The data directory `directory` holds the lease
    since `boot_epoch`; None = since an operator gave it the lease, for `lease_reason`.
    """

    log_id: UUID
    name: str
    oldest_undecided: UUID | None
    reported_at: int
    forgotten_at: int | None
    forgotten_reason: str | None
    waiting: int
    boot_epoch: int | None
    directory: str | None
    lease_reason: str | None


class DatabaseLease(NamedTuple):
    """The claim of a running broker: its log, the data directory and its boot epoch."""

    log_id: UUID
    directory: UUID
    boot_epoch: int


class KnownReports(NamedTuple):
    """A broker's reports to a database, as far as they are known: the number of the
    last one that is stored, and at most how many of its directory may be. A process
    without a directory, such as `txmq resolver`, knows no such bound.
    """

    stored: int = 0
    most: int = UNBOUNDED
    remembered: bool = False  # in a data directory

    def reported(self, stored: int, of_directory: int) -> KnownReports:
        """Return what is known after a report, by the numbers that are stored then."""
        most = of_directory if self.remembered else UNBOUNDED
        return self._replace(stored=stored, most=most)

    def begun(self) -> KnownReports:
        """Return what is known while a report is on its way, or may be lost again: it
        is stored or not.
        """
        return self if self.most == UNBOUNDED else self._replace(most=self.most + 1)


UNKNOWN: Final = KnownReports()


class LastReport(NamedTuple):
    """The last report of a broker that a database holds, and the id of the transaction
    that stored it. Those with smaller ids are in each later state of the database.
    """

    number: int = 0
    xid: int = 0


class _Held(NamedTuple):
    boot_epoch: int | None
    directory: UUID | None
    reports: int
    directory_reports: int


def report_with_lease(
    connection: Connection,
    lease: DatabaseLease,
    name: str,
    oldest_undecided: UUID | None,
    known: KnownReports = UNKNOWN,
) -> KnownReports:
    """Store the report of a broker, and take or keep its lease of the database.

    Returns what is known then; nothing new where a failover might undo the report, as
    no standby has confirmed it. Raises LeaseRefused, DatabaseError.
    """
    oldest = None if oldest_undecided is None else str(oldest_undecided)
    with translated("reporting a broker"):
        reported = _count_report(connection, _LEASED_REPORT, lease, known, name=name, oldest=oldest)
    if reported is None:
        raise _refusal(lease, _read_lease(connection, lease.log_id), known)
    return reported


def holds(connection: Connection, lease: DatabaseLease, known: KnownReports) -> bool:
    """Return whether the database holds this lease, and such reports. Raises
    DatabaseError.
    """
    held = _read_lease(connection, lease.log_id)
    return (
        held is not None
        and (held.boot_epoch, held.directory) == (lease.boot_epoch, lease.directory)
        and held.reports >= known.stored
        and held.directory_reports <= known.most
    )


def lacks_reports(connection: Connection, lease: DatabaseLease, known: KnownReports) -> bool:
    """Return whether the database holds reports of the directory beyond those that are
    known, so that another one would be refused. Raises DatabaseError.
    """
    held = _read_lease(connection, lease.log_id)
    return held is not None and held.boot_epoch is not None and held.directory_reports > known.most


def last_report(connection: Connection, log_id: UUID) -> LastReport | None:
    """Return the last report of a log's broker; None = the database has no tables of
    txmq. Raises DatabaseError.
    """
    try:
        with translated("reading a broker's reports"), plain_cursor(connection) as cursor:
            cursor.execute(_LAST_REPORT, (str(log_id),))
            row = cursor.fetchone()
    except DatabaseError as error:
        if error.sqlstate in NO_OBJECT:
            return None
        raise
    return LastReport() if row is None else LastReport(*row)


def _read_lease(connection: Connection, log_id: UUID) -> _Held | None:
    with translated("reading a broker's lease"), plain_cursor(connection) as cursor:
        cursor.execute(_LEASE, (str(log_id),))
        row = cursor.fetchone()
    if row is None:
        return None
    boot_epoch, directory, *reports = row
    return _Held(boot_epoch, None if directory is None else UUID(directory), *reports)


def _refusal(lease: DatabaseLease, held: _Held | None, known: KnownReports) -> LeaseRefused:
    take_over = (
        f"txmq schema brokers DSN --take-over {lease.log_id} --directory {lease.directory} "
        "--reason TEXT"
    )
    if held is None or (held.directory in (None, lease.directory) and held.reports < known.stored):
        return LeaseRefused(
            f"the database holds {held.reports if held else 0} reports of this broker, which has "
            f"written {known.stored}",
            hint="it is a copy: point the resolver at the original; where a failover or a restore "
            f"has lost commits: {take_over}; txmq tx lost DSN names those whose messages are out, "
            "and txmq xa verify, before that, branches of XA",
        )
    take_over = f"stop one of the two; where this one is to go on: {take_over}"
    if held.directory != lease.directory:
        return LeaseRefused(
            f"data directory {held.directory} works on this database for log {lease.log_id}, since "
            f"boot epoch {held.boot_epoch}; this broker's is {lease.directory}, a copy or a "
            "restored backup",
            hint=take_over,
        )
    if held.directory_reports > known.most:
        return LeaseRefused(
            f"the database holds {held.directory_reports} reports of this broker, which has "
            f"written {known.most}: its data directory was restored, or a clone of it runs",
            hint=take_over,
        )
    return LeaseRefused(
        f"the broker is in boot epoch {lease.boot_epoch}, and was in {held.boot_epoch} when it "
        "reported last: its data directory was restored, or runs twice",
        hint=take_over,
    )


def confirm(
    connection: Connection, lease: DatabaseLease, known: KnownReports
) -> KnownReports | None:
    """Count another report, so that a copy that was made before lacks it.

    Returns what is known then, None where the database does not hold the lease. Raises
    DatabaseError.
    """
    with translated("confirming a broker's lease"):
        return _count_report(connection, _CONFIRM, lease, known)


def _count_report(
    connection: Connection,
    statement: str,
    lease: DatabaseLease,
    known: KnownReports,
    **values: str | None,
) -> KnownReports | None:
    """Carry out a statement that counts a report. Return what is known then, None where
    the database does not hold the lease, or other reports.
    """
    counted = {
        "log_id": str(lease.log_id),
        "directory": str(lease.directory),
        "boot_epoch": lease.boot_epoch,
        "seen": known.stored,
        "most": known.most,
        "remembered": int(known.remembered),
    }
    with plain_cursor(connection) as cursor:
        with Notices(connection) as notices:
            cursor.execute(statement, counted | values)
        row = cursor.fetchone()
    if row is None:
        return None
    return known.begun() if notices else known.reported(*row)


def take_over(connection: Connection, log_id: UUID, directory: UUID, reason: str) -> None:
    """Give the lease of a log's broker to the data directory `directory`, whatever it
    has reported before. Raises DatabaseError.
    """
    with translated("giving a broker's lease"), plain_cursor(connection) as cursor:
        cursor.execute(_TAKE_OVER, (str(log_id), str(directory), reason))


def report(connection: Connection, log_id: UUID, name: str, oldest_undecided: UUID | None) -> None:
    """Store the report of a broker; a forgotten broker is registered again. Raises
    DatabaseError.
    """
    oldest = None if oldest_undecided is None else str(oldest_undecided)
    with translated("reporting a broker"), plain_cursor(connection) as cursor:
        cursor.execute(_REPORT, (str(log_id), name, oldest))


def registered(connection: Connection) -> list[Broker]:
    """Return all brokers that have ever reported, forgotten ones too. Raises
    DatabaseError.
    """
    with translated("listing brokers"), plain_cursor(connection) as cursor:
        cursor.execute(_REGISTERED)
        rows = cursor.fetchall()
    return [
        Broker(UUID(log), name, None if old is None else UUID(old), *rest)
        for log, name, old, *rest in rows
    ]


def forget(connection: Connection, log_id: UUID, reason: str) -> bool:
    """Remove a lost broker, so that it keeps no rows; False where there is none.

    Raises DatabaseError.
    """
    with translated("forgetting a broker"), plain_cursor(connection) as cursor:
        cursor.execute(_FORGET, (reason, str(log_id)))
        return bool(cursor.rowcount)
