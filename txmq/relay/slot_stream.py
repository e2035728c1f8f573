"""The committed transactions of a replication slot, in the order of their commits.

psycopg2 answers the server's keepalives by itself, and these answers may confirm too
much. If the last confirmation lies behind the start of the piece read last, psycopg2
confirms everything up to the server's own position. A piece of a long transaction
starts far back, so that transactions in between would be confirmed before they are
stored. Therefore such a piece is the last one read until everything before it is
stored.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, NamedTuple

import psycopg2
from psycopg2 import extensions
from psycopg2.extras import LogicalReplicationConnection

from txmq.errors import DatabaseError
from txmq.relay import slot
from txmq.relay.pgoutput import CommittedTransaction, TransactionAssembler
from txmq.tx.postgres.errors import translate, translated
from txmq.tx.postgres.identity import parse_lsn, timeline_ends
from txmq.tx.postgres.session import SETTINGS, connect
from txmq.wire.logical_message import PREFIX

OBJECT_IN_USE: Final = "55006"
NOT_IN_PREREQUISITE_STATE: Final = "55000"
INSUFFICIENT_PRIVILEGE: Final = "42501"
STATUS_S: Final = 10.0  # PostgreSQL gives up readers that are silent for a minute


class TimelineEnd(NamedTuple):
    """An earlier timeline of the server, and the LSN of its end."""

    timeline: int
    end: int


class SlotSource(NamedTuple):
    """The slot, cluster and timeline of transactions.

    An LSN is unique within them.
    """

    system_id: int
    timeline: int
    slot: str
    end_lsn: int  # end of the server's log when the stream began
    history: tuple[TimelineEnd, ...] = ()  # the earlier timelines, the first one first

    def watermark_name(self, timeline: int) -> str:
        """Return the name of the broker's watermark for a timeline."""
        return f"{self.system_id}-{timeline}-{self.slot}"


class SlotStream:
    """A reader of a slot. For one thread; a DatabaseError ends it."""

    def __init__(self, dsn: str, name: str) -> None:
        """Raises DatabaseError and its kinds SlotMissing, SlotLost and SlotInUse."""
        self._name = name
        self._transactions = TransactionAssembler(PREFIX)
        self._last_piece = self._confirmed = 0
        _require_slot(dsn, name)  # gives better errors than the server's refusal
        with translated("connecting to PostgreSQL for replication"):
            given = {**SETTINGS, "application_name": "txmq relay", **extensions.parse_dsn(dsn)}
            self._connection = psycopg2.connect(
                connection_factory=LogicalReplicationConnection, **given
            )
        try:
            self._cursor = self._connection.cursor()
            self.source = self._start()
            # Not before: another reader may have confirmed more in between.
            status = _require_slot(dsn, name)
            self.origin, self.confirmed_before = status.origin, status.confirmed_lsn or 0
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor for `select`; readable = `read` may have something."""
        return int(self._cursor.fileno())

    @property
    def decoded(self) -> int:
        """Return the LSN up to which the server has sent all committed transactions."""
        return int(self._cursor.wal_end)

    @property
    def blocked(self) -> bool:
        """Return whether reading has to wait until everything read is stored."""
        return self._last_piece <= self._confirmed

    def read(self, *, all_stored: bool) -> CommittedTransaction | None:
        """Return the next transaction, if it has arrived.

        `all_stored` = the broker has stored all earlier ones.
        """
        while all_stored or not self.blocked:
            with translated(f"reading slot {self._name}"):
                piece = self._cursor.read_message()
            if piece is None:
                return None
            self._last_piece = piece.data_start
            found = self._transactions.feed(piece.payload)
            if found is not None:
                return found
        return None

    def confirm(self, end: int) -> None:
        """Confirm all transactions up to an LSN: the server need not keep them."""
        self._confirmed = max(self._confirmed, end)
        with translated(f"confirming slot {self._name}"):
            self._cursor.send_feedback(flush_lsn=end, force=True)

    def close(self) -> None:
        """Close the connection, which frees the slot."""
        with suppress(psycopg2.Error):  # lost already
            self._connection.close()

    def _start(self) -> SlotSource:
        with translated("identifying the server"):
            self._cursor.execute("IDENTIFY_SYSTEM")
            [(system_id, timeline, place, _database)] = self._cursor.fetchall()
            history = self._history(int(timeline))
        options = {"proto_version": "1", "publication_names": self._name, "messages": "true"}
        try:
            self._cursor.start_replication(
                slot_name=self._name, options=options, decode=False, status_interval=STATUS_S
            )
        except psycopg2.Error as error:
            raise _slot_error(error, self._name) from None
        return SlotSource(int(system_id), int(timeline), self._name, parse_lsn(place), history)

    def _history(self, timeline: int) -> tuple[TimelineEnd, ...]:
        if timeline == 1:
            return ()
        self._cursor.execute(f"TIMELINE_HISTORY {timeline}")
        [(_file, content)] = self._cursor.fetchall()
        return parse_history(
            bytes(content).decode() if isinstance(content, memoryview) else content
        )


def parse_history(content: str) -> tuple[TimelineEnd, ...]:
    """Return the timelines of a history file."""
    return tuple(TimelineEnd(*end) for end in timeline_ends(content))


def _require_slot(dsn: str, name: str) -> slot.SlotStatus:
    """Return the slot if it can be read. Raises SlotMissing or SlotLost."""
    connection = connect(dsn, application_name="txmq relay")
    try:
        return slot.require(connection, name)
    finally:
        connection.close()


def _slot_error(error: psycopg2.Error, name: str) -> DatabaseError:
    if error.pgcode == OBJECT_IN_USE:
        return slot.slot_in_use(name)
    if error.pgcode == NOT_IN_PREREQUISITE_STATE:
        return slot.slot_lost(name)
    refused = translate(error, f"reading slot {name}")
    if error.pgcode == INSUFFICIENT_PRIVILEGE:
        refused = DatabaseError(
            refused.message,
            hint="ALTER ROLE ... REPLICATION, as a superuser",
            sqlstate=error.pgcode,
        )
    return refused
