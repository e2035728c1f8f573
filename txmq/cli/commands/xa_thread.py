"""Recovery of XA transactions beside a broker, in the broker's own process: a thread
that is one of its clients.

Broker and recovery know nothing of one another; this is where they are put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from txmq.config.broker import Settings, Xa

ENDS_WITHIN_S: Final = 10.0  # a pass under way; the thread holds nothing that its end would hurt


@contextmanager
def recovering(settings: Settings) -> Iterator[Callable[[str], None]]:
    """What to call with the broker's URL once it serves: recovery begins, where
    databases are configured for it.
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
            thread.join(ENDS_WITHIN_S)


def _recover(settings: Xa, url: str, stop: Event) -> None:
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
