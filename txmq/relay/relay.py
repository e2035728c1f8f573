"""The relay: what services emit into their PostgreSQL transactions (`txmq.emit`),
brought to the broker.

It reads a replication slot, where only committed transactions are, in the order of
their commits, and stores each as one group: whole, once, in that order. Needs
`wal_level = logical`, a slot (`txmq relay create`) and a role with REPLICATION, and
asks no token and no check of the transactions themselves.

While no broker answers, or no relay runs, PostgreSQL keeps its log: that is what is
watched here.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Final

from txmq.client.blocking.alarm_reports import Alarm, report, source_of
from txmq.client.blocking.core import Core
from txmq.client.log import get_logger
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
from txmq.relay.passage import Passage, Progress, start_of
from txmq.relay.stream import SlotStream
from txmq.tx.postgres.session import connect

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between passages
REPORTED_S: Final = 30.0
CRITICAL: Final = ("lost", "unreserved")
FINAL: Final = (ConfigError, LogChanged, ClientClosed)
CURED: Final = (
    StaleTopic,
    SequenceGap,
    UnknownTransaction,
    DigestMismatch,
)  # the next passage does better
log = get_logger()


@dataclass(frozen=True, slots=True)
class RelayPolicy:
    """How a relay works. `look_every_s`: at the slot, for alarms over `retained` bytes
    of log and `lag_s` seconds.

    `skip`: LSNs of transactions that an operator has given up, because no broker takes
    them.
    """

    confirm_every_s: float = 1.0
    look_every_s: float = 10.0
    retained: int = 1 << 30
    lag_s: float = 60.0
    skip: Collection[int] = ()


class Relay:
    """Brings the messages of one slot to one broker. One relay at a time can; others
    wait for the slot.
    """

    def __init__(self, core: Core, dsn: str, slot: str, policy: RelayPolicy) -> None:
        self._core, self._dsn, self._policy = core, dsn, policy
        self._slot = slots.check_slot_name(slot)
        self._progress = Progress()
        self._trouble = ""
        self._source = source_of("relay")

    def run(self, stop: Event) -> None:
        """Works until `stop` is set, over losses of the broker and of the database.

        Raises SlotMissing, SlotLost, SlotRewound, LogChanged, ConfigError,
        DatabaseError: what only somebody can mend.
        """
        over = Event()
        watch = Thread(target=self._watch, args=(over,), name="txmq-relay-watch", daemon=True)
        watch.start()
        try:
            self._passages(stop)
        finally:
            over.set()
            watch.join()

    def _passages(self, stop: Event) -> None:
        pause = FIRST_PAUSE_S
        while not stop.is_set():
            before, quick = self._progress.transactions, False
            try:
                self._pass(stop)
            except TxmqError as error:
                if isinstance(error, FINAL) or (
                    isinstance(error, DatabaseError) and not error.retriable
                ):
                    raise
                self._tell(error)
                quick = isinstance(error, CURED)
            gone_on = quick or self._progress.transactions > before
            pause = FIRST_PAUSE_S if gone_on else min(2 * pause, LONGEST_PAUSE_S)
            stop.wait(pause)

    def _pass(self, stop: Event) -> None:
        """One passage. The broker comes first: while it is away, the slot need not be
        taken.
        """
        deadline = time.monotonic() + self._core.settings.timeout
        with (
            closing(self._core.dial(deadline)) as connection,
            closing(SlotStream(self._dsn, self._slot)) as stream,
        ):
            start = start_of(self._core, stream.source)
            log.info(
                "relay.passage", slot=self._slot, mark=start.mark, timeline=stream.source.timeline
            )
            policy = self._policy
            passage = Passage(
                *(self._core, connection, stream, start, self._progress),
                confirm_every_s=policy.confirm_every_s,
                skip=policy.skip,
            )
            passage.run(stop)

    def _tell(self, error: TxmqError) -> None:
        """A trouble is told when it comes, not as long as it lasts."""
        if error.message != self._trouble:
            self._trouble = error.message
            log.warning("relay.interrupted", slot=self._slot, error=str(error))

    def _watch(self, over: Event) -> None:
        """Looks at the slot until the relay is over, the broker there or not."""
        known: dict[str, str] = {}
        while not over.is_set():
            try:
                known = self._look(known)
            except DatabaseError as error:
                log.warning("relay.not_watched", slot=self._slot, error=str(error))
            over.wait(self._policy.look_every_s)

    def _look(self, known: dict[str, str]) -> dict[str, str]:
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
        """To the broker, which may be away: then its own silence is told of
        elsewhere.
        """
        told = [
            Alarm(
                f"relay.{kind}",
                "critical" if kind in CRITICAL else "warning",
                text,
                "txmq relay status",
            )
            for kind, text in alarms.items()
        ]
        with suppress(TxmqError):
            report(self._call, self._source, told, max(REPORTED_S, 4 * self._policy.look_every_s))

    def _call(self, name: str, **args: object) -> object:
        return self._core.call(name, args, repeat=True)
