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
    MAX_DURATION_S,
    MIN_DURATION_S,
    AlarmReport,
    lasting_source,
    report_alarms,
)
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    ConfigError,
    ConnectionLost,
    DatabaseError,
    DigestMismatch,
    LogChanged,
    RequestTimeout,
    SequenceGap,
    SlotInUse,
    SlotLost,
    SlotMissing,
    SlotRewound,
    StaleTopic,
    TxmqError,
    UnknownTransaction,
)
from txmq.relay import slot as slots
from txmq.relay.missed import (
    Gap,
    LostCommits,
    find_gap,
    find_lost,
    find_lost_commits,
    last_restore,
)
from txmq.relay.relay_session import RelayProgress, RelaySession, read_start, read_watermark
from txmq.relay.slot_stream import SlotStream
from txmq.tx.postgres.blocking import read_server
from txmq.tx.postgres.session import connect

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between sessions
WARNING_KINDS: Final = ("retained", "lag")  # the other alarms are critical
# The relay stays and waits for the operator's slot: who ends has no alarm.
WAIT_FOR_SLOT: Final = (SlotMissing, SlotLost, SlotRewound)
# The look at the slot has alarms for the first two. The others are over soon, or
# concern a broker that is away, which has no alarms.
NO_ALARM: Final = (
    SlotMissing,
    SlotLost,
    SlotInUse,
    BrokerUnavailable,
    ConnectionLost,
    RequestTimeout,
)
FATAL: Final = (ConfigError, LogChanged, ClientClosed)
# The next session avoids these errors.
RETRY_AT_ONCE: Final = (StaleTopic, SequenceGap, UnknownTransaction, DigestMismatch)
ACTIONS: Final = {
    "missing": "txmq relay create",
    "rewound": "txmq relay create",
    "missed": "txmq relay accept",
    "restored": "send them again where needed, then txmq log lost --accept",
}
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
        self._gap: Gap | None = None  # what the slot has missed
        self._lost: Gap | None = None  # what a restored broker may lack
        self._lost_commits: tuple[LostCommits, ...] = ()  # by failovers
        self._halt: dict[str, str] = {}  # the alarm of an error that stops the relay's work
        self._source = lasting_source(f"relay-{slot}")

    def run(self, stop: Event) -> None:
        """Relay until `stop` is set; survive losses of the broker and the database.

        While the slot is gone, lost or rewound, wait with an alarm until an operator
        has made one. Raises SlotMissing if there has never been one, LogChanged,
        ConfigError or DatabaseError, which need an operator, too.
        """
        ended = Event()
        watch = Thread(target=self._watch, args=(ended,), name="txmq-relay-watch", daemon=True)
        watch.start()
        try:
            self._run_sessions(stop)
        except TxmqError as error:
            _end(watch, ended)
            text = f"the relay of slot {self._slot} has ended: {error}"
            self._report({"stopped": text}, lasting=True)
            raise
        finally:
            _end(watch, ended)

    def _run_sessions(self, stop: Event) -> None:
        pause = FIRST_PAUSE_S
        while not stop.is_set():
            before, retry_at_once = self._progress.transactions, False
            try:
                self._run_session(stop)
            except TxmqError as error:
                if _is_fatal(error) or (isinstance(error, SlotMissing) and self._never_made()):
                    raise
                self._halt = self._halt_alarm(error)
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
            if stream.origin is not None and not stream.origin.accepted:
                self._gap = find_gap(self._core, stream.source, stream.origin)
            start = read_start(self._core, stream.source)
            self._lost_commits = find_lost_commits(self._core, stream.source, stream.origin)
            self._lost = find_lost(self._core, stream.source, stream.confirmed_before, start)
            self._halt = {}
            log.info(
                "relay.passage",
                slot=self._slot,
                mark=start.watermark,
                timeline=stream.source.timeline,
            )
            policy = self._policy
            session = RelaySession(
                self._core,
                connection,
                stream,
                start,
                self._progress,
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
                self._report({"unreachable": f"slot {self._slot} cannot be looked at: {error}"})
            ended.wait(self._policy.look_every_s)

    def _check_slot(self, known: dict[str, str]) -> dict[str, str]:
        with closing(connect(self._dsn, application_name="txmq relay watch")) as connection:
            status = slots.find(connection, self._slot)
        alarms = self._alarms(status)
        retained = 0 if status is None else status.retained
        for kind in alarms.keys() - known.keys():
            log.error(
                "relay.alarm",
                slot=self._slot,
                kind=kind,
                text=alarms[kind],
                retained=retained,
            )
        for kind in known.keys() - alarms.keys():
            log.info("relay.alarm_over", slot=self._slot, kind=kind, retained=retained)
        self._report(alarms)
        done = self._progress
        log.info(
            "relay.status",
            retained=retained,
            transactions=done.transactions,
            messages=done.messages,
        )
        return alarms

    def _alarms(self, status: slots.SlotStatus | None) -> dict[str, str]:
        """Return the alarms that hold now: kinds and texts."""
        alarms = dict(self._halt)
        if status is None:
            return alarms | {"missing": f"there is no slot {self._slot}: nothing is relayed"}
        if status.unfit:
            alarms["unfit"] = f"slot {self._slot} {status.unfit}: nothing is relayed"
        missed = self._missed(status)
        if missed:
            alarms["missed"] = f"slot {self._slot}: {'; '.join(missed)}"
        if self._lost is not None and self._is_open():
            alarms["restored"] = f"the broker's log was restored, and may lack {self._lost}"
        return alarms | status.alarms(retained=self._policy.retained, lag_s=self._policy.lag_s)

    def _missed(self, status: slots.SlotStatus) -> list[str]:
        """Return texts about what the slot has missed, and what failovers have lost,
        until an operator accepts them.
        """
        accepted = status.origin is None or status.origin.accepted
        timeline = 0 if status.origin is None else status.origin.timeline
        missed = (
            []
            if self._gap is None or accepted
            else [f"it was made too late: it has no {self._gap}"]
        )
        lost = [str(one) for one in self._lost_commits if one.timeline >= timeline]
        if lost:
            missed.append(
                f"a failover has lost rows of messages that were sent: {', '.join(lost[-3:])}"
            )
        return missed

    def _is_open(self) -> bool:
        """Return whether nobody has accepted the last restore of the broker's log."""
        with suppress(TxmqError):
            restored = last_restore(self._core)
            return restored is not None and not restored["accepted"]
        return True

    def _never_made(self) -> bool:
        """Return whether nobody knows the slot: then its name is wrong, most likely."""
        try:
            with closing(connect(self._dsn, application_name="txmq relay")) as connection:
                if slots.was_made(connection, self._slot):
                    return False
                server = read_server(connection).identity
            timelines = range(server.timeline, 0, -1)
            names = (f"{server.system_id}-{timeline}-{self._slot}" for timeline in timelines)
            return not any(read_watermark(self._core, name)[0] for name in names)
        except TxmqError:
            return False

    def _halt_alarm(self, error: TxmqError) -> dict[str, str]:
        if isinstance(error, RETRY_AT_ONCE + NO_ALARM):
            return {}
        kind = "rewound" if isinstance(error, SlotRewound) else "stopped"
        return {kind: f"the relay of slot {self._slot} does nothing: {error}"}

    def _report(self, alarms: dict[str, str], *, lasting: bool = False) -> None:
        """Report the alarms to the broker; if it is away, its own alarm says so."""
        seconds = max(MIN_DURATION_S, 4 * self._policy.look_every_s)
        alarm_reports = [
            AlarmReport(
                f"relay.{kind}",
                "warning" if kind in WARNING_KINDS else "critical",
                text,
                ACTIONS.get(kind, "txmq relay status"),
            )
            for kind, text in alarms.items()
        ]
        with suppress(TxmqError):
            report_alarms(
                self._call,
                self._source,
                alarm_reports,
                MAX_DURATION_S if lasting else seconds,
            )

    def _call(self, name: str, **args: object) -> object:
        return self._core.call(name, args, repeat=True)


def _end(watch: Thread, ended: Event) -> None:
    ended.set()
    watch.join()


def _is_fatal(error: TxmqError) -> bool:
    """Return whether the relay ends with the error, because waiting cannot help."""
    if isinstance(error, WAIT_FOR_SLOT):
        return False
    return isinstance(error, FATAL) or (isinstance(error, DatabaseError) and not error.retriable)
