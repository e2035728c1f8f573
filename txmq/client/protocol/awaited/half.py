"""The steps of half messages in a block: stored before the work, decided after it.

If the decision never comes, the broker asks the checker: a function that processes of
the service have registered (docs/PROTOCOL.md 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from txmq.client.log import get_logger
from txmq.client.protocol.awaited.block import B, BlockSteps, K
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


class HalfSteps(BlockSteps[B, K]):
    """A block of sends, then the local work."""

    _one_broker_hint = (
        "one broker asks the checker: let a database decide, with client.transaction(connection)"
    )

    def _ask(self, checker: str) -> None:
        """Name the checker. Called once, when the object is made."""
        self._checker = check_name(checker, "checker")
        if not self._core.settings.service:
            raise no_service()
        self._stored: B | None = None  # once it may be stored

    async def _prepare(self) -> None:
        """Store the half message, and answer for it from now on."""
        await self._route_all()
        self._stage = Stage.STORED  # or it may be, so an error sends a rollback
        await self._store()
        if self._stored is not None:
            self._stored.core.answer_checks()

    @contextmanager
    def _leaving(self, error: BaseException | None) -> Iterator[None]:
        del error
        try:
            yield
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
            await bundle.store_all(description, self._core.seconds() + self._timeout)
        except RequestRejected:
            if bundle.sent:  # its first parts would hold their keys until they time out
                bundle.send_decision(ROLLBACK)
            raise
        crashpoint("half.after_group")

    async def _commit(self) -> None:
        if self._stored is None:
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
        if bundle is None:
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
