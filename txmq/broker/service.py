"""The broker as a whole: built here from its parts, started, drained.

OPENING ─► RECOVERING ─► SERVING ─► DRAINING ─► CLOSED        forward only, each step logged
"""

from __future__ import annotations

import select
import signal
import sys
import time
from enum import IntEnum
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from twisted.internet.defer import Deferred, inlineCallbacks
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.task import deferLater

from txmq.broker.assembly import Assembly
from txmq.broker.catalogues.catalogue_service import catalogue_beside
from txmq.broker.checkback.outbox_publisher import Publisher
from txmq.broker.checkback.resolver_service import Resolving
from txmq.broker.data_directory.disk_space import DiskWatch
from txmq.broker.data_directory.scrub_service import Scrubbing
from txmq.broker.data_directory.storage import Keeper, Opened, open_directory
from txmq.broker.engine import Engine
from txmq.broker.reactor.file_limits import raise_limit
from txmq.broker.reactor.memory import keep_freed
from txmq.broker.reactor.steady_clock import SteadyClock
from txmq.broker.reactor.threads import Threads
from txmq.config.listen import ListenAddress, listen_address
from txmq.core.transactions import undecided
from txmq.store.fs import RealFileSystem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from twisted.python.failure import Failure

    from txmq.broker.alarms.alarms import Alarms
    from txmq.broker.calls.control import Calls
    from txmq.broker.checkback.listeners import Watching
    from txmq.broker.checkback.resolver_service import Resolves
    from txmq.config.broker import Settings

    Edge = Callable[["Parts"], Awaitable[Any]]  # begins to listen, and gives an IListeningPort

BACKLOG = 1_024  # connections that the kernel holds until they are accepted
SWITCH_INTERVAL_S = 0.0005  # beside an index writer: tick p99 from 5.8 to 3.2 ms (ARCHITECTURE 1)
QUICK_DISK_S = 0.0005  # with threads for it, 64 senders get 13 % less done, and 4 get 36 % less
KEEP_S = 0.2
DISK_S = 1.0  # between two looks at the space that is left
CLOCK_S = 0.05  # how late a wall clock that was put back may be noticed
TOKENS_S = 3_600.0  # between two looks at the token tables, whose partitions are days
PROBE_S = 5.0  # between two looks at databases that failed
OUTBOX_S = 0.5  # between two looks at outboxes that were found empty
LOOK_EVERY_S = 0.005  # while draining
FAREWELL_S = 2.0  # for clients to take their last replies
THREADS_END_S = 5.0  # for calls under way in threads, after the log and its tables are closed
log = structlog.get_logger()


class Life(IntEnum):
    """Where the broker is in its life."""

    OPENING = 1
    RECOVERING = 2
    SERVING = 3
    DRAINING = 4
    CLOSED = 5


class Parts(NamedTuple):
    """What an edge of the broker, such as the admin pages, may work with."""

    engine: Engine
    calls: Calls
    settings: Settings
    watching: Watching
    alarms: Alarms
    resolving: Resolves
    reactor: Any  # several interfaces of Twisted's


class BrokerService:
    """One broker in one process. `start` and `stop` are called once each, in the
    reactor's thread.

    `edges` begin to listen once the broker serves, and are the first that is closed
    when it drains.
    """

    def __init__(self, settings: Settings, reactor: Any, edges: Iterable[Edge] = ()) -> None:  # as above
        self._settings, self._reactor, self._edges = settings, reactor, tuple(edges)
        self.life = Life.OPENING
        self.drained = True  # but where it ended with records that never got to the disk
        self._ports: list[Any] = []  # IListeningPorts, the broker's own first
        self._threads = {
            name: Threads(reactor, f"txmq-{name}")
            for name in ("log", "index", "scrub", "catalogue")
        }
        self._threads["resolver"] = Threads(
            reactor, "txmq-resolver", max(1, len(settings.resolver))
        )

    def open(self) -> None:
        """Open the data directory and recover; blocks. Raises StoreError, and starts
        nothing then.
        """
        settings = self._settings.broker
        self._to(Life.RECOVERING)
        began, fs = time.monotonic(), RealFileSystem()
        opened = open_directory(fs, settings, _wall_clock())
        _log_recovery(opened, time.monotonic() - began)
        flush = None if settings.flush == "sync" else settings.flush
        clock = SteadyClock(_wall_clock, time.monotonic, opened.state.stored_at)
        engine = Engine(
            opened.log, opened.state, clock=self._reactor, now=clock, in_thread=self._threads["log"], flush=flush,
            soon=getattr(self._reactor, "soon", None), quick_s=QUICK_DISK_S,
        )  # fmt: skip
        engine.on_failure = self._failed
        watch = DiskWatch(fs, str(settings.data), engine.disk, self._settings.disk)
        watch.tick()
        engine.boot(settings.name)
        self._engine = engine
        self._keeper = Keeper(fs, engine, opened.tables, settings, self._threads["index"])
        self._resolving = Resolving(
            self._settings.resolver,
            engine.store.log_id,
            self._threads["resolver"],
            engine.now,
            name=settings.name,
            publish=Publisher(engine, settings, self._reactor),
        )
        self._assembly = Assembly(engine, self._settings, self._reactor, self._resolving, Random())  # jitter
        archive = self._settings.retention.archive or settings.data / "archive"
        self._keeper.remove_for(self._assembly.retaining, str(archive))
        self._assembly.every(CLOCK_S, clock.look)
        self._assembly.every(KEEP_S, self._keeper.tend)
        self._making = catalogue_beside(
            fs, str(settings.data), opened, self._assembly.cataloguing, self._threads["catalogue"]
        )
        self._scrubbing = Scrubbing(
            engine, self._settings.scrub, self._reactor, self._threads["scrub"]
        )
        self._assembly.every(DISK_S, watch.tick)
        self._assembly.every(TOKENS_S, self._look_after_tokens)
        self._assembly.every(PROBE_S, self._probe)
        self._assembly.every(OUTBOX_S, self._resolving.fetch)

    def _look_after_tokens(self) -> None:
        self._resolving.upkeep(undecided.oldest(self._engine.state))

    def _probe(self) -> None:
        if self._resolving.upkeep_owed:
            self._look_after_tokens()
        self._resolving.probe()

    async def start(self) -> str:
        """Begin to serve; returns the address. `open` must have succeeded."""
        host, port = listen_address(self._settings.broker.listen)
        endpoint = TCP4ServerEndpoint(
            self._reactor, port, backlog=BACKLOG, interface=host
        )  # an IPv6 address does, too
        main: Any = await endpoint.listen(self._assembly.sessions)
        self._ports.append(main)
        self._assembly.start(self._failed)
        self._scrubbing.start()
        self._look_after_tokens()  # which also finds out to which databases the resolvers lead
        self._to(Life.SERVING)
        assembly = self._assembly
        parts = Parts(
            self._engine, assembly.calls, self._settings, assembly.watching, assembly.alarms, self._resolving,
            self._reactor,
        )  # fmt: skip
        for edge in self._edges:
            self._ports.append(await edge(parts))
        address = main.getHost()
        return f"txmq://{ListenAddress(address.host, address.port)}"

    @inlineCallbacks
    def stop(self) -> Any:  # a Deferred, called by the reactor's shutdown
        """Drain: take nothing new, bring everything to disk, answer it, close."""
        if self.life >= Life.DRAINING:
            return
        self._to(Life.DRAINING)
        yield self._drain().addErrback(self._failed)
        self._engine.store.close()
        for name, threads in self._threads.items():
            if not threads.stop(THREADS_END_S):
                log.error("broker.thread_hangs", thread=name)
        self._to(Life.CLOSED)

    @inlineCallbacks
    def _drain(self) -> Any:  # a Deferred
        sessions = self._assembly.sessions
        for port in reversed(self._ports):
            yield port.stopListening()
        self._assembly.stop()
        self._scrubbing.stop()
        self._making.stop()
        sessions.deafen()
        deadline = self._reactor.seconds() + self._settings.broker.drain_s
        yield self._until(self._settled, deadline)
        sessions.close()
        yield self._until(lambda: sessions.closed, self._reactor.seconds() + FAREWELL_S)
        yield self._until(self._settled, deadline)  # a resolver may have answered meanwhile
        if self._engine.failed is None and self._settled():
            self._keeper.close()
        elif self._engine.failed is None:
            self.drained = self._engine.settle()
            log.error(
                "broker.not_drained", durable=self._engine.store.durable, end=self._engine.store.end
            )

    def _settled(self) -> bool:
        return self._engine.settle() and not self._keeper.busy

    @inlineCallbacks
    def _until(self, condition: Callable[[], bool], deadline: float) -> Any:  # a Deferred
        """Looks now and then until it holds, the time is up, or the engine has failed:
        then nothing settles any more.

        The caller goes on in the same turn of the reactor that saw it hold.
        """
        while (
            self._engine.failed is None and not condition() and self._reactor.seconds() < deadline
        ):
            yield deferLater(self._reactor, LOOK_EVERY_S)

    def _failed(self, failure: Failure) -> None:
        """Without its disk, or with a bug in its heart, the broker is of no use: what
        it knows is in the log.
        """
        log.critical(
            "broker.failed", error=failure.getErrorMessage(), traceback=failure.getTraceback()
        )
        self._engine.failed = self._engine.failed or failure
        if self.life < Life.DRAINING and self._reactor.running:
            self._reactor.stop()

    def _to(self, life: Life) -> None:
        assert life > self.life, "a broker's life goes forward only"
        self.life = life
        log.info("broker.life", state=life.name)

    @property
    def failed(self) -> bool:
        """Whether the broker stopped because it could not go on."""
        return self._engine.failed is not None


def run(settings: Settings, *, ready: Callable[[str], None], edges: Iterable[Edge] = ()) -> None:
    """Run a broker until SIGTERM or SIGINT; `ready` gets its address once it and its
    `edges` serve.

    Raises what opening the data directory or listening raises, and StoreError where the
    broker had to stop.
    """
    from txmq.errors import StoreClosed

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed()
    raise_limit()
    the_reactor = _reactor()
    the_reactor.seconds = (
        time.monotonic
    )  # Twisted's timers go by the wall clock: put back, they would all stand still
    service = BrokerService(settings, the_reactor, edges)
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
            "the broker stopped because its disk failed",
            hint="see its log; mend the disk and start it again",
        )
    if not service.drained:
        raise StoreClosed(
            "the broker ended before all was on disk; what was not has had no answer",
            hint="free space on its disk",
        )


def _reactor() -> Any:  # several interfaces of Twisted's
    """A composition root: here the one reactor is chosen."""
    if hasattr(select, "epoll"):
        from txmq.broker.reactor.epoll_reactor import install  # not everywhere

        return install()
    from twisted.internet import reactor  # makes one

    return reactor


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
            "recover.quarantined",
            path=damage.path,
            position=damage.position,
            end=damage.end,
            reason=damage.reason,
        )
    if opened.tables.rebuilt:
        log.warning("recover.index_rebuilt", reason=opened.tables.reason)


def _wall_clock() -> int:
    return time.time_ns() // 1_000
