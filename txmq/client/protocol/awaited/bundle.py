"""The bundle of a transaction at one broker, and the requests that store it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, TypeVar
from uuid import UUID

from txmq.client.protocol.transaction.buffer import BuiltBatches
from txmq.client.protocol.transaction.bundle import Bundle, BundleCore
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import BrokerUnavailable, ConnectionLost, RequestTimeout
from txmq.model.bundle import BundleReceipt, BundleState, DecideReceipt
from txmq.model.message import ROLLBACK, Decision
from txmq.wire.bundle import BundleDescription


class StoringCore(BundleCore, Protocol):
    """The shared state of a client whose transactions a database decides."""

    # Of the databases, by system identifier and oid: see awaited/outbox.py.
    outbox_stamps: dict[tuple[int, int], int]

    @property
    def boot_epoch(self) -> int: ...
    def seconds(self) -> float: ...


K = TypeVar("K", bound=StoringCore)


class StoringBundle(Bundle[K], ABC):
    """A transaction's messages and acks at one broker, as the steps use it.

    The blocking face's coroutines block, and never wait.
    """

    _decision: Any = None  # the answer to it is to come

    @abstractmethod
    async def log_id(self) -> UUID:
        """Return the id of the broker's log. Raises as a call, unless it is known."""

    @abstractmethod
    async def call(
        self, name: str, args: dict[str, Any], *, within: float | None = None
    ) -> dict[str, Any]:
        """Make a control call of the broker, again after a lost connection.

        `within` = the seconds that the answer may take; None = the client's.
        """

    @abstractmethod
    async def ping(self) -> None:
        """Have an answer of the broker. Raises as a call."""

    @abstractmethod
    async def build(self, description: BundleDescription, deadline: float) -> None:
        """Build the parts, to be stored by `deadline`; look unknown topics up first."""

    @abstractmethod
    async def send(self) -> None:
        """Send all parts.

        BrokerUnavailable is the only error after which the broker certainly has
        nothing.
        """

    @abstractmethod
    async def await_receipt(self) -> BundleReceipt:
        """Wait until the broker has made the bundle durable.

        If topics have grown meanwhile, the parts that are not stored are built anew.
        Raises the broker's refusal, ConnectionLost, RequestTimeout, or
        TransactionAborted if the bundle was rolled back meanwhile.
        """

    @abstractmethod
    def extend_deadline(self, deadline: float) -> None:
        """Set a later deadline for the receipt."""

    async def store_all(self, description: BundleDescription, deadline: float) -> BundleReceipt:
        """Build and send all parts, and wait until the broker has them durably."""
        await self.build(description, deadline)
        await self.send()
        return await self.await_receipt()

    @abstractmethod
    async def decide(self, outcome: Decision, seconds: float) -> DecideReceipt:
        """Decide the bundle, and return the receipt.

        Raises Conflict if the bundle has the other outcome, and as a call does.
        """

    @abstractmethod
    async def await_state(
        self, target: BundleState, deadline: float, *, check: bool = False
    ) -> BundleState | None:
        """Poll the bundle until it reaches `target` or is rolled back, or until
        `deadline`.

        Returns its last known state. `check` makes the broker ask the decider before
        each poll. Errors of calls are retried.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Stop waiting for the receipt."""

    @abstractmethod
    def send_decision(self, outcome: Decision) -> None:
        """Send the decision without waiting for the answer.

        If the decision is lost, the broker learns it by a check-back or from recovery.
        """

    @abstractmethod
    def request_check(self) -> None:
        """Have the broker ask the decider now, without waiting for it.

        If the request is lost, the broker asks at its time.
        """

    def move_to_outbox(self) -> None:
        """Leave the messages to the outbox.

        They get a new token if the broker may have the bundle under the old one.
        """
        if self.sent:
            self.send_decision(ROLLBACK)
            self.token, self.sent, self._decision = new_token(), False, None
        self.in_outbox, self._built = True, BuiltBatches([], [])


def unavailable(error: ConnectionLost | RequestTimeout) -> BrokerUnavailable:
    """Return the error of a transaction that was rolled back for want of a receipt."""
    return BrokerUnavailable(
        f"A broker did not confirm the messages: {error.message}; the transaction was rolled back",
        hint="run the transaction again",
    )
