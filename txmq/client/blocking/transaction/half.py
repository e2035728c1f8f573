"""Transactions that a service answers for: half messages, stored before the local work
and decided after it.

Where the decision never comes, the broker asks a process of the service that has
registered the checker.
"""

from __future__ import annotations

import time

from txmq.client.blocking.core import Core
from txmq.client.blocking.transaction.decisions import decide
from txmq.client.blocking.transaction.transaction import Stage, Transaction
from txmq.client.log import get_logger
from txmq.crashpoints import crashpoint
from txmq.errors import (
    ConfigError,
    Conflict,
    InDoubt,
    TransactionAborted,
    TxmqError,
    UnknownTransaction,
)
from txmq.model.bundle import GroupState
from txmq.model.message import COMMIT, ROLLBACK, check_name

CHECKED = "the broker asks the checker"
log = get_logger()


class HalfTransaction(Transaction):
    """Sends first, then `prepare()`, then the local work: leaving the block commits, an
    exception rolls back.

    `prepare` returns once the half message is durable, so that the broker will ask if
    this process dies in the middle of the work. Without it the message is stored and
    committed at the end of the block, after the work: for work that may be done without
    the message being sent.
    """

    _one_broker = "a checker is asked by one broker; a database decides for several: client.transaction(connection)"

    def __init__(self, core: Core, checker: str, *, timeout: float, check_after: float) -> None:
        super().__init__(core, timeout=timeout, check_after=check_after)
        self._checker = check_name(checker, "checker")
        if not core.settings.service:
            hint = "give the client one: txmq.connect(url, service=...)"
            raise ConfigError("service", "check-backs go to a service", hint=hint)

    def prepare(self) -> None:
        """Stores the half message; nothing more can be sent after it. Raises as
        `client.send`.
        """
        self._require(Stage.OPEN)
        self._stage = Stage.STORED  # from now on it may be, so that a failure is told to the broker
        self._store()

    def _store(self) -> None:
        share = self._share
        if share.empty:
            return
        share.prepare(
            self._description(share, ("checker", self._checker)), time.monotonic() + self._timeout
        )
        share.send()
        share.receipt()
        crashpoint("half.after_group")

    def _commit(self) -> None:
        if self._stage is Stage.OPEN:
            self._store()
        if self._share.empty:
            return
        crashpoint("half.before_decide")
        try:
            receipt = decide(self._core, self.token, COMMIT, timeout=self._timeout)
        except Conflict as conflict:
            raise TransactionAborted(
                conflict.message, hint="its checker or an operator was faster"
            ) from conflict
        except TxmqError as error:
            raise InDoubt(
                f"not decided: {error.message}", token=str(self.token), hint=CHECKED
            ) from error
        crashpoint("half.after_decide")
        self._share.published = receipt.state == GroupState.PUBLISHED

    def _abort(self) -> None:
        if self._stage is not Stage.STORED or self._share.empty:
            return
        try:
            decide(self._core, self.token, ROLLBACK, timeout=self._timeout)
        except UnknownTransaction:  # never stored
            return
        except TxmqError as error:  # the error of the block is the one to raise
            log.warning(
                "transaction.not_rolled_back",
                token=str(self.token),
                error=error.message,
                then=CHECKED,
            )
