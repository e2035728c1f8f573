"""The broker as a whole: built here from its parts, started, drained.

OPENING ─► RECOVERING ─► SERVING ─► DRAINING ─► CLOSED        forward only, each step logged
"""

from __future__ import annotations

import signal
import sys
import time
from enum import IntEnum
from random import Random
from typing import TYPE_CHECKING, Any

import structlog
from twisted.internet.defer import Deferred, inlineCallbacks
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.threads import deferToThreadPool
from twisted.python.threadpool import ThreadPool

from txmq.broker.assembly import Assembly
from txmq.broker.engine import Engine
from txmq.broker.resolving import Resolving
from txmq.broker.storage import Keeper, Opened, open_directory
from txmq.config import ListenAddress, listen_address
from txmq.store.fs import RealFileSystem

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.python.failure import Failure

    from txmq.config import Settings

BACKLOG = 1_024  # connections that the kernel holds until they are accepted
SWITCH_INTERVAL_S = 0.0005  # beside an index writer: tick p99 from 5.8 to 3.2 ms (ARCHITECTURE 1)
KEEP_S = 0.2
log = structlog.get_logger()


class Life(IntEnum):
    """Where the broker is in its life."""

    OPENING = 1
    RECOVERING = 2
    SERVING = 3
    DRAINING = 4
    CLOSED = 5


class Threads:
    """A pool whose threads run one kind of blocking work."""

    def __init__(self, reactor: Any, name: str, size: int = 1) -> None:  # noqa: ANN401  # several interfaces of Twisted's
        self._reactor = reactor
        self._pool = ThreadPool(minthreads=0, maxthreads=size, name=name)
        self._pool.start()

    def __call__(self, function: Callable[..., Any], *args: object) -> Deferred[Any]:
        return deferToThreadPool(self._reactor, self._pool, function, *args)

    def stop(self) -> None:
        self._pool.stop()


class BrokerService:
    """One broker in one process. `start` and `stop` are called once each, in the reactor's thread."""

    def __init__(self, settings: Settings, reactor: Any) -> None:  # noqa: ANN401  # several interfaces of Twisted's
        self._settings, self._reactor = settings, reactor
        self.life = Life.OPENING
        self._port: Any = None  # an IListeningPort
        self._threads = {name: Threads(reactor, f"txmq-{name}") for name in ("log", "index")}
        self._threads["resolver"] = Threads(reactor, "txmq-resolver", max(1, len(settings.resolver)))

    def open(self) -> None:
        """Open the data directory and recover; blocks. Raises StoreError, and starts nothing then."""
        settings = self._settings.broker
        self._to(Life.RECOVERING)
        began, fs = time.monotonic(), RealFileSystem()
        opened = open_directory(fs, settings, _wall_clock())
        _log_recovery(opened, time.monotonic() - began)
        flush = None if settings.flush == "sync" else settings.flush
        engine = Engine(
            opened.log, opened.state, clock=self._reactor, now=_wall_clock, in_thread=self._threads["log"], flush=flush
        )
        engine.on_failure = self._failed
        engine.boot(settings.name)
        self._engine = engine
        self._keeper = Keeper(fs, engine, opened.tables, settings, self._threads["index"])
        resolving = Resolving(self._settings.resolver, engine.store.log_id, self._threads["resolver"])
        self._assembly = Assembly(engine, self._settings, self._reactor, resolving, Random())  # noqa: S311  # jitter
        self._assembly.every(KEEP_S, self._keeper.tend)

    async def start(self) -> str:
        """Begin to serve; returns the address. `open` must have succeeded."""
        host, port = listen_address(self._settings.broker.listen)
        endpoint = TCP4ServerEndpoint(self._reactor, port, backlog=BACKLOG, interface=host)  # an IPv6 address does, too
        self._port = await endpoint.listen(self._assembly.sessions)
        self._assembly.start(self._failed)
        self._to(Life.SERVING)
        address = self._port.getHost()
        return f"txmq://{ListenAddress(address.host, address.port)}"

    @inlineCallbacks
    def stop(self) -> Any:  # noqa: ANN401  # a Deferred, called by the reactor's shutdown
        """Drain: take nothing new, bring everything to disk, close."""
        if self.life >= Life.DRAINING:
            return
        self._to(Life.DRAINING)
        if self._port is not None:
            yield self._port.stopListening()
        self._assembly.stop()
        if self._engine.failed is None:
            yield self._engine.drained()
            yield self._keeper.idle()
            self._assembly.sessions.close()
            self._keeper.close()
        self._engine.store.close()
        for threads in self._threads.values():
            threads.stop()
        self._to(Life.CLOSED)

    def _failed(self, failure: Failure) -> None:
        """Without its disk, or with a bug in its heart, the broker is of no use: what it knows is in the log."""
        log.critical("broker.failed", error=failure.getErrorMessage(), traceback=failure.getTraceback())
        self._engine.failed = self._engine.failed or failure
        if self._reactor.running:
            self._reactor.stop()

    def _to(self, life: Life) -> None:
        assert life > self.life, "a broker's life goes forward only"
        self.life = life
        log.info("broker.life", state=life.name)

    @property
    def failed(self) -> bool:
        """Whether the broker stopped because it could not go on."""
        return self._engine.failed is not None


def run(settings: Settings, *, ready: Callable[[str], None]) -> None:
    """Run a broker until SIGTERM or SIGINT; `ready` gets its address once it serves.

    Raises what opening the data directory or listening raises, and StoreError where the broker had to stop.
    """
    from twisted.internet import reactor  # noqa: PLC0415  # a composition root: here the one reactor is chosen

    from txmq.errors import StoreClosed  # noqa: PLC0415

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    the_reactor: Any = reactor
    service = BrokerService(settings, the_reactor)
    service.open()
    trouble: list[BaseException] = []

    def start() -> None:
        def refused(failure: Failure) -> None:
            trouble.append(failure.value or StoreClosed("the broker could not start"))
            the_reactor.stop()

        Deferred.fromCoroutine(service.start()).addCallbacks(ready, refused)

    the_reactor.callWhenRunning(start)
    the_reactor.addSystemEventTrigger("before", "shutdown", service.stop)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    the_reactor.run()
    if trouble:
        raise trouble[0]
    if service.failed:
        raise StoreClosed(
            "the broker stopped because its disk failed", hint="see its log; mend the disk and start it again"
        )


def _log_recovery(opened: Opened, seconds: float) -> None:
    report = opened.report
    log.info(
        "broker.recovered", log_id=str(opened.log.log_id), end=report.end, replayed=opened.replayed,
        tables_at=opened.tables.position, seconds=round(seconds, 3),
    )  # fmt: skip
    if report.torn is not None:
        log.warning("recover.torn_tail", **report.torn._asdict())
    for damage in report.quarantined:
        log.error(
            "recover.quarantined", path=damage.path, position=damage.position, end=damage.end, reason=damage.reason
        )
    if opened.tables.rebuilt:
        log.warning("recover.index_rebuilt", reason=opened.tables.reason)


def _wall_clock() -> int:
    return time.time_ns() // 1_000
