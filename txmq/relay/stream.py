"""The committed transactions of a slot, one after the other, in the order of their
commits.

psycopg2 answers the server's keepalives by itself, and with them it may confirm more
than it was told to: once what was confirmed last lies behind the beginning of the piece
read last, it takes all for done and confirms up to the server's own place. A piece of a
long transaction lies far back, so that it would confirm what came between and is not
yet stored. So such a piece is the last that is read until all before it is stored.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, NamedTuple

import psycopg2
from psycopg2 import extensions
from psycopg2.extras import LogicalReplicationConnection

from txmq.errors import DatabaseError
from txmq.relay import slot
from txmq.relay.pgoutput import Committed, Transactions
from txmq.tx.postgres.errors import translate, translated
from txmq.tx.postgres.session import SETTINGS, connect
from txmq.wire.emitted import PREFIX

OBJECT_IN_USE: Final = "55006"
NOT_IN_PREREQUISITE_STATE: Final = "55000"
INSUFFICIENT_PRIVILEGE: Final = "42501"
STATUS_S: Final = 10.0  # PostgreSQL gives up readers that are silent for a minute


class Branch(NamedTuple):
    """A timeline that the server was on, and the LSN at which it left it."""

    timeline: int
    end: int


class Source(NamedTuple):
    """Whose transactions they are. An LSN is a place on one timeline of one cluster."""

    system_id: int
    timeline: int
    slot: str
    place: int  # where the server's log ended as the stream began
    history: tuple[Branch, ...] = ()  # the earlier timelines, the first one first

    def mark(self, timeline: int) -> str:
        """The name of the broker's mark for one of its timelines."""
        return f"{self.system_id}-{timeline}-{self.slot}"


class SlotStream:
    """Reads a slot. For one thread; a DatabaseError ends it."""

    def __init__(self, dsn: str, name: str) -> None:
        """Raises SlotMissing, SlotLost, SlotInUse, DatabaseUnavailable,
        DatabaseError.
        """
        self._name = name
        self._transactions = Transactions(PREFIX)
        self._last_piece = self._confirmed = 0
        _look(dsn, name)
        with translated("connecting to PostgreSQL for replication"):
            given = {**SETTINGS, "application_name": "txmq relay", **extensions.parse_dsn(dsn)}
            self._connection = psycopg2.connect(
                connection_factory=LogicalReplicationConnection, **given
            )
        try:
            self._cursor = self._connection.cursor()
            self.source = self._start()
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Readable once `read` may have something new; for `select`."""
        return int(self._cursor.fileno())

    @property
    def held(self) -> bool:
        """Whether nothing may be read now unless all that was read before is stored."""
        return self._last_piece <= self._confirmed

    def read(self, *, all_stored: bool) -> Committed | None:
        """The next transaction, if it is here already. `all_stored`: the broker has all
        those before it.
        """
        while all_stored or not self.held:
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
        """Tells the server that all transactions up to this end are done with: it need
        not keep them.
        """
        self._confirmed = max(self._confirmed, end)
        with translated(f"confirming slot {self._name}"):
            self._cursor.send_feedback(flush_lsn=end, force=True)

    def close(self) -> None:
        """Gives the slot back."""
        with suppress(psycopg2.Error):  # lost already
            self._connection.close()

    def _start(self) -> Source:
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
            raise _refusal(error, self._name) from None
        return Source(int(system_id), int(timeline), self._name, lsn_of(place), history)

    def _history(self, timeline: int) -> tuple[Branch, ...]:
        if timeline == 1:
            return ()
        self._cursor.execute(f"TIMELINE_HISTORY {timeline}")
        [(_file, content)] = self._cursor.fetchall()
        return history_of(bytes(content).decode() if isinstance(content, memoryview) else content)


def lsn_of(text: str) -> int:
    """An LSN as PostgreSQL writes it."""
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)


def history_of(content: str) -> tuple[Branch, ...]:
    """The timelines in a history file: one a line, with the LSN of its end and a
    reason; # begins a comment.
    """
    lines = (line.split("#")[0].split() for line in content.splitlines())
    return tuple(Branch(int(fields[0]), lsn_of(fields[1])) for fields in lines if len(fields) > 1)


def _look(dsn: str, name: str) -> None:
    """What is wrong with the slot is told better by a look at it than by the server's
    refusal.
    """
    connection = connect(dsn, application_name="txmq relay")
    try:
        slot.require(connection, name)
    finally:
        connection.close()


def _refusal(error: psycopg2.Error, name: str) -> DatabaseError:
    if error.pgcode == OBJECT_IN_USE:
        return slot.in_use(name)
    if error.pgcode == NOT_IN_PREREQUISITE_STATE:
        return slot.lost(name)
    refused = translate(error, f"reading slot {name}")
    if error.pgcode == INSUFFICIENT_PRIVILEGE:
        refused = DatabaseError(
            refused.message,
            hint="ALTER ROLE ... REPLICATION, as a superuser",
            sqlstate=error.pgcode,
        )
    return refused
