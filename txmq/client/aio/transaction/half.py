"""Half messages in a block on asyncio: stored before the local work, decided after it.

If the decision never comes, the broker asks the checker: a function that processes of
the service have registered (docs/PROTOCOL.md 1).
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from txmq.client.aio.core import AioCore
from txmq.client.aio.transaction.bundle import AioBundle
from txmq.client.aio.transaction.transaction import AioTransaction
from txmq.client.log import get_logger
from txmq.client.protocol.transaction.half_message import no_service
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.client.protocol.transaction.open_work import begin_work, end_work
from txmq.crashpoints import crashpoint
from txmq.errors import (
    Conflict,
    InDoubt,
    RequestRejected,
    TransactionAborted,
    TxmqError,
    UnknownTransaction,
)
from txmq.model.bundle import BundleState
from txmq.model.decider import ByChecker
from txmq.model.message import COMMIT, ROLLBACK, check_name

CHECKER_HINT = "the broker asks the checker"
log = get_logger()


class HalfTransaction(AioTransaction):
    """A block of sends, then `await tx.prepare()`, then local work.

    The end of the block commits, an exception rolls back. `prepare` returns once the
    half message is durable: if this process dies during the work, the broker asks the
    checker. Without `prepare` the message is stored and committed after the work. A
    crash in between then leaves the work without its message.
    """

    _one_broker_hint = (
        "one broker asks the checker: let a database decide, with client.transaction(connection)"
    )

    def __init__(
        self,
        core: AioCore,
        checker: str,
        *,
        timeout: float,
        check_after: float,
        answer_checks: Callable[[AioCore], None],
    ) -> None:
        super().__init__(core, timeout=timeout, check_after=check_after)
        self._checker = check_name(checker, "checker")
        self._answer_checks = answer_checks
        if not core.settings.service:
            raise no_service()
        self._stored: AioBundle | None = None  # once it may be stored

    async def prepare(self) -> None:
        """Store the half message; nothing can be sent after it.

        Raises as `client.send` does.
        """
        self._require(Stage.OPEN)

        async def store() -> None:
            await self._route_all()
            self._stage = Stage.STORED  # or it may be, so an error sends a rollback
            await self._store()
            if self._stored is not None:
                self._answer_checks(self._stored.core)

        await self._in_full(store())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            end_work(self.token)

    async def _store(self) -> None:
        bundle = self._only_bundle
        if bundle is None:
            return
        self._stored = bundle
        begin_work(self.token, self)
        description = self._description(bundle, ByChecker(self._checker))
        try:
            await bundle.build(description, self._core.seconds() + self._timeout)
            await bundle.send()
            await bundle.await_receipt()
        except RequestRejected:
            if bundle.sent:  # its first parts would hold their keys until they time out
                bundle.send_decision(ROLLBACK)
            raise
        crashpoint("half.after_group")

    async def _commit(self) -> None:
        if self._stage is Stage.OPEN:
            await self._store()
        bundle = self._stored
        if bundle is None:
            return
        crashpoint("half.before_decide")
        try:
            self._deciding = True
            receipt = await bundle.decide(COMMIT, self._timeout)
        except Conflict as conflict:
            raise TransactionAborted(
                conflict.message, hint="the checker or an operator decided first"
            ) from conflict
        except TxmqError as error:
            raise InDoubt(
                f"The decision was not confirmed: {error.message}",
                token=str(self.token),
                hint=CHECKER_HINT,
            ) from error
        crashpoint("half.after_decide")
        bundle.published = receipt.state == BundleState.PUBLISHED

    async def _abort(self) -> None:
        bundle = self._stored
        if self._stage is not Stage.STORED or bundle is None:
            return
        try:
            await bundle.decide(ROLLBACK, self._timeout)
        except UnknownTransaction:  # never stored
            return
        except TxmqError as error:  # logged only: the block raises its own error
            log.warning(
                "transaction.not_rolled_back",
                token=str(self.token),
                error=error.message,
                then=CHECKER_HINT,
            )
