"""A broker in a thread of this process, with a clock that tests move.

It is the real one: its files, sockets and timers. Only time is its own.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from txmq.errors.extras import require

require("testing", "jsonschema", "lmdb", "prometheus_client", "structlog", "twisted")

from twisted.internet.defer import Deferred
from twisted.internet.threads import blockingCallFromThread

from txmq.broker.reactor.epoll_reactor import TurnReactor
from txmq.broker.reactor.steady_clock import MachineClocks, elapsed_clock, wall_clock
from txmq.broker.service import BrokerService
from txmq.config.broker import SettingsFile
from txmq.model.durations import Duration, seconds_of
from txmq.model.units import SECOND

STOPPED_S = 30.0
TURNS = 4  # of a reactor: it reads sockets in one, and what follows from that comes later
# A killed member goes at once.
CONSUMERS = {"lost_connection_grace_s": 0.0}


class BrokerClock:
    """A broker's time: the machine's, and what a test has added."""

    def __init__(self, reactor: TurnReactor) -> None:
        self._reactor, self._ahead = reactor, 0.0
        reactor.seconds = lambda: time.monotonic() + self._ahead  # its timers go by it

    @property
    def machine(self) -> MachineClocks:
        """The clocks that the broker reads."""
        return MachineClocks(
            lambda: wall_clock() + round(self._ahead * SECOND),
            lambda: elapsed_clock() + self._ahead,
        )

    def now(self) -> int:
        """Return the broker's wall clock, in microseconds since the epoch."""
        return self.machine.wall()

    def advance(self, duration: Duration) -> None:
        """Let time pass. What is due by then happens at once: delays, retries,
        check-backs, expiry. Time does not go back.
        """
        self._ahead += seconds_of(duration, "the time to let pass")
        self._reactor.callFromThread(lambda: None)  # it looks at its timers


class BrokerThread:
    """A broker with its data in `directory`. A with-block starts and stops it.

    `databases` are the DSNs whose token rows decide, by their names. `settings` are
    sections of the settings file (`txmq.config.broker`). It listens on a free port of
    127.0.0.1.
    """

    def __init__(
        self,
        directory: Path,
        *,
        databases: dict[str, str] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        sections: dict[str, Any] = {"consumers": CONSUMERS, "catalogue": {"mib": 0.0}}
        sections.update(settings or {})
        sections["broker"] = {
            "listen": "127.0.0.1:0",
            "data": directory,
            "create_topics": True,
        } | sections.get("broker", {})
        resolvers = [{"name": name, "dsn": dsn} for name, dsn in (databases or {}).items()]
        sections["resolver"] = [*sections.get("resolver", ()), *resolvers]
        self._settings = SettingsFile.model_validate(sections)
        self._reactor: Any = TurnReactor()
        self.clock = BrokerClock(self._reactor)
        self._service = BrokerService(self._settings, self._reactor, clocks=self.clock.machine)
        self._thread = threading.Thread(target=self._run, name="txmq-broker", daemon=True)
        self.url = ""

    def start(self) -> Self:
        """Open the data directory and serve. Raises what either raises."""
        self._service.open()
        self._thread.start()
        self.url = blockingCallFromThread(self._reactor, self._serve)
        return self

    def _serve(self) -> Any:  # noqa: ANN401  # a Deferred of the address
        return Deferred.fromCoroutine(self._service.start())

    def _run(self) -> None:
        self._reactor.run(installSignalHandlers=False)

    def stop(self) -> None:
        """Drain and end."""
        if self._thread.is_alive():
            blockingCallFromThread(self._reactor, self._service.stop)
            self._reactor.callFromThread(self._reactor.stop)
            self._thread.join(STOPPED_S)

    @property
    def undecided(self) -> int:
        """Transactions that the broker has stored and nobody has decided. The messages
        of those that are decided can be read.
        """
        counted: Any = self._service.undecided
        found: int = blockingCallFromThread(self._reactor, counted)
        return found

    def catch_up(self) -> None:
        """Return when the broker has noticed what happened before the call, such as the
        end of a connection.
        """
        for _ in range(TURNS):
            blockingCallFromThread(self._reactor, lambda: None)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
