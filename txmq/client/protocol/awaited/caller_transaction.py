"""Transactions on connections that the caller lends, and what he may not do to them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from txmq.client.log import get_logger
from txmq.client.protocol.awaited.block import B, BlockSteps, K
from txmq.errors import LocalProtocolError, TransactionEnded
from txmq.tx.postgres.caller_block import refusal_in
from txmq.tx.postgres.statement_watch import ADVICE, Sends

log = get_logger()


class CallerSteps(BlockSteps[B, K]):
    """A block on connections that the caller lends, each with a `CallerBlock`."""

    @property
    def _sends(self) -> Sends:
        """The sends, for the savepoints of cursors."""
        return Sends(self._mark, self._withdraw_behind)

    async def _finish(self, error: BaseException | None) -> None:
        try:
            await super()._finish(error)
        finally:
            await self._give_back()

    @abstractmethod
    async def _give_back(self) -> None:
        """Roll back what an interrupt has left open, wherever it came."""

    @contextmanager
    def _leaving(self, error: BaseException | None) -> Iterator[None]:
        try:
            yield
        except TransactionEnded as ended:
            if error is None or isinstance(error, Exception):
                raise
            self._parted = True  # and an interrupt goes on
            log.critical("transaction.ended_inside", token=str(self.token), error=ended.message)
        if error is not None and (refusal := refusal_in(error)) is not None:
            self._explain(refusal)

    def _explain(self, refusal: BaseException) -> None:
        """Raise what was hidden by a refused `rollback()`: the error before it.

        `rollback()` after an error is a habit, and the block has rolled back.
        """
        text = f"The block of transaction {self.token} is open: {refusal}"
        hidden = refusal.__context__
        if hidden is None:
            raise LocalProtocolError(text, hint=ADVICE) from refusal
        hidden.add_note(f"{text} ({ADVICE})")
        raise hidden from hidden.__cause__
