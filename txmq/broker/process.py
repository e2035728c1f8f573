"""The broker as a process: its reactor, its signals, and how it ends."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import structlog
from twisted.internet.defer import Deferred

from txmq.broker.reactor.process_limits import collect_rarely, keep_freed_memory, raise_file_limit
from txmq.broker.service import BrokerService
from txmq.errors import NodeEnded, StoreClosed, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from twisted.python.failure import Failure

    from txmq.broker.service import Edge
    from txmq.config.broker import SettingsFile
    from txmq.store.backup import BackupSource

log = structlog.get_logger()
SWITCH_INTERVAL_S = 0.0005  # beside an index writer: tick p99 from 5.8 to 3.2 ms


def run(
    settings: SettingsFile,
    *,
    ready: Callable[[str], None],
    follows: Callable[[], None] = lambda: None,
    edges: Iterable[Edge] = (),
    inside: Callable[[str], None] | None = None,
    load: Callable[[], SettingsFile] | None = None,
    log_at: Callable[[str], AbstractContextManager[BackupSource]] | None = None,
) -> None:
    """Run a broker until SIGTERM or SIGINT. `ready` gets its address once the broker
    and its `edges` serve; a node calls `follows` before, once it may take over.
    `inside` gets a URL with a login for clients in this process. On SIGHUP it reads its
    settings again, by `load`. A node copies a log by `log_at`, of the node at a URL.

    Raises what opening the data directory or listening raises, and StoreError where the
    broker had to stop.
    """
    # Until the reactor takes over: recovery may take minutes.
    signal.signal(signal.SIGTERM, lambda *_frame: sys.exit())
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    raise_file_limit()
    reactor = _choose_reactor()
    # Twisted's timers go by the wall clock: put back, they would all stand still
    reactor.seconds = time.monotonic
    service = BrokerService(settings, reactor, edges, load=load)
    service.on_follow, service.log_at = follows, log_at
    service.open()
    collect_rarely()
    trouble: list[BaseException] = []

    def start() -> None:
        def refused(failure: Failure) -> None:
            trouble.append(failure.value or StoreClosed("the broker could not start"))
            reactor.stop()

        def serves(url: str) -> None:
            ready(url)
            if inside is not None:
                inside(service.own_url)

        Deferred.fromCoroutine(service.start()).addCallbacks(serves, refused)

    reactor.callWhenRunning(start)
    reactor.addSystemEventTrigger("before", "shutdown", service.stop)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, lambda *_frame: reactor.callFromThread(service.reload_settings))
    reactor.run()
    if trouble:
        raise trouble[0]
    _end(service, is_told_to_end=reactor._exitSignal is not None)  # noqa: SLF001  # Twisted's


def _end(service: BrokerService, *, is_told_to_end: bool) -> None:
    """Raise why the broker has ended; a node goes on as a follower where it may."""
    ended = service.failure
    if isinstance(ended, NodeEnded):
        if not ended.may_follow:
            raise ended
        # The signal may come while the node ends, and may itself end it.
        if not is_told_to_end:
            _follow_again(str(ended))
        return
    if ended is not None:
        raise _stopped_by(ended)
    if not service.drained:
        raise StoreClosed(
            "the broker ended before all was on disk; the rest was not acknowledged",
            hint="free space on its disk",
        )
    if service.hands_over and not is_told_to_end:
        _follow_again("an operator had another node lead")


def _follow_again(reason: str) -> None:
    """Go on as a follower, in a new image of this process."""
    log.warning("cluster.follows_again", reason=reason)
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606  # this program


def _stopped_by(failure: BaseException) -> StoreClosed:
    if isinstance(failure, (OSError, StoreError)):
        return StoreClosed(
            f"the broker stopped because its disk failed: {failure}",
            hint="see its log; mend the disk and start it again",
        )
    return StoreClosed(
        f"the broker stopped because of a bug: {type(failure).__name__}: {failure}",
        hint="report what its log says; start it again: the log has all that it acknowledged",
    )


def _choose_reactor() -> Any:  # noqa: ANN401  # several interfaces of Twisted's
    """Return the reactor of this process, of which there is one."""
    if hasattr(select, "epoll"):
        from txmq.broker.reactor.epoll_reactor import install  # noqa: PLC0415  # not everywhere

        return install()
    from twisted.internet import reactor  # noqa: PLC0415  # makes one

    return reactor
