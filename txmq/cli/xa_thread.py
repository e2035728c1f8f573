"""Recovery of XA transactions in the broker's process, by a thread that is one of its
clients.

The broker and the recovery do not import each other; this module connects them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from txmq.config.broker import SettingsFile, XaSettings

STOP_TIMEOUT_S: Final = 10.0  # for a pass in progress; ending it halfway does no harm


@contextmanager
def xa_recovery(settings: SettingsFile) -> Iterator[Callable[[str], None]]:
    """Return a function that starts the recovery, given the URL of the serving broker.

    It does nothing where no databases are configured. The recovery stops with the
    block.
    """
    stop = Event()
    threads: list[Thread] = []

    def begin(url: str) -> None:
        if settings.xa.database:
            threads.append(
                Thread(target=_recover, args=(settings.xa, url, stop), name="txmq-xa", daemon=True)
            )
            threads[-1].start()

    try:
        yield begin
    finally:
        stop.set()
        for thread in threads:
            thread.join(STOP_TIMEOUT_S)


def _recover(settings: XaSettings, url: str, stop: Event) -> None:
    import structlog

    from txmq.recover.recoverer import XaRecoverer

    recoverer = XaRecoverer(settings, (url,))
    try:
        recoverer.run(stop)
    except BaseException:
        structlog.get_logger().critical("xa.recovery_failed", exc_info=True)
        raise
    finally:
        recoverer.close()
