"""Transactions: the rows of table `transactions`, by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.topics import key_order
from txmq.core.topics.key_order import Publishable, UnplacedBatch
from txmq.core.transactions import large_bundles
from txmq.errors import UnknownTransaction
from txmq.model.bundle import BundleState
from txmq.model.decider import read_decider
from txmq.model.units import DAY, MILLISECOND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State
    from txmq.core.transactions.large_bundles import LargeBundle
    from txmq.model.decider import Decider

OUTCOME_RETENTION = 7 * DAY  # older tokens are refused


class Transaction(NamedTuple):
    """A row of table `transactions`."""

    state: BundleState
    epoch: int
    decider: Decider
    service: str
    parts: int
    # position of the first part's record, or of the decision where no keys were held
    # before that
    ticket: int
    digest: bytes
    stored_at: int
    batches: tuple[UnplacedBatch, ...]
    actions: tuple[tuple[object, ...], ...]
    check_at: int
    tries: int = 0
    in_doubt: bool = False
    by: str = ""
    reason: str = ""
    decided_at: int = 0
    offsets: tuple[int, ...] = ()
    participants: tuple[tuple[object, ...], ...] = ()
    check_after: int = 0  # of an open bundle: from the seal to the first check-back
    large: LargeBundle | None = None  # its batches are in table `pieces`, not here
    origin: bytes = b""  # the process to ask first, where a checker decides; empty = unknown

    def publishable(self, token: bytes) -> Publishable:
        """Return this transaction as something that wants offsets."""
        return Publishable(self.ticket, token, self.batches, self.large is not None)

    @property
    def messages(self) -> int:
        """The number of its messages."""
        if self.large is None:
            return sum(batch.count for batch in self.batches)
        return sum(part.messages + part.delayed for part in self.large.partitions)


def not_stored(
    state: BundleState, decider: tuple[object, ...], service: str, by: str, reason: str, at: int
) -> Transaction:
    """Return the row of a transaction that was decided without being stored."""
    return Transaction(
        state=state,
        epoch=0,
        decider=read_decider(decider),
        service=service,
        parts=0,
        ticket=0,
        digest=b"",
        stored_at=at,
        batches=(),
        actions=(),
        check_at=0,
        by=by,
        reason=reason,
        decided_at=at,
    )


def get(state: State, token: bytes) -> Transaction | None:
    """Return the transaction of a token."""
    row = state.transactions.get(token)
    if row is None or type(row) is Transaction:  # rows read back from disk are plain tuples
        return row
    found = Transaction(*row)
    return found._replace(
        state=BundleState(found.state),
        decider=read_decider(found.decider),
        batches=key_order.unplaced_batches(found.batches),
        large=large_bundles.read_large(found.large),
    )


def unknown_transaction(
    token: bytes, why: str = "was never stored at this broker, or long ago"
) -> UnknownTransaction:
    """Return the refusal of a request about a transaction that does not exist."""
    return UnknownTransaction(
        f"Transaction {token.hex()} {why}", hint="list undecided transactions: txmq tx list"
    )


def is_large(state: State, token: bytes) -> bool:
    """Return whether the batches of a transaction are stored in pieces."""
    row = state.transactions.get(token)
    return row is not None and Transaction(*row).large is not None


def every_batch(
    state: State, token: bytes, row: Transaction
) -> Iterator[tuple[UnplacedBatch, int | None]]:
    """Yield all batches of a transaction with their offsets.

    The offset is None for a batch that is not published, or was delayed.
    """
    if row.large is not None:
        return large_bundles.every_batch(state, token)
    offsets = (
        (None if offset < 0 else offset for offset in row.offsets)
        if row.offsets
        else (None,) * len(row.batches)
    )
    return zip(row.batches, offsets, strict=True)


def token_time(token: bytes) -> int:
    """Return when a UUIDv7 was made, in microseconds."""
    return int.from_bytes(token[:6], "big") * MILLISECOND


def first_token(time: int) -> bytes:
    """Return the token at or before those made at `time` or later."""
    return (time // MILLISECOND).to_bytes(6, "big").ljust(16, b"\0")


def is_forgotten(state: State, token: bytes, now: int) -> bool:
    """Return whether a token is so old that its outcome may have been forgotten."""
    return token < state.expired_to or token_time(token) < state.certain(now) - OUTCOME_RETENTION


def has_time(token: bytes) -> bool:
    """Return whether a token is a UUIDv7, which tells when it was made."""
    return token[6] >> 4 == 7
