"""Kills a service's own code at each step of a transaction.

    def place_order(url, dsn): ...  # a function of a module: connects, sends, commits

    def test_orders(txmq_crash, txmq_broker, txmq_database):
        for kill in txmq_crash.kills(place_order, txmq_broker.url, txmq_database):
            assert rows(txmq_database) == messages(txmq_broker.url), kill.point

Each time the function runs in a process of its own, which dies by SIGKILL at the next
of txmq's crash points. The test gets it back when every transaction is decided.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from txmq.crashpoints import VARIABLE
from txmq.errors import LocalProtocolError
from txmq.testing.wait import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from txmq.testing.broker_thread import BrokerThread

TRANSACTION: Final = (  # of `client.transaction(connection)` and `client.enlist`
    "tx.before_group", "tx.between_groups", "tx.after_group", "tx.after_token",
    "tx.before_commit", "tx.after_commit", "tx.after_decide", "tx.between_decides",
)  # fmt: skip
XA: Final = (
    "xa.before_group", "xa.after_group", "xa.before_prepare", "xa.between_prepares",
    "xa.after_prepares", "xa.before_decision", "xa.after_decision", "xa.between_commits",
    "xa.after_commits",
)  # fmt: skip
HALF: Final = ("half.after_group", "half.before_decide", "half.after_decide")
LOCAL: Final = ("local.after_group", "local.after_send")  # without a database
INBOX: Final = ("inbox.after_commit",)  # of a consumer
POINTS: Final = (*TRANSACTION, *XA, *HALF, *LOCAL, *INBOX)
STEP_S = 10.0  # of the clock, while something is undecided; first checks come after 6


class Kill(NamedTuple):
    """A process that died. `nth` counts the times that it had passed the point."""

    point: str
    nth: int


class CrashKit:
    """Kills functions at crash points, and waits until a broker has decided what they
    left.
    """

    def __init__(self, broker: BrokerThread) -> None:
        """A function that has not ended after PATIENCE_S seconds fails the test."""
        self._broker = broker
        self.kills_done: list[Kill] = []
        self.missed: list[str] = []

    def kills(
        self,
        work: Callable[..., object],
        *arguments: object,
        points: tuple[str, ...] = POINTS,
        times: int = 1,
    ) -> Iterator[Kill]:
        """Run the work once for each point, and yield each death.

        Points that the work does not reach are skipped, and named in `missed`. With
        `times` a work that repeats itself is killed at the first, the second, … pass of
        each point. Raises LocalProtocolError where nothing was killed at all, where the
        work cannot be started in another process, hangs or fails by itself.
        """
        _require_importable(work, arguments)
        before = len(self.kills_done)
        for point in points:
            for nth in range(1, times + 1):
                if not self._run(work, arguments, f"{point}:{nth}"):
                    if nth == 1:
                        self.missed.append(point)
                    break
                self.settle()
                self.kills_done.append(Kill(point, nth))
                yield self.kills_done[-1]
        if len(self.kills_done) == before:
            raise LocalProtocolError(
                f"{work.__qualname__} reached none of the crash points {', '.join(points)}",
                hint="it must send in a transaction, or consume with an inbox",
            )

    def settle(self) -> None:
        """Let time pass until every transaction is decided."""
        self._broker.catch_up()

        def settled() -> bool:
            if not self._broker.undecided:
                return True
            self._broker.clock.advance(STEP_S)
            return False

        wait_until(settled, what="the transactions of a killed process decided")

    def _run(self, work: Callable[..., object], arguments: tuple[object, ...], armed: str) -> bool:
        """Run the work with a crash point armed; return whether it died there."""
        process = multiprocessing.get_context("spawn").Process(
            target=_armed, args=(armed, work, arguments), daemon=True
        )
        process.start()
        process.join(PATIENCE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise LocalProtocolError(
                f"{work.__qualname__} has not ended after {PATIENCE_S} s",
                hint="let it return by itself, as after a number of messages",
            )
        if process.exitcode not in (0, -signal.SIGKILL):
            raise LocalProtocolError(
                f"{work.__qualname__} failed by itself, with exit status {process.exitcode}",
                hint="its traceback is in the captured standard error",
            )
        return process.exitcode == -signal.SIGKILL


def _armed(armed: str, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    os.environ[VARIABLE] = armed
    work(*arguments)


def _require_importable(work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    try:
        pickle.dumps((work, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LocalProtocolError(
            f"{getattr(work, '__qualname__', work)} cannot run in another process: {error}",
            hint="use a function of a module, with arguments such as URLs and DSNs",
        ) from None
