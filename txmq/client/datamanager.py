"""Messages in the transactions of the Python package `transaction` (extra
`transaction`), beside its other managers.

    from txmq.client.datamanager import join

    with transaction.manager:
        messages = join(client, transaction.manager)
        messages.send("orders", b"...", key="o-1")

It votes by storing the messages durably at the broker, decided by nobody but this
transaction, and finishes by telling the broker to commit: two phases, with room for one
manager of one phase, which is to sort after "txmq:".

The package keeps no log of its decisions. If the process dies between the votes and the
end, the messages stay prepared at the broker, unseen: `txmq xa list` names them, with
the owner and the time, and after a while an alarm does. An operator looks whether the
other managers have committed, and decides the same: `txmq tx commit` or `txmq tx
rollback`. Databases that must agree with the messages without an operator are what
`client.transaction` and `client.xa` are for.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from txmq.client.blocking.transaction.broker_part import ShareMark
from txmq.client.blocking.transaction.decisions import await_state, submit
from txmq.client.blocking.transaction.foreign import ForeignBranch
from txmq.client.blocking.transaction.transaction import Face, Stage
from txmq.client.log import get_logger
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ClientClosed, ConfigError, RequestTimeout, TxmqError
from txmq.errors.xa import XaProtocol
from txmq.model.bundle import GroupState
from txmq.model.message import COMMIT, check_name
from txmq.tx.xid import FORMAT, Xid

if TYPE_CHECKING:
    from uuid import UUID

    from txmq.client.blocking.client import Client

GTRID = b"transaction:"  # of the branches made here, before their own name
log = get_logger()


class Joined(Protocol):
    """A transaction of the package."""

    def join(self, resource: Any) -> None: ...  # the package's, without types
    def data(self, ob: object) -> Any: ...
    def set_data(self, ob: object, data: Any) -> None: ...


class Manager(Protocol):
    """A transaction manager of the package: for each thread, or explicit."""

    def get(self) -> Joined: ...


class DataManager(Face):
    """One client's messages and acks in one transaction of the package. Made by `join`.

    It implements the package's IDataManager and ISavepointDataManager, whose calls are
    the transaction's to make.
    """

    def __init__(self, client: Client, manager: Manager, owner: str) -> None:
        core = client.core
        name = new_token()
        self._branch = ForeignBranch(core, Xid(FORMAT, GTRID + name.hex.encode(), b""), owner)
        super().__init__(self._branch.share)
        self.transaction_manager = manager
        self.over = False  # nothing more can be sent with it
        self._core = core
        self._key = f"txmq:{owner}:{name.hex}"
        self._told: Future[bytes] | None = None

    @property
    def token(self) -> UUID:
        """The name of the transaction at the broker, in its lists and in message
        ids.
        """
        return self._share.token

    def sortKey(self) -> str:
        """Managers are asked in the order of these keys."""
        return self._key

    def savepoint(self) -> Savepoint:
        """Where the messages and acks stand now."""
        self._require(Stage.OPEN)
        return Savepoint(self, self._share.mark())

    def abort(self, transaction: object) -> None:
        """Drops everything, unless it is committed. The transaction has no manager of
        ours any more: join again.
        """
        self.tpc_abort(transaction)

    def tpc_begin(self, transaction: object) -> None:
        """Nothing more can be sent."""
        del transaction
        self._require(Stage.OPEN)
        self.over = True

    def commit(self, transaction: object) -> None:
        """Everything is kept already; it goes out with the vote."""

    def tpc_vote(self, transaction: object) -> None:
        """Yes: everything is durable at the broker. No is an XaError, which says
        why.
        """
        del transaction
        if not self._share.empty:
            self._branch.store()

    def tpc_finish(self, transaction: object) -> None:
        """Tells the broker. It raises nothing: what was voted for holds, and the other
        managers have to finish, too.

        Where the broker cannot be told for as long as the client's `delivery_timeout`,
        the messages stay prepared, as if the process had died.
        """
        del transaction
        if self._share.empty:
            self._branch.over(committed=True)
            return
        try:
            self._told = submit(self._core, self.token, COMMIT)
            self._told.exception(self._core.settings.timeout)
        except (TimeoutError, ClientClosed) as error:
            log.warning("datamanager.late", token=str(self.token), error=str(error))
        if self._told is not None:
            self._told.add_done_callback(self._note)
        self._branch.over(committed=True)

    def tpc_abort(self, transaction: object) -> None:
        """Rolls back what was voted for. After the end it does nothing: what is
        committed stays so.
        """
        del transaction
        if self._told is not None:
            return
        self.over = True
        try:
            self._branch.withdraw()
        finally:
            self._branch.over(committed=False)

    def wait_published(self, timeout: float = 5.0) -> None:
        """After the commit: returns once consumers can see the messages. Raises
        RequestTimeout.
        """
        state = await_state(
            self._core, self.token, GroupState.PUBLISHED, time.monotonic() + timeout
        )
        if state is not GroupState.PUBLISHED:
            told = state.name if state else "UNKNOWN"
            raise RequestTimeout(
                f"transaction {self.token} is {told}, not published in time",
                hint=f"txmq tx show {self.token}",
            )

    def _require(self, stage: Stage) -> None:
        del stage
        if self.over:
            hint = "join(client, manager) gives the one of the current transaction"
            raise ClientClosed("this data manager's transaction is over", hint=hint)

    def _note(self, told: Future[bytes]) -> None:
        error = told.exception()
        if isinstance(error, TxmqError):
            hint = "it stays prepared, or was decided by hand: txmq xa list"
            log.critical(
                "datamanager.not_committed", token=str(self.token), error=error.message, hint=hint
            )


class Savepoint:
    """The package's IDataManagerSavepoint."""

    def __init__(self, manager: DataManager, mark: ShareMark) -> None:
        self._manager, self._mark = manager, mark

    def rollback(self) -> None:
        """Takes back whatever was sent and acked since."""
        if self._manager.over:
            raise XaProtocol(
                "the transaction of this savepoint is over",
                hint="make one in the current transaction",
            )
        self._manager._share.back_to(self._mark)  # two halves of one thing


def join(client: Client, manager: Manager, *, owner: str | None = None) -> DataManager:
    """The data manager of this client in the manager's current transaction, joined now
    if there was none yet.

    `owner` names it in the broker's lists; else the client's service does. Raises
    ConfigError where there is neither.
    """
    current = manager.get()
    try:
        found: DataManager = current.data(client)
    except KeyError:
        pass
    else:
        if not found.over:
            return found
    named = owner or client.service
    if named is None:
        raise ConfigError("owner", "branches are listed under an owner", hint="such as: orders")
    joined = DataManager(client, manager, check_name(named, "owner"))
    current.join(joined)
    current.set_data(client, joined)
    return joined
