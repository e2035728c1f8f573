"""Partitions of the token table: made ahead, dropped when their rows are not needed.

    MINVALUE .. floor   txmq_token_closed    refuses every row: a token whose row was
                                             dropped must not be fenced
    floor .. last       one a day            named after its first day, in UTC
    everything else     txmq_token_default   moves into each day's partition once made

A token's row and the fence against it are routed by the token alone. They meet in one
unique index as long as a range is never in two partitions at once: each step below is
one transaction, and PostgreSQL checks the bounds again for a row that was on its way to
the default partition meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

from txmq.errors import DatabaseConflict
from txmq.model.units import SECOND
from txmq.tx.postgres.brokers import Broker, registered
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.session import Connection, transaction

DAY_MS: Final = 86_400_000
KEEP_MS: Final = DAY_MS  # the rows are evidence when log and tables are reconciled
FRESH_MS: Final = 3 * 3_600_000  # brokers report every hour: two of them may fail
APART_MS: Final = 3_600_000  # clocks of server and broker, before nothing is dropped
AHEAD: Final = 3  # days: what a weekend without maintenance takes

_PARTITIONS: Final = """
SELECT c.relname, pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits i JOIN pg_class c
    ON c.oid = i.inhrelid
WHERE i.inhparent = 'public.txmq_token'::regclass
"""
# The holder of the default partition's lock is the only one to change the others. A
# drop locks the whole table for a moment: better postponed than before producers.
_ALONE: Final = """
SET LOCAL lock_timeout = '200ms';
LOCK TABLE public.txmq_token_default IN ACCESS EXCLUSIVE MODE
"""
_CREATE: Final = """
CREATE TABLE public.{name} (LIKE public.txmq_token INCLUDING DEFAULTS INCLUDING CONSTRAINTS);
WITH moved AS (DELETE FROM public.txmq_token_default WHERE tok >= {lower} AND tok < {upper}
    RETURNING *)
INSERT INTO public.{name} SELECT * FROM moved;
ALTER TABLE public.txmq_token ATTACH PARTITION public.{name} FOR VALUES FROM ({lower}) TO ({upper})
"""
_DROP: Final = """
DROP TABLE public.{name}, public.txmq_token_closed;
CREATE TABLE public.txmq_token_closed PARTITION OF public.txmq_token
    (CONSTRAINT txmq_token_too_old CHECK (false))
FOR VALUES FROM (MINVALUE) TO ({floor})
"""
_REOPEN: Final = """
DROP TABLE public.txmq_token_closed;
CREATE TABLE public.txmq_token_closed PARTITION OF public.txmq_token
    (CONSTRAINT txmq_token_too_old CHECK (false))
FOR VALUES FROM (MINVALUE) TO ({floor})
"""
_UNREGISTERED_LOGS: Final = (
    "SELECT DISTINCT log_id::text FROM public.{name} WHERE log_id <> ALL (%s::uuid[])"
)


class Partition(NamedTuple):
    """A range of tokens, `upper` excluded; `lower` None = no lower bound."""

    name: str
    lower: UUID | None
    upper: UUID


class CallerTime(NamedTuple):
    """The caller's time, and one that is certainly past (ms)."""

    now_ms: int
    certain_ms: int


class MaintenanceReport(NamedTuple):
    """Names of partitions: made, dropped, and postponed with the reason."""

    created: list[str]
    dropped: list[str]
    put_off: dict[str, str]


def bound(time_ms: int) -> UUID:
    """Return a token below every one made at `time_ms` or later, above every earlier
    one.
    """
    return UUID(int=time_ms << 80)


def maintain(
    connection: Connection,
    *,
    keep_ms: int = KEEP_MS,
    fresh_ms: int = FRESH_MS,
    ahead: int = AHEAD,
    now_ms: int | None = None,
    caller: CallerTime | None = None,
) -> MaintenanceReport:
    """Make the partitions of the days to come, and drop old ones that no broker needs.

    Neither clock is believed alone: days are made by the earlier of the server's time
    and the caller's, and nothing is dropped while the two are far apart. A range that a
    wrong clock has closed is opened again from now on, once both agree.

    Call it every hour or so. A partition is dropped when every registered broker has
    reported, within the last `fresh_ms`, that its oldest undecided token is younger
    than the partition. A partition with rows of a log that never reported stays.
    `now_ms` is the server's time unless given. Raises DatabaseError; a lock that others
    hold only postpones a partition.
    """
    report = MaintenanceReport([], [], {})
    with translated("maintaining the token table"):
        now_ms = now_ms or _server_time(connection)
        caller = caller or CallerTime(now_ms, now_ms)
        earlier, apart_ms = min(now_ms, caller.now_ms), abs(now_ms - caller.now_ms)
        if apart_ms <= APART_MS:
            _open_future(connection, earlier, report)
        today = earlier - earlier % DAY_MS
        for start in range(today - DAY_MS, today + (ahead + 1) * DAY_MS, DAY_MS):
            _create_if_free(connection, start, report)
        brokers = registered(connection)
        fresh = range((now_ms - fresh_ms) * 1_000, (now_ms + APART_MS) * 1_000)
        for old in _outlived(connection, bound(min(now_ms, caller.certain_ms) - keep_ms)):
            if apart_ms > APART_MS:
                apart = timedelta(milliseconds=apart_ms)
                report.put_off[old.name] = f"the clocks of server and broker are {apart} apart"
                break
            if not _drop(
                connection,
                old,
                _reason_to_keep(connection, old, brokers, fresh),
                report,
            ):
                break  # what is closed stays one range
    return report


def _open_future(connection: Connection, now_ms: int, report: MaintenanceReport) -> None:
    """Open what is closed of the future, by a wrong clock that had been believed.

    All until now stays closed, because rows of it may have been dropped: a token of a
    committed transaction would be fenced. Tokens that are made from now on are new.
    """
    first, *_rest = partitions(connection)
    if first.lower is not None or first.upper <= bound(now_ms):
        return
    try:
        with translated("opening the token table"), transaction(connection) as cursor:
            cursor.execute(_ALONE)
            cursor.execute(_REOPEN.format(floor=_literal(bound(now_ms))))
        if name := create(connection, now_ms, now_ms - now_ms % DAY_MS + DAY_MS):
            report.created.append(name)
    except DatabaseConflict as busy:
        report.put_off[first.name] = busy.message


def create(connection: Connection, lower_ms: int, upper_ms: int) -> str | None:
    """Make the partition for tokens of this span and move waiting rows into it.

    Returns its name, None where part of the span has a partition already. Raises
    DatabaseConflict where others hold a lock for long.
    """
    lower, upper, name = bound(lower_ms), bound(upper_ms), _name(lower_ms)
    statement = _CREATE.format(name=_identifier(name), lower=_literal(lower), upper=_literal(upper))
    if not _free(connection, lower, upper):
        return None
    with translated("making a partition"), transaction(connection) as cursor:
        cursor.execute(_ALONE)
        if not _free(connection, lower, upper):
            return None  # another session was faster
        cursor.execute(statement)
    return name


def partitions(connection: Connection) -> list[Partition]:
    """Return all but the default partition in order, the closed one first."""
    with connection.cursor() as cursor:
        cursor.execute(_PARTITIONS)
        found = [_parse(name, bounds) for name, bounds in cursor.fetchall() if bounds != "DEFAULT"]
    return sorted(found, key=lambda partition: partition.upper)


def _free(connection: Connection, lower: UUID, upper: UUID) -> bool:
    known = partitions(connection)
    return not any(
        lower < other.upper and (other.lower is None or other.lower < upper) for other in known
    )


def _create_if_free(connection: Connection, start_ms: int, report: MaintenanceReport) -> None:
    try:
        if name := create(connection, start_ms, start_ms + DAY_MS):
            report.created.append(name)
    except DatabaseConflict as busy:
        report.put_off[_name(start_ms)] = busy.message


def _name(start_ms: int) -> str:
    return f"txmq_token_{datetime.fromtimestamp(start_ms / 1000, UTC):%Y%m%d_%H%M%S}"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(token: UUID) -> str:
    return f"'{token}'"


def _parse(name: str, bounds: str) -> Partition:
    *lower, upper = [UUID(text) for text in re.findall(r"'([0-9a-f-]{36})'", bounds)]
    return Partition(name, lower[0] if lower else None, upper)


def _outlived(connection: Connection, horizon: UUID) -> Iterator[Partition]:
    return (old for old in partitions(connection) if old.lower is not None and old.upper <= horizon)


def _drop(connection: Connection, old: Partition, reason: str, report: MaintenanceReport) -> bool:
    """Drop the partition unless a reason against it exists, or comes up."""
    if not reason:
        try:
            with translated("dropping a partition"), transaction(connection) as cursor:
                cursor.execute(_ALONE)
                cursor.execute(_DROP.format(name=_identifier(old.name), floor=_literal(old.upper)))
        except DatabaseConflict as busy:
            reason = busy.message
    if reason:
        report.put_off[old.name] = reason
    else:
        report.dropped.append(old.name)
    return not reason


def _reason_to_keep(
    connection: Connection, old: Partition, brokers: Sequence[Broker], fresh: range
) -> str:
    """Return why the rows of `old` may still be asked for; "" if they cannot be."""
    for broker in brokers:
        if broker.forgotten_at is None and (
            reason := _broker_reason_to_keep(broker, old.upper, fresh)
        ):
            return reason
    with connection.cursor() as cursor:
        cursor.execute(
            _UNREGISTERED_LOGS.format(name=_identifier(old.name)),
            ([str(broker.log_id) for broker in brokers],),
        )
        silent = [log_id for (log_id,) in cursor.fetchall()]
    return f"no report of log {', '.join(silent)}" if silent else ""


def _broker_reason_to_keep(broker: Broker, upper: UUID, fresh: range) -> str:
    name, token = f"broker {broker.name}, log {broker.log_id},", broker.oldest_undecided
    if broker.reported_at >= fresh.stop:
        return f"{name} has reported at a time to come: the server's clock was ahead"
    if broker.reported_at < fresh.start:
        since = datetime.fromtimestamp(broker.reported_at / SECOND, UTC)
        advice = "start it, or forget it (txmq schema brokers)"
        return f"{name} has not reported since {since:%Y-%m-%d %H:%M}: {advice}"
    return (
        f"{name} has the undecided transaction {token}"
        if token is not None and token < upper
        else ""
    )


def _server_time(connection: Connection) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT (extract(epoch FROM now()) * 1000)::int8")
        row = cursor.fetchone()
    return int(row[0]) if row else 0
