"""The broker as a whole: built from its services, started, drained.

OPENING -> RECOVERING -> SERVING -> DRAINING -> CLOSED    forward only, logged
"""

from __future__ import annotations

import time
from enum import IntEnum
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlencode
from uuid import UUID

import structlog
from twisted.internet.defer import Deferred, inlineCallbacks, succeed
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.task import LoopingCall, deferLater

from txmq.broker.access.guard import NODES, OWN_USER
from txmq.broker.assembly import Assembly
from txmq.broker.checkback.resolver_service import ResolverService
from txmq.broker.data_directory.directory_id import directory_id
from txmq.broker.data_directory.private_files import require_private
from txmq.broker.data_directory.retention_service import RetentionService
from txmq.broker.data_directory.scrub_service import ScrubService
from txmq.broker.data_directory.storage import OpenedDirectory, StorageService, open_directory
from txmq.broker.data_directory.stored_reports import StoredReports
from txmq.broker.engine.disk_space import DiskWatch
from txmq.broker.engine.engine import Engine
from txmq.broker.monitoring.liveness import Liveness
from txmq.broker.reactor.connection_limits import BACKLOG
from txmq.broker.reactor.steady_clock import THIS_MACHINE, MachineClocks, SteadyClock
from txmq.broker.reactor.threads import WorkerThreads
from txmq.broker.requests.outbox_publisher import OutboxPublisher
from txmq.broker.search.catalogue_service import build_beside
from txmq.config.listen import ListenAddress, is_loopback, listen_address
from txmq.core.disk_budget import DiskBudget
from txmq.core.state import restores
from txmq.core.transactions import indexes
from txmq.errors import ConfigError, StoreClosed
from txmq.errors.extras import require
from txmq.model.units import MIB
from txmq.store.filesystem import RealFileSystem
from txmq.store.log_copy import CopyNeeded
from txmq.tx.postgres.brokers import DatabaseLease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from twisted.python.failure import Failure

    from txmq.broker.access.guard import Guard
    from txmq.broker.calls.dispatcher import CallDispatcher
    from txmq.broker.checkback.resolvers import Resolvers
    from txmq.broker.checkback.transaction_listeners import TransactionListeners
    from txmq.broker.cluster.own_node import OwnNode
    from txmq.broker.cluster.reception import Reception
    from txmq.broker.delivery.group_paces import GroupPaces
    from txmq.broker.engine.turn_work import TurnWork
    from txmq.broker.monitoring.alarms import AlarmService
    from txmq.broker.monitoring.cluster_node import ClusterNode
    from txmq.broker.reactor.held_sends import HeldSends
    from txmq.broker.reactor.session_factory import SessionFactory
    from txmq.config.broker import SettingsFile, TlsSettings
    from txmq.store.backup import BackupSource
    from txmq.store.filesystem import FileSystem
    from txmq.store.log.decoder import Damage

QUICK_DISK_S = 0.0005  # with threads for it, 64 senders get 13 % less done, and 4 get 36 % less
STORAGE_S = 0.2
DISK_S = 1.0  # between measurements of the disk's space
TOKENS_S = 3_600.0  # between upkeeps of the token tables, whose partitions are days
PROBE_S = 5.0  # between probes of databases that failed
LIVENESS_S = 1.0  # between the broker's requests to itself
ALARM_THREADS = 4  # for receivers of alarms, which may not answer
OUTBOX_S = 0.5  # between reads of outboxes that were empty
DRAIN_POLL_S = 0.005  # while draining
FAREWELL_S = 2.0  # for clients to read their last replies
THREADS_END_S = 5.0  # for calls under way in threads, after the log and its tables are closed
log = structlog.get_logger()


class Lifecycle(IntEnum):
    """The stages of a broker's life."""

    OPENING = 1
    RECOVERING = 2
    SERVING = 3
    DRAINING = 4
    CLOSED = 5


class BrokerParts(NamedTuple):
    """The parts of a broker that an edge, such as the admin pages, may use."""

    engine: Engine
    calls: CallDispatcher
    settings: SettingsFile
    listeners: TransactionListeners
    alarms: AlarmService
    resolvers: Resolvers
    reactor: Any  # several interfaces of Twisted's
    liveness: Liveness
    turns: TurnWork
    guard: Guard
    sends: HeldSends
    certificates: Any = None  # of TLS (txmq.broker.reactor.tls), where there is any
    paces: GroupPaces | None = None  # None in tests of pages alone
    cluster: ClusterNode | None = None  # None for a broker alone


class FollowerParts(NamedTuple):
    """The parts of a node that an edge may use until the node leads."""

    engine: Engine
    settings: SettingsFile
    reactor: Any  # several interfaces of Twisted's
    guard: Guard
    certificates: Any  # of TLS, where there is any
    cluster: ClusterNode


class Edge(Protocol):
    """A server beside the broker's, such as that of the admin pages. Both methods give
    an IListeningPort, the same one where both are called.
    """

    async def follow(self, parts: FollowerParts) -> Any:  # noqa: ANN401
        """Begin to listen at a node that follows."""

    async def __call__(self, parts: BrokerParts) -> Any:  # noqa: ANN401
        """Begin to listen, or go on, at a broker that serves."""


class BrokerService:
    """One broker in one process. `start` and `stop` are called once each, in the
    reactor's thread.

    `edges` begin to listen once the broker serves, and are the first to close when it
    drains. `load` reads the settings again.
    """

    def __init__(
        self,
        settings: SettingsFile,
        reactor: Any,  # noqa: ANN401  # several interfaces of Twisted's
        edges: Iterable[Edge] = (),
        clocks: MachineClocks = THIS_MACHINE,
        load: Callable[[], SettingsFile] | None = None,
    ) -> None:
        self._load = load
        self._settings, self._reactor, self._edges = settings, reactor, tuple(edges)
        self._clocks = clocks
        self.life = Lifecycle.OPENING
        self.drained = True  # False where the broker ended with records not on disk
        self.on_follow: Callable[[], None] = lambda: None  # a node has read the log
        # opens the log of the broker at a URL; None = a node copies nothing by itself
        self.log_at: Callable[[str], AbstractContextManager[BackupSource]] | None = None
        self.own_url = ""  # for clients within this process, once it serves
        self._cluster: OwnNode | None = None
        self._certificates: Any = None  # of TLS
        self._ports: list[Any] = []  # IListeningPorts, the broker's own first
        self._threads = {
            name: WorkerThreads(reactor, f"txmq-{name}")
            for name in ("log", "index", "scrub", "catalogue")
        }
        self._threads["alarms"] = WorkerThreads(reactor, "txmq-alarms", ALARM_THREADS)
        self._threads["resolver"] = WorkerThreads(
            reactor, "txmq-resolver", max(1, len(settings.resolver))
        )

    def open(self) -> None:
        """Open the data directory and recover; blocks. Raises StoreError and
        ConfigError, and has started nothing then.
        """
        settings = self._settings.broker
        self._advance(Lifecycle.RECOVERING)
        require_private(settings.data)
        began, fs = time.monotonic(), RealFileSystem()
        partition = None if self._settings.cluster is None else self._join_cluster()
        opened = self._opened = self._open_directory(fs, partition)
        _log_recovery(opened, time.monotonic() - began)
        self._steady = SteadyClock(*self._clocks, opened.state.stored_at)
        engine = self._engine = self._make_engine()
        if opened.tables.rebuilt:
            engine.faults.note_rebuilt(opened.tables.reason)
        self._watch = DiskWatch(fs, str(settings.data), engine.disk, self._settings.disk)
        self._watch.tick()
        self._storage = StorageService(fs, engine, opened.tables, settings, self._threads["index"])
        self._scrub = ScrubService(
            engine, self._settings.scrub, self._reactor, self._threads["scrub"]
        )
        if self._cluster is None:
            engine.boot(settings.name, self._clocks.wall())
            self._assemble()
        else:
            self._storage.place = self._cluster.copy_to(engine, opened.tables)

    def _open_directory(self, fs: FileSystem, partition: OwnNode | None) -> OpenedDirectory:
        """Open the data directory; a node copies first what it lacks."""
        settings, now = self._settings.broker, self._clocks.wall()
        try:
            return open_directory(fs, settings, now, partition)
        except CopyNeeded as needed:
            if partition is None or self.log_at is None:
                raise
            log.warning("copy.needed", reason=needed.message)
            partition.copy_log(fs, settings.data, needed.keep, self._log_of_node)
        return open_directory(fs, settings, now, partition)

    def _log_of_node(self, address: str, password: str) -> AbstractContextManager[BackupSource]:
        """Return the log of another node, which has the same settings."""
        assert self.log_at is not None, "somebody knows how to read it"
        tls, login = self._settings.tls, f"{NODES}:{password}"
        if tls is None:
            return self.log_at(f"txmq://{login}@{address}")
        files = {} if self._settings.cluster is None else {"ca": self._settings.cluster.ca}
        if tls.require_client_cert:
            files |= {"cert": tls.cert, "key": tls.key}
        named = {name: str(file) for name, file in files.items() if file is not None}
        return self.log_at(f"txmqs://{login}@{address}/?{urlencode(named)}")

    def _join_cluster(self) -> OwnNode:
        """Look at the cluster's topic, and become one of its nodes."""
        assert self._settings.cluster is not None
        from txmq.broker.cluster.own_node import OwnNode  # noqa: PLC0415  # an extra

        self._cluster = OwnNode(
            self._settings.cluster,
            self._settings.broker.name,
            self._settings.cluster.advertise or self._settings.broker.listen,
            self._reactor,
            self._failed,
        )
        return self._cluster

    async def _lead(self, cluster: OwnNode) -> None:
        """Follow the cluster's log until this node leads it. Meanwhile it says who
        does.
        """
        retention = RetentionService(
            self._engine, self._settings.retention, self._reactor, decides=False
        )
        self._storage.remove_segments(retention, self._archive)
        loops = [
            self._every(STORAGE_S, self._storage.tick),
            self._every(DISK_S, self._watch.tick),
            self._every(self._settings.retention.every_s, retention.tick),
        ]
        await cluster.follow()
        self._scrub.mend = self._mend
        self._scrub.start()
        reception = await self._receive(cluster)
        self.on_follow()
        place = await cluster.lead()
        retention.stop()
        self._scrub.mend = None
        for loop in loops:
            loop.stop()
        self._storage.forget_before = cluster.forget_before
        engine = self._engine
        engine.state.boot_epoch = place.epoch - 1
        engine.boot(self._settings.broker.name, self._clocks.wall())
        booted: Deferred[object] = Deferred()
        engine.answer_when_durable(booted.callback, None)
        await booted
        await cluster.lease()
        self._assemble()
        reception.sessions.close()

    async def _receive(self, cluster: OwnNode) -> Reception:
        """Begin to listen, at all ports of this node, for those who ask who leads."""
        from txmq.broker.cluster.reception import Reception  # noqa: PLC0415  # an extra

        reception = Reception(self._engine, self._settings, self._reactor, cluster)
        await self._listen(reception.sessions, reception.guard)
        parts = FollowerParts(
            self._engine,
            self._settings,
            self._reactor,
            reception.guard,
            self._certificates,
            cluster,
        )
        for edge in self._edges:
            self._ports.append(await edge.follow(parts))
        return reception

    def _every(self, seconds: float, function: Callable[[], None]) -> LoopingCall:
        loop = LoopingCall(function)
        loop.clock = self._reactor
        loop.start(seconds, now=False).addErrback(self._failed)
        return loop

    def _assemble(self) -> None:
        """Build what serves clients, behind the boot."""
        settings, engine = self._settings.broker, self._engine
        self._resolvers = self._make_resolvers()
        self._assembly = Assembly(
            engine,
            self._settings,
            self._reactor,
            self._resolvers,
            Random(),  # noqa: S311  # jitter
            self._steady,
            self._cluster,
        )
        self._assembly.alarms.delivery.in_thread = self._threads["alarms"]
        self._assembly.log.in_thread = self._threads["scrub"]
        if self._cluster is not None:
            engine.lease = self._cluster.has_lease
            self._assembly.sessions.use_lease(engine.lease)
            self._cluster.on_lease = self._assembly.sessions.go_on
            self._cluster.on_nodes = self._assembly.sessions.welcome_again
            self._assembly.guard.admit_nodes(self._cluster.password)
        if settings.otel:
            from txmq.broker.monitoring.spans import BrokerSpans, find_tracer  # noqa: PLC0415  # an extra

            BrokerSpans(engine, find_tracer())
        self._connect()
        self._catalogue_builder = build_beside(
            RealFileSystem(),
            str(settings.data),
            self._opened,
            self._assembly.catalogues,
            self._threads["catalogue"],
        )
        self._liveness = Liveness(engine, self._assembly.sessions, self._reactor)
        self._add_timers()

    def _mend(self, damages: list[Damage]) -> Deferred[list[Damage]]:
        """Mend spans of this node's copy with what the leader has."""
        from txmq.broker.cluster.leaders_log import mend_from  # noqa: PLC0415  # an extra

        leader = None if self._cluster is None else self._cluster.leader()
        if leader is None or self.log_at is None:
            return succeed([])
        given = (RealFileSystem(), self._settings.broker.data, damages, leader, self._log_of_node)
        return self._threads["scrub"](mend_from, *given)

    def _make_engine(self) -> Engine:
        settings = self._settings.broker
        engine = Engine(
            self._opened.log,
            self._opened.state,
            clock=self._reactor,
            now=self._steady,
            in_thread=self._threads["log"],
            flush=None if settings.flush == "sync" else settings.flush,
            after_reads=getattr(self._reactor, "after_reads", None),
            quick_s=QUICK_DISK_S,
        )
        engine.budget = DiskBudget(self._settings.limits.unflushed_mib * MIB)
        engine.on_failure = self._failed
        return engine

    def _make_resolvers(self) -> ResolverService:
        engine, settings = self._engine, self._settings.broker
        log_id = engine.store.log_id
        # Nodes of a cluster are one broker: the boot epoch tells which one leads. A log
        # that was restored is another broker's, until an operator has said otherwise.
        alone, incarnation = self._cluster is None, restores.incarnation(engine.state)
        shared = log_id if incarnation is None else UUID(bytes=incarnation)
        directory = directory_id(settings.data) if alone else shared
        return ResolverService(
            self._settings.resolver,
            log_id,
            self._threads["resolver"],
            engine.now,
            name=settings.name,
            publish=OutboxPublisher(engine, settings, self._reactor),
            lease=DatabaseLease(log_id, directory, engine.state.boot_epoch),
            memory=StoredReports(settings.data) if alone else None,
        )

    @property
    def _archive(self) -> str:
        return str(self._settings.retention.archive or self._settings.broker.data / "archive")

    def _connect(self) -> None:
        """Have the services of disks and databases know those of the assembly."""
        assembly, checks = self._assembly, self._assembly.checks
        self._resolvers.on_recheck(checks.database_is_back, checks.check_now)
        self._storage.remove_segments(assembly.retention, self._archive, assembly.holds)
        assembly.bound_background_work(self._storage.has_room)
        assembly.reloading.register("disk", self._watch.use, fixed=("ballast_mib",))
        assembly.reloading.load = self._load

    def _add_timers(self) -> None:
        for seconds, function in (
            (STORAGE_S, self._storage.tick),
            (DISK_S, self._watch.tick),
            (LIVENESS_S, self._liveness.tick),
            (TOKENS_S, self._maintain_tokens),
            (PROBE_S, self._probe),
            (OUTBOX_S, self._resolvers.fetch_outboxes),
        ):
            self._assembly.add_timer(seconds, function)

    def _maintain_tokens(self) -> None:
        engine = self._engine
        self._resolvers.upkeep(indexes.oldest_by_database(engine.state), engine.certain())

    def _probe(self) -> None:
        if self._resolvers.upkeep_owed:
            self._maintain_tokens()
        self._resolvers.probe()

    async def start(self) -> str:
        """Begin to serve, after `open`. Return the address. A node of a cluster serves
        once it leads.
        """
        if self._cluster is not None:
            await self._lead(self._cluster)
        main = await self._listen(self._assembly.sessions, self._assembly.guard)
        self._assembly.alarms.certificates = self._certificates
        self._assembly.start(self._failed)
        if self._cluster is None:  # a node has begun before
            self._scrub.start()
        self._maintain_tokens()  # and so identify the resolvers' databases
        self._advance(Lifecycle.SERVING)
        assembly = self._assembly
        parts = BrokerParts(
            self._engine,
            assembly.calls,
            self._settings,
            assembly.listeners,
            assembly.alarms,
            self._resolvers,
            self._reactor,
            self._liveness,
            assembly.turns,
            assembly.guard,
            assembly.sessions.sends,
            self._certificates,
            assembly.paces,
            self._cluster,
        )
        for edge in self._edges:
            port = await edge(parts)
            if port not in self._ports:
                self._ports.append(port)
        bound = main.getHost()
        address = ListenAddress(bound.host, bound.port)
        self.own_url = self._url_inside(address)
        return f"{'txmq' if self._settings.tls is None else 'txmqs'}://{address}"

    async def _listen(self, sessions: SessionFactory, guard: Guard) -> Any:  # noqa: ANN401  # an IListeningPort
        """Have these sessions take the connections to the broker's port from now on.
        Raises ConfigError.
        """
        refuse_exposed(self._settings, has_users=guard.has_users)
        tls = self._settings.tls
        factory: Any = sessions if tls is None else self._encrypted(tls, sessions, guard)
        if self._ports:  # a node that followed has it
            self._ports[0].factory = factory
        else:
            host, port = listen_address(self._settings.broker.listen)
            # this class takes IPv6 addresses as well
            endpoint = TCP4ServerEndpoint(self._reactor, port, backlog=BACKLOG, interface=host)
            self._ports.append(await endpoint.listen(factory))
        return self._ports[0]

    def _encrypted(self, tls: TlsSettings, sessions: SessionFactory, guard: Guard) -> Any:  # noqa: ANN401  # a factory of Twisted's
        """Return the factory of encrypted sessions. Raises ConfigError."""
        require("tls", "OpenSSL")
        from txmq.broker.reactor.tls import (  # noqa: PLC0415  # an extra
            Certificates,
            TlsFactory,
            certificate_name,
        )

        self._certificates = Certificates(tls, self._reactor)
        if tls.client_ca is not None:
            guard.certificate_name = lambda transport: certificate_name(transport, tls.user_from)
        return TlsFactory(self._certificates, sessions, self._reactor)

    def _url_inside(self, address: ListenAddress) -> str:
        """Return the URL for clients within this process, with a login of their own."""
        wildcard = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # it listens there
        place = address._replace(host=wildcard.get(address.host, address.host))
        login = f"{OWN_USER}:{self._assembly.guard.own_password}"
        tls = self._settings.tls
        if tls is None:
            return f"txmq://{login}@{place}"
        return f"txmqs://{login}@{place}/?{urlencode({'ca': str(tls.cert), 'verify': 'ca'})}"

    @inlineCallbacks
    def stop(self) -> Any:  # noqa: ANN401  # a Deferred, called by the reactor's shutdown
        """Drain: take no new requests, bring everything to disk, answer it, and
        close.
        """
        if self.life >= Lifecycle.DRAINING:
            return
        follows = self._cluster is not None and self.life < Lifecycle.SERVING
        self._advance(Lifecycle.DRAINING)
        self._scrub.stop()
        if follows:
            for port in self._ports:
                yield port.stopListening()
        else:
            yield self._drain().addErrback(self._failed)
        # Before the tables are brought to disk: another node need not wait for that.
        if self._cluster is not None:
            yield Deferred.fromCoroutine(self._cluster.leave())
        yield self._close_tables().addErrback(self._failed)
        self._end_threads("log")  # a node's last flush may still be written
        self._engine.store.close()
        self._end_threads(*self._threads)
        self._advance(Lifecycle.CLOSED)

    def _end_threads(self, *names: str) -> None:
        for name in names:
            if not self._threads.pop(name).stop(THREADS_END_S):
                log.error("broker.thread_hangs", thread=name)

    @inlineCallbacks
    def _drain(self) -> Any:  # noqa: ANN401  # a Deferred
        sessions = self._assembly.sessions
        for port in reversed(self._ports):
            yield port.stopListening()
        self._assembly.stop()
        self._catalogue_builder.stop()
        sessions.ignore_requests()
        deadline = self._reactor.seconds() + self._settings.broker.drain_s
        yield self._until(self._settled, deadline)
        sessions.close()
        yield self._until(lambda: sessions.all_closed, self._reactor.seconds() + FAREWELL_S)
        yield self._until(self._settled, deadline)  # a resolver may have answered meanwhile
        if self._engine.failed is None and not self._settled():
            self.drained = self._engine.try_drain()
            log.error(
                "broker.not_drained", durable=self._engine.store.durable, end=self._engine.store.end
            )

    @inlineCallbacks
    def _close_tables(self) -> Any:  # noqa: ANN401  # a Deferred
        """Bring the tables to disk. The boot of a node that has served nobody, and what
        came after it has left, may not be certain to count; then a start reads again
        what they lack.
        """
        deadline = self._reactor.seconds() + self._settings.broker.drain_s
        yield self._until(lambda: not self._storage.busy, deadline)
        is_certain = self._engine.store.end == self._engine.store.durable
        if self._engine.failed is None and is_certain and not self._storage.busy:
            self._storage.close()

    def _settled(self) -> bool:
        return self._engine.try_drain() and not self._storage.busy

    @inlineCallbacks
    def _until(self, condition: Callable[[], bool], deadline: float) -> Any:  # noqa: ANN401  # a Deferred
        """Poll until the condition holds, the time is up, or the engine has failed,
        after which nothing becomes durable.

        The caller continues in the same turn of the reactor in which the condition
        held.
        """
        while (
            self._engine.failed is None and not condition() and self._reactor.seconds() < deadline
        ):
            yield deferLater(self._reactor, DRAIN_POLL_S)

    def _failed(self, failure: Failure) -> None:
        """Stop: a broker without its disk, or whose state differs from its log, is of
        no use. The log has all that it acknowledged.
        """
        self._engine.failed = self._engine.failed or failure
        log.critical(
            "broker.failed", error=failure.getErrorMessage(), traceback=failure.getTraceback()
        )
        if self.life < Lifecycle.DRAINING and self._reactor.running:
            self._reactor.stop()

    def _advance(self, life: Lifecycle) -> None:
        assert life > self.life, "a broker's life goes forward only"
        self.life = life
        log.info("broker.life", state=life.name)

    def reload_settings(self) -> None:
        """Read the settings file again, in the reactor's thread."""
        self._assembly.reloading.on_signal()

    @property
    def hands_over(self) -> bool:
        """True if it ends for another node to lead, and is to follow that one."""
        return self._cluster is not None and self._cluster.hands_over

    def undecided(self) -> Deferred[int]:
        """Return the number of transactions that nobody has decided, once the messages
        of those that are decided can be read.
        """
        counted: Deferred[int] = Deferred()
        self._engine.answer_when_durable(counted.callback, self._engine.state.undecided)
        return counted

    @property
    def failure(self) -> BaseException | None:
        """Return why the engine failed; None if it has not."""
        failed = self._engine.failed
        return None if failed is None else failed.value or StoreClosed("the engine failed")


def refuse_exposed(settings: SettingsFile, *, has_users: bool) -> None:
    """Raise ConfigError where others than this machine could connect, and nothing
    protects the broker; log a warning where the settings say that the network does.
    """
    broker = settings.broker
    for name, text in (("listen", broker.listen), ("http", broker.http)):
        if text is None or is_loopback(listen_address(text).host):
            continue
        missing = [] if has_users else ["users"]
        missing += [] if settings.tls is not None else ["TLS"]
        if not missing:
            continue
        what = " and no ".join(missing)
        if not broker.trusted_network:
            raise ConfigError(
                f"broker.{name}",
                f"{text} can be reached by others, and the broker has no {what}",
                hint="make an admin (txmq user init-admin --data DIR), set [tls] cert and key, or"
                " listen on 127.0.0.1; on a network that you trust: trusted_network = true",
            )
        log.warning(
            "broker.exposed",
            setting=name,
            listen=text,
            missing=what,
            hint="whoever reaches this address can "
            + ("read and change everything" if not has_users else "read what is sent"),
        )


def _log_recovery(opened: OpenedDirectory, seconds: float) -> None:
    report = opened.report
    log.info(
        "broker.recovered",
        log_id=str(opened.log.log_id),
        end=report.end,
        replayed=opened.replayed,
        tables_at=opened.tables.position,
        seconds=round(seconds, 3),
    )
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
