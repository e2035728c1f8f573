"""Messages in transactions of the Python package `transaction` (extra `transaction`).

    from txmq.client.datamanager import join

    with transaction.manager:
        messages = join(client, transaction.manager)
        messages.send("orders", b"...", key="o-1")

The data manager votes by storing the messages durably at the broker, where only this
transaction decides them. It finishes by sending the decision. These two phases leave
room for one manager that commits in one phase; its sort key has to come after "txmq:".

The package has no log of decisions. If the process dies between the votes and the end,
the messages stay prepared at the broker, unseen. `txmq xa list` names them with their
owner and time, and after a while an alarm does. An operator finds out whether the other
managers have committed, and decides the same with `txmq tx commit` or `txmq tx
rollback`. For databases that have to agree with the messages without an operator, use
`client.transaction` or `client.xa`.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from txmq.client.blocking.at_once import CoreAtOnce
from txmq.client.blocking.core import core_of
from txmq.client.blocking.transaction.decisions import await_state, submit_decision
from txmq.client.blocking.transaction.transaction import TransactionOperations
from txmq.client.blocking.transaction.xa_resource import ForeignBundle
from txmq.client.log import get_logger
from txmq.client.protocol.awaited.foreign_branch import ForeignBranch
from txmq.client.protocol.transaction.bundle import BundlePosition
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ClientClosed, ConfigError, RequestTimeout, TxmqError
from txmq.errors.xa import XaProtocol
from txmq.faces import run
from txmq.model.bundle import BundleState
from txmq.model.message import COMMIT, check_name
from txmq.tx.xid import FORMAT, Xid

if TYPE_CHECKING:
    from uuid import UUID

    from txmq.client.blocking.client import Client

GTRID_PREFIX = b"transaction:"  # of the branches made here
log = get_logger()


class PackageTransaction(Protocol):
    """A transaction of the package, which has no types."""

    def join(self, resource: Any) -> None: ...  # noqa: ANN401
    def data(self, ob: object) -> Any: ...  # noqa: ANN401
    def set_data(self, ob: object, data: Any) -> None: ...  # noqa: ANN401


class PackageManager(Protocol):
    """A transaction manager of the package: that of the thread, or an explicit one."""

    def get(self) -> PackageTransaction: ...


class DataManager(TransactionOperations):
    """One client's messages and acks in one transaction of the package. Made by `join`.

    Implements the package's IDataManager and ISavepointDataManager; the transaction
    makes these calls.
    """

    def __init__(self, client: Client, manager: PackageManager, owner: str) -> None:
        core = core_of(client)
        name = new_token()
        bundle, xid = ForeignBundle(core, name), Xid(FORMAT, GTRID_PREFIX + name.hex.encode(), b"")
        self._branch = ForeignBranch(CoreAtOnce(core), bundle, xid, owner)
        super().__init__(bundle)
        self.transaction_manager = manager
        self.ended = False  # nothing more can be sent with it
        self._core = core
        self._key = f"txmq:{owner}:{name.hex}"
        self._decision: Future[bytes] | None = None

    @property
    def token(self) -> UUID:
        """The name of the transaction at the broker."""
        return self._bundle.token

    def sortKey(self) -> str:
        """Return the key by which the package orders the managers."""
        return self._key

    def savepoint(self) -> DataManagerSavepoint:
        """Return a savepoint at the present sends and acks."""
        self._require(Stage.OPEN)
        return DataManagerSavepoint(self, self._bundle.position())

    def abort(self, transaction: object) -> None:
        """Drop everything unless it is committed; `join` then makes a new manager."""
        self.tpc_abort(transaction)

    def tpc_begin(self, transaction: object) -> None:
        """Begin the commit: nothing can be sent any more."""
        del transaction
        self._require(Stage.OPEN)
        self.ended = True

    def commit(self, transaction: object) -> None:
        """Do nothing: the messages go out with the vote."""

    def tpc_vote(self, transaction: object) -> None:
        """Make everything durable at the broker, which is the vote yes.

        An XaError is the vote no.
        """
        del transaction
        if not self._bundle.buffer.empty:
            run(self._branch.store())

    def tpc_finish(self, transaction: object) -> None:
        """Send the decision. Raises nothing: the vote holds, and other managers follow.

        If the broker cannot be reached for the client's `delivery_timeout`, the
        messages stay prepared, as if the process had died.
        """
        del transaction
        if self._bundle.buffer.empty:
            self._branch.finish(committed=True)
            return
        try:
            self._decision = submit_decision(self._core, self.token, COMMIT)
            self._decision.exception(self._core.settings.timeout)
        except (TimeoutError, ClientClosed) as error:
            log.warning("datamanager.late", token=str(self.token), error=str(error))
        if self._decision is not None:
            self._decision.add_done_callback(self._log_outcome)
        self._branch.finish(committed=True)

    def tpc_abort(self, transaction: object) -> None:
        """Roll back what was voted for; do nothing after `tpc_finish`."""
        del transaction
        if self._decision is not None:
            return
        self.ended = True
        try:
            run(self._branch.roll_back())
        finally:
            self._branch.finish(committed=False)

    def wait_published(self, timeout: float = 5.0) -> None:
        """Wait, after the commit, until consumers can see the messages.

        Raises RequestTimeout.
        """
        state = await_state(
            self._core, self.token, BundleState.PUBLISHED, time.monotonic() + timeout
        )
        if state is not BundleState.PUBLISHED:
            raise RequestTimeout(
                f"Transaction {self.token} is not published in time, but "
                f"{state.name if state else 'UNKNOWN'}",
                hint=f"see `txmq tx show {self.token}`",
            )

    def _require(self, stage: Stage) -> None:
        del stage
        if self.ended:
            raise ClientClosed(
                f"The transaction of data manager {self._key} is over",
                hint="call join(client, manager) in the current transaction",
            )

    def _log_outcome(self, decision: Future[bytes]) -> None:
        error = decision.exception()
        if isinstance(error, TxmqError):
            hint = "it stays prepared, or an operator has decided it: see `txmq xa list`"
            log.critical(
                "datamanager.not_committed", token=str(self.token), error=error.message, hint=hint
            )


class DataManagerSavepoint:
    """The package's IDataManagerSavepoint."""

    def __init__(self, manager: DataManager, position: BundlePosition) -> None:
        self._manager, self._position = manager, position

    def rollback(self) -> None:
        """Withdraw later sends and acks."""
        if self._manager.ended:
            raise XaProtocol(
                "The transaction of this savepoint is over",
                hint="make a savepoint in the current transaction",
            )
        self._manager._bundle.truncate(self._position)  # noqa: SLF001


def join(client: Client, manager: PackageManager, *, owner: str | None = None) -> DataManager:
    """Return this client's data manager in the current transaction, joined if need be.

    The broker lists the messages under the `owner`, by default the client's service.
    Raises ConfigError if there is neither.
    """
    current = manager.get()
    try:
        found: DataManager = current.data(client)
    except KeyError:
        pass
    else:
        if not found.ended:
            return found
    named = owner or client.service
    if named is None:
        raise ConfigError(
            "owner",
            "branches are listed under an owner, and the client has no service",
            hint="give one, such as owner='orders'",
        )
    joined = DataManager(client, manager, check_name(named, "owner"))
    current.join(joined)
    current.set_data(client, joined)
    return joined
