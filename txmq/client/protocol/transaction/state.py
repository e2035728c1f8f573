"""The state of a transaction with bundles at one or several brokers, in all faces."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar
from uuid import UUID

from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.settings import ClientSettings
from txmq.client.protocol.transaction.bundle import (
    BUNDLE_START,
    Bundle,
    BundleCore,
    BundlePosition,
)
from txmq.client.protocol.transaction.lifecycle import Stage, wrong_stage
from txmq.client.protocol.transaction.operations import BundleOperations
from txmq.client.protocol.transaction.tokens import new_token
from txmq.client.protocol.transaction.unrouted import UnroutedSends
from txmq.errors import BrokerUnavailable, LocalProtocolError, TransactionAborted, TxmqError
from txmq.model.decider import Decider, Participant
from txmq.model.units import SECOND
from txmq.wire.bundle import BundleDescription

# Of the error of a client with a spool.
NO_SPOOL = (
    "transactions do not use the spool: with a database, "
    'transaction(connection, on_unavailable="outbox") lets their messages wait there'
)
B = TypeVar("B", bound=Bundle[Any])
K = TypeVar("K", bound=BundleCore)


class TransactionState(BundleOperations[B], Generic[B, K]):
    """Bundles, stage and token of a transaction.

    `token` names the transaction in the database, at the brokers and in errors.
    """

    _bundle_type: ClassVar[type[Any]]
    _unrouted_type: ClassVar[type[Any]]
    # The hint of the error where a kind of transaction allows one broker only.
    _one_broker_hint: ClassVar[str] = ""

    _unrouted: UnroutedSends[B] | None = None  # of a transaction over a cluster
    _stage = Stage.NEW
    _committed = False
    _rollback_only = ""  # the reason, if it may only roll back

    def __init__(self, core: K, *, timeout: float, check_after: float = 0.0) -> None:
        self.token: UUID = new_token()
        self._timeout = timeout
        super().__init__(self._new_bundle(core))
        self._bundles: list[B] = [self._bundle]
        self._home = self._bundle  # the client's own, which decides an XA transaction
        self._core = core
        self._check_after = int(check_after * SECOND)
        self._pid = os.getpid()

    def _spread(self, cores: Sequence[K], routing: Routing) -> UnroutedSends[B]:
        """Let each message go to its broker of a cluster. Called before the block."""
        unrouted = self._unrouted_type(cores, routing, self.token, self._bundle_of)
        self._bundle, self._bundles, self._unrouted = unrouted, [unrouted], unrouted
        found: UnroutedSends[B] = unrouted
        return found

    def _route(self, unrouted: UnroutedSends[B]) -> None:
        """Give the messages to the brokers of a cluster, before anything is stored."""
        unrouted.place(self._bundles)
        number = 0
        for bundle in self._bundles:  # the ids of messages at different brokers differ
            bundle.first_number = number
            number += bundle.buffer.message_count

    def set_rollback_only(self, reason: str = "") -> None:
        """Let the end of the block roll back and raise TransactionAborted."""
        if self._stage is not Stage.STORED:
            self._require(Stage.OPEN)
        self._rollback_only = self._rollback_only or reason or "no reason was given"

    def _mark(self) -> Mapping[B, BundlePosition]:
        """Return the present position of the sends and acks."""
        return {bundle: bundle.position() for bundle in self._bundles}

    def _withdraw_behind(self, mark: Mapping[B, BundlePosition]) -> None:
        """Withdraw the sends and acks behind a position."""
        for bundle in self._bundles:
            bundle.truncate(mark.get(bundle, BUNDLE_START))

    def _require_committed(self) -> None:
        """Require a committed transaction, whose messages may be waited for."""
        if not self._committed:
            raise LocalProtocolError(
                f"Transaction {self.token} has not been committed",
                hint="call wait_published after the block",
            )

    def _raise_rollback_only(self) -> None:
        """Raise TransactionAborted for a transaction that may only roll back."""
        if self._rollback_only:
            raise TransactionAborted(
                f"The transaction was marked to be rolled back: {self._rollback_only}",
                hint="nothing of it exists, as the block has asked for",
            )

    def _note_failure(self, failure: TxmqError) -> None:
        """Leave a broker alone that is away; name the outbox to those with a spool."""
        if self._unrouted is not None:
            self._unrouted.avoid_after(failure)
        require_no_spool(self._core.settings, failure)

    def _of_parent(self) -> LocalProtocolError:
        return LocalProtocolError(
            f"The block of transaction {self.token} is that of process {self._pid}, from "
            "which this one was forked: nothing was done",
            hint="leave the child by os._exit(), or begin transactions in the child, on "
            "connections of its own",
        )

    def _is_of_parent(self) -> bool:
        """Return whether this is a copy of the block, in the child of a fork: an error
        that ends the child must not roll back what goes on in the parent.
        """
        return self._pid != os.getpid()

    def _nonempty_bundles(self) -> list[B]:
        """Return the bundles of the brokers at which something is sent or acked."""
        return [bundle for bundle in self._bundles if not bundle.buffer.empty]

    @property
    def _only_bundle(self) -> B | None:
        """The bundle, where there is one broker; None = nothing is in it."""
        bundles = self._nonempty_bundles()
        return bundles[0] if bundles else None

    def _description(
        self,
        bundle: B,
        decider: Decider,
        participants: tuple[Participant, ...] = (),
    ) -> BundleDescription:
        service = bundle.core.settings.service or ""
        return BundleDescription(
            decider, service, tuple(bundle.buffer.actions), self._check_after, participants
        )

    def _bundle_of(self, core: K) -> B:
        """Return the bundle at a broker: one for all clients of that broker."""
        unrouted: object = self._unrouted
        routed = [bundle for bundle in self._bundles if bundle is not unrouted]
        for bundle in routed:
            if bundle.core is core:
                return bundle
        if self._unrouted is None or core not in self._unrouted.cores:
            for bundle in routed:
                if self._log_id_of(bundle.core) == self._log_id_of(core):
                    return bundle
        if self._one_broker_hint and routed:
            raise LocalProtocolError(
                f"Transaction {self.token} cannot have a second broker",
                hint=self._one_broker_hint,
            )
        self._bundles.append(self._new_bundle(core))
        return self._bundles[-1]

    def _new_bundle(self, core: K) -> B:
        bundle: B = self._bundle_type(core, self.token)
        bundle.patience = self._timeout
        return bundle

    def _log_id_of(self, core: K) -> UUID | None:
        """Return the id of a broker's log."""
        return core.known_log_id

    def _require(self, stage: Stage) -> None:
        if self._stage is not stage:
            raise wrong_stage(self.token, self._stage)


def require_no_spool(settings: ClientSettings, failure: TxmqError) -> None:
    """Raise a hint to the outbox for a broker that is away, where there is a spool."""
    if isinstance(failure, BrokerUnavailable) and settings.spool is not None:
        raise BrokerUnavailable(failure.message, hint=NO_SPOOL) from failure
