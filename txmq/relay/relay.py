"""The relay: messages emitted into PostgreSQL transactions, stored at the broker.

It reads a replication slot, which has committed transactions only, in the order of
their commits. It stores each of them as one bundle: whole, once, and in that order. It
needs `wal_level = logical`, a slot (`txmq relay create`) and a role with REPLICATION.
The transactions need no token row and no check-back.

While no broker answers, or no relay runs, PostgreSQL keeps its log. Therefore the relay
watches the slot and raises alarms.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Final

from txmq.client.blocking.core import BlockingCore
from txmq.client.log import get_logger
from txmq.client.protocol.alarm_reports import (
    MIN_DURATION_S,
    AlarmReport,
    alarm_source,
    report_alarms,
)
from txmq.errors import (
    ClientClosed,
    ConfigError,
    DatabaseError,
    DigestMismatch,
    LogChanged,
    SequenceGap,
    StaleTopic,
    TxmqError,
    UnknownTransaction,
)
from txmq.relay import slot as slots
from txmq.relay.relay_session import RelayProgress, RelaySession, read_start
from txmq.relay.slot_stream import SlotStream
from txmq.tx.postgres.session import connect

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between sessions
CRITICAL_KINDS: Final = ("lost", "unreserved")
FATAL: Final = (ConfigError, LogChanged, ClientClosed)
RETRY_AT_ONCE: Final = (
    StaleTopic,
    SequenceGap,
    UnknownTransaction,
    DigestMismatch,
)  # errors that the next session avoids
log = get_logger()


@dataclass(frozen=True, slots=True)
class RelayPolicy:
    """Settings of a relay.

    It checks the slot every `look_every_s`, with alarms over `retained` bytes of log
    and `lag_s` seconds. `skip` has the LSNs of transactions that an operator has given
    up, because the broker refuses them.
    """

    confirm_every_s: float = 1.0
    look_every_s: float = 10.0
    retained: int = 1 << 30
    lag_s: float = 60.0
    skip: Collection[int] = ()


class Relay:
    """A relay of one slot to one broker.

    Other relays of the slot wait until this one ends.
    """

    def __init__(self, core: BlockingCore, dsn: str, slot: str, policy: RelayPolicy) -> None:
        self._core, self._dsn, self._policy = core, dsn, policy
        self._slot = slots.check_slot_name(slot)
        self._progress = RelayProgress()
        self._trouble = ""
        self._source = alarm_source("relay")

    def run(self, stop: Event) -> None:
        """Relay until `stop` is set; survive losses of the broker and the database.

        Raises SlotMissing, SlotLost, SlotRewound, LogChanged, ConfigError or
        DatabaseError, which need an operator.
        """
        ended = Event()
        watch = Thread(target=self._watch, args=(ended,), name="txmq-relay-watch", daemon=True)
        watch.start()
        try:
            self._run_sessions(stop)
        finally:
            ended.set()
            watch.join()

    def _run_sessions(self, stop: Event) -> None:
        pause = FIRST_PAUSE_S
        while not stop.is_set():
            before, retry_at_once = self._progress.transactions, False
            try:
                self._run_session(stop)
            except TxmqError as error:
                if isinstance(error, FATAL) or (
                    isinstance(error, DatabaseError) and not error.retriable
                ):
                    raise
                self._log_interruption(error)
                retry_at_once = isinstance(error, RETRY_AT_ONCE)
            advanced = retry_at_once or self._progress.transactions > before
            pause = FIRST_PAUSE_S if advanced else min(2 * pause, LONGEST_PAUSE_S)
            stop.wait(pause)

    def _run_session(self, stop: Event) -> None:
        """Run one session; connect to the broker first, so that the slot stays free."""
        deadline = time.monotonic() + self._core.settings.timeout
        with (
            closing(self._core.open_connection(deadline)) as connection,
            closing(SlotStream(self._dsn, self._slot)) as stream,
        ):
            start = read_start(self._core, stream.source)
            log.info(
                "relay.passage",
                slot=self._slot,
                mark=start.watermark,
                timeline=stream.source.timeline,
            )
            policy = self._policy
            session = RelaySession(
                *(self._core, connection, stream, start, self._progress),
                confirm_every_s=policy.confirm_every_s,
                skip=policy.skip,
            )
            session.run(stop)

    def _log_interruption(self, error: TxmqError) -> None:
        """Log an error when it comes up, but not again while it lasts."""
        if error.message != self._trouble:
            self._trouble = error.message
            log.warning("relay.interrupted", slot=self._slot, error=str(error))

    def _watch(self, ended: Event) -> None:
        """Check the slot until the relay ends, with or without a broker."""
        known: dict[str, str] = {}
        while not ended.is_set():
            try:
                known = self._check_slot(known)
            except DatabaseError as error:
                log.warning("relay.not_watched", slot=self._slot, error=str(error))
            ended.wait(self._policy.look_every_s)

    def _check_slot(self, known: dict[str, str]) -> dict[str, str]:
        with closing(connect(self._dsn, application_name="txmq relay watch")) as connection:
            status = slots.find(connection, self._slot)
        if status is None:
            return known
        alarms = status.alarms(retained=self._policy.retained, lag_s=self._policy.lag_s)
        for kind in alarms.keys() - known.keys():
            log.error(
                "relay.alarm",
                slot=self._slot,
                kind=kind,
                text=alarms[kind],
                retained=status.retained,
            )
        for kind in known.keys() - alarms.keys():
            log.info("relay.alarm_over", slot=self._slot, kind=kind, retained=status.retained)
        self._report(alarms)
        done = self._progress
        log.info(
            "relay.status",
            retained=status.retained,
            transactions=done.transactions,
            messages=done.messages,
        )
        return alarms

    def _report(self, alarms: dict[str, str]) -> None:
        """Report the alarms to the broker; if it is away, its own alarm says so."""
        alarm_reports = [
            AlarmReport(
                f"relay.{kind}",
                "critical" if kind in CRITICAL_KINDS else "warning",
                text,
                "txmq relay status",
            )
            for kind, text in alarms.items()
        ]
        with suppress(TxmqError):
            report_alarms(
                self._call,
                self._source,
                alarm_reports,
                max(MIN_DURATION_S, 4 * self._policy.look_every_s),
            )

    def _call(self, name: str, **args: object) -> object:
        return self._core.call(name, args, repeat=True)
