"""Check-backs: the broker asks whether an undecided transaction's local work was done.

The broker asks the process first that has stored the half message, whether or not it
has registered the checker: while the block is open there, the answer is UNKNOWN. Else
it asks any process of the service with the checker. Checkers run beside the wait for
questions, so that a slow one does not keep the broker from learning what is open. An
answer is COMMIT, ROLLBACK or UNKNOWN. Exceptions and other values of a checker become
UNKNOWN with a reason, which operators can see, and the broker asks again later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Generic, TypeVar

from txmq.client.log import get_logger
from txmq.client.protocol.awaited.core import AwaitedCore
from txmq.client.protocol.transaction.checks import (
    ANSWER_S,
    SLOW_S,
    WAIT_MS,
    CheckAnswer,
    Half,
    answer_args,
    answer_of,
    answer_of_failed,
    checked_name,
    halves_in,
    wait_args,
)
from txmq.client.protocol.transaction.open_work import REASON, is_open
from txmq.crashpoints import crashpoint
from txmq.errors import RequestRejected, TxmqError
from txmq.model.message import UNKNOWN

F = TypeVar("F", bound=Callable[[Half], object])
log = get_logger()


class CheckerSteps(ABC, Generic[F]):
    """The checkers registered in this process, and what answers for them."""

    def __init__(self, broker: AwaitedCore) -> None:
        self._broker = broker
        self._lock = Lock()
        self._functions: dict[str, F] = {}
        self._polling = False  # nothing goes on but the wait for questions
        self._stopping = False

    @abstractmethod
    def start(self) -> None:
        """Answer questions about the half messages of this process from now on."""

    @property
    @abstractmethod
    def _busy(self) -> bool:
        """True while checkers run."""

    @abstractmethod
    async def _wait(self, args: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Wait so long for the reply to checks.wait."""

    @abstractmethod
    async def _begin_checkers(self, halves: Sequence[Half]) -> None:
        """Begin `_run_checkers`, and wait for it, but not for slow checkers."""

    @abstractmethod
    def _end_wait(self) -> None:
        """End the wait for questions."""

    async def _decided(self, answer: object) -> object:
        """Return what a checker has decided, given what it has returned."""
        return answer

    def register(self, name: str, function: F) -> None:
        """Answer questions of that checker from now on.

        Raises ConfigError if the client has no service, or LocalProtocolError.
        """
        name = checked_name(self._broker.settings.service, name, function)
        with self._lock:
            new = name not in self._functions
            self._functions[name] = function
            if new and self._polling:  # the wait names the other checkers only
                self._end_wait()
        self.start()

    async def _poll(self) -> None:
        """Wait for questions, and answer them."""
        busy = self._busy
        with self._lock:
            checkers = [] if busy else sorted(self._functions)
            self._polling = not busy
        wait_ms = int(SLOW_S * 1_000) if busy else WAIT_MS
        args = wait_args(self._broker.settings.service, checkers, wait_ms)
        try:
            reply = await self._wait(args, wait_ms / 1_000 + ANSWER_S)
        finally:
            with self._lock:
                self._polling = False
        for_checkers: list[Half] = []
        for half in halves_in(reply):
            if is_open(half.token):
                await self._answer(half, CheckAnswer(UNKNOWN, REASON, open=True))
            elif half.checker in checkers:
                for_checkers.append(half)
            else:
                await self._answer(half, CheckAnswer(UNKNOWN, passed=True))
        if for_checkers:
            await self._begin_checkers(for_checkers)

    async def _run_checkers(self, halves: Sequence[Half]) -> None:
        for half in halves:
            if not self._stopping:
                await self._answer(half, await self._run_checker(half))

    async def _run_checker(self, half: Half) -> CheckAnswer:
        try:
            return answer_of(half, await self._decided(self._functions[half.checker](half)))
        except Exception as error:  # noqa: BLE001  # the user's code may raise anything
            return answer_of_failed(half, error)

    async def _answer(self, half: Half, answer: CheckAnswer) -> None:
        crashpoint("checker.before_answer")
        try:
            await self._broker.call("checks.answer", answer_args(half, answer), within=ANSWER_S)
            crashpoint("checker.after_answer")
        except RequestRejected as refused:
            # The transaction was decided meanwhile; the broker records a conflict.
            log.warning("checkers.answer_refused", token=str(half.token), error=refused.message)
        except TxmqError as error:  # the broker asks again
            log.warning("checkers.not_answered", token=str(half.token), error=error.message)
