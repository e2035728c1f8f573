"""The bundle of a transaction at one broker, and the requests that store it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar
from uuid import UUID

from txmq.client.protocol.awaited.core import AwaitedCore
from txmq.client.protocol.awaited.decisions import await_state, decide
from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.sender.topics import TopicMetadata
from txmq.client.protocol.transaction.bundle import NOT_BUILT, Bundle, BundleCore
from txmq.client.protocol.transaction.decision import is_published
from txmq.client.protocol.transaction.outbox_stamp import KnownStamp
from txmq.client.protocol.transaction.tokens import new_token
from txmq.client.protocol.transaction.unrouted import UnroutedSends, in_order
from txmq.errors import (
    BrokerUnavailable,
    ConnectionLost,
    RequestRejected,
    RequestTimeout,
    TransactionAborted,
)
from txmq.model.bundle import BundleReceipt, BundleState, DecideReceipt
from txmq.model.message import ROLLBACK, Decision, Receipt
from txmq.wire.bundle import BundleDescription
from txmq.wire.data_requests import Opcode


class StoringCore(BundleCore, Protocol):
    """The shared state of a client whose transactions a database decides."""

    # Of the databases, by system identifier and oid: see awaited/outbox.py.
    outbox_stamps: defaultdict[tuple[int, int], KnownStamp]
    answer_checks: Callable[[], None]

    @property
    def boot_epoch(self) -> int: ...
    def seconds(self) -> float: ...
    def expect_log(self, log_id: UUID) -> None: ...


B = TypeVar("B", bound="StoringBundle[Any]")
K = TypeVar("K", bound=StoringCore)


class StoringBundle(Bundle[K], ABC):
    """A transaction's messages and acks at one broker, as the steps use it.

    The blocking face's coroutines block, and never wait.
    """

    _decision: Any = None  # the answer to it is to come

    @staticmethod
    @abstractmethod
    def awaited(core: K) -> AwaitedCore:
        """Return a core, for calls that are awaited."""

    @property
    def broker(self) -> AwaitedCore:
        """The core of its broker, for calls."""
        return self.awaited(self.core)

    async def log_id(self) -> UUID:
        """Return the id of the broker's log. Raises as a call, unless it is known."""
        known = self.core.known_log_id
        return await self.broker.log_id(self.patience) if known is None else known

    async def call(
        self, name: str, args: dict[str, Any], *, within: float | None = None
    ) -> dict[str, Any]:
        """Make a control call of the broker, again after a lost connection.

        `within` = the seconds that the answer may take; None = the client's.
        """
        return await self.broker.call(name, args, repeat=True, within=within)

    async def ping(self) -> None:
        """Have an answer of the broker. Raises as a call."""
        await self.broker.request(Opcode.PING)

    async def build(self, description: BundleDescription, deadline: float) -> None:
        """Build the parts, to be stored by `deadline`; look unknown topics up first."""
        for topic in dict.fromkeys([item.topic for item in self.buffer.items]):
            if self.core.topics.cached(topic) is None:
                await look_up(self.broker, topic, deadline)
        self._description, self._deadline = description, deadline
        self._build()

    @abstractmethod
    def _build(self) -> None:
        """Build the parts, all anew."""

    @abstractmethod
    async def send(self) -> None:
        """Send all parts.

        BrokerUnavailable is the only error after which the broker certainly has
        nothing.
        """

    async def await_receipt(self) -> BundleReceipt:
        """Wait until the broker has made the bundle durable.

        If topics have grown meanwhile, the parts that are not stored are built anew.
        Raises the broker's refusal, ConnectionLost, RequestTimeout, or
        TransactionAborted if the bundle was rolled back meanwhile.
        """
        try:
            receipt = await self._receipt()
        except BaseException as error:
            self._end_operation(error)
            if isinstance(error, RequestRejected):
                self.sent = self._part_count > 1  # some parts may be stored
            raise
        finally:
            self.abandon()
        if receipt.state == BundleState.ROLLED_BACK:
            raise TransactionAborted(
                f"Transaction {self.token} was rolled back before it was complete",
                hint="it took too long, or an operator decided so: see `txmq tx show`",
            )
        return receipt

    @abstractmethod
    async def _receipt(self) -> BundleReceipt:
        """Wait for the answers to all parts; store those anew whose topics have
        grown.
        """

    @abstractmethod
    def extend_deadline(self, deadline: float) -> None:
        """Set a later deadline for the receipt."""

    async def store_all(self, description: BundleDescription, deadline: float) -> BundleReceipt:
        """Build and send all parts, and wait until the broker has them durably."""
        await self.build(description, deadline)
        await self.send()
        return await self.await_receipt()

    async def decide(self, outcome: Decision, seconds: float) -> DecideReceipt:
        """Decide the bundle, and return the receipt.

        Raises Conflict if the bundle has the other outcome, and as a call does.
        """
        return await decide(self.broker, self.token, outcome, within=seconds)

    async def await_state(
        self, target: BundleState, deadline: float, *, check: bool = False
    ) -> BundleState | None:
        """Poll the bundle: see `decisions.await_state`."""
        return await await_state(self.broker, self.token, target, deadline, check=check)

    async def wait_published(self, deadline: float) -> None:
        """Wait until consumers can see the messages.

        Raises RequestTimeout or TransactionAborted.
        """
        if self.published or not (self._built.batches or self.in_outbox):
            return
        answer = await self._answer_to_decision(deadline)
        if answer is not None and is_published(answer):
            return
        state = await self.await_state(BundleState.PUBLISHED, deadline, check=True)
        if state is BundleState.ROLLED_BACK:
            raise TransactionAborted(
                f"Transaction {self.token} was rolled back",
                hint="`txmq tx show` tells who rolled it back",
            )
        if state is not BundleState.PUBLISHED:
            raise RequestTimeout(
                f"Transaction {self.token} is not published in time, but "
                f"{state.name if state else 'UNKNOWN'}",
                hint=f"see `txmq tx show {self.token}`",
            )

    @abstractmethod
    async def _answer_to_decision(self, deadline: float) -> bytes | None:
        """Return the answer to `send_decision`; None = there is none in time."""

    async def receipts(self) -> list[Receipt]:
        """Return the receipts in the order of the sends; see `Transaction.receipts`."""
        if not self._built.batches:
            return []
        shown = await self.call("tx.show", {"token": self.token.hex})
        offsets = [batch["offset"] for batch in shown["batches"]]
        return self._built.receipts(self.token, offsets, self.first_number)

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
        self.in_outbox, self._built = True, NOT_BUILT


def unavailable(error: ConnectionLost | RequestTimeout) -> BrokerUnavailable:
    """Return the error of a transaction that was rolled back for want of a receipt."""
    return BrokerUnavailable(
        f"A broker did not confirm the messages: {error.message}; the transaction was rolled back",
        hint="run the transaction again",
    )


async def look_up(core: AwaitedCore, topic: str, deadline: float) -> TopicMetadata:
    """Return a topic of the cache, or have it there by the deadline: row locks may wait
    for it. Raises as a call.
    """
    known = core.topics.cached(topic)
    return known or await core.refresh(topic, within=max(0.0, deadline - core.seconds()))


class UnroutedBundle(UnroutedSends[B], StoringBundle[K]):
    """Sends of a transaction over a cluster. Nothing is stored from here.

    A face adds its own bundle to the bases.
    """

    def __init__(
        self,
        cores: Sequence[K],
        routing: Routing,
        token: UUID,
        bundle_of: Callable[[K], B],
    ) -> None:
        """`bundle_of` returns or makes the transaction's bundle of a broker."""
        super().__init__(cores[0], token)
        self._begin(cores, routing, bundle_of)

    async def receipts(self) -> list[Receipt]:
        """Return the receipts in the order of the sends."""
        return in_order(
            [
                found
                for placed in self._placed
                for found in placed.receipts(await placed.bundle.receipts())
            ]
        )
