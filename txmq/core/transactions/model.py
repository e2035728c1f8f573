"""Transactions: what is remembered of the group of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.state.state import Rejected
from txmq.core.topics import key_order
from txmq.core.topics.key_order import HeldBatch, Waiting
from txmq.core.transactions import large_bundles
from txmq.errors import UnknownTransaction
from txmq.model.bundle import GroupState, makes_holds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State
    from txmq.core.transactions.large_bundles import Large

KEPT = (
    7 * 24 * 3600 * 1_000_000
)  # outcomes are remembered for a week; older tokens are refused (ARCHITECTURE 4)


class Transaction(NamedTuple):
    """A row of table `transactions`."""

    state: GroupState
    epoch: int
    decider: tuple[object, ...]
    service: str
    parts: int
    # position of the first part's record, or of the decision where no keys were held
    # before that
    ticket: int
    digest: bytes
    stored_at: int
    batches: tuple[HeldBatch, ...]
    actions: tuple[tuple[object, ...], ...]
    check_at: int
    tries: int = 0
    in_doubt: bool = False
    by: str = ""
    reason: str = ""
    decided_at: int = 0
    offsets: tuple[int, ...] = ()
    participants: tuple[tuple[object, ...], ...] = ()
    check_after: int = 0  # of an open group: from the seal to the first check-back
    large: Large | None = None  # its batches are in table `pieces`, not here
    origin: bytes = b""  # the process to ask first, where a checker decides; empty = unknown

    def waiting(self, token: bytes) -> Waiting:
        """This transaction as something that wants offsets. What made no holds has no
        key to wait for.
        """
        return Waiting(self.ticket, token, self.batches, self.large is not None)

    @property
    def messages(self) -> int:
        """How many it has."""
        if self.large is None:
            return sum(batch.count for batch in self.batches)
        return sum(share.messages + share.delayed for share in self.large.shares)


def get(state: State, token: bytes) -> Transaction | None:
    """The transaction of a token."""
    row = state.transactions.get(token)
    if (
        row is None or type(row) is Transaction
    ):  # as it was put there; only what was read back from disk is to be made
        return row
    found = Transaction(*row)
    found = found._replace(
        state=GroupState(found.state), batches=tuple(key_order.held(b) for b in found.batches)
    )
    return found if found.large is None else found._replace(large=large_bundles.of_row(found.large))


def unknown(token: bytes, why: str = "was never stored at this broker, or long ago") -> Rejected:
    """The no to whoever asks for a transaction that there is not."""
    return Rejected(
        UnknownTransaction, f"transaction {token.hex()} {why}", "those that are open: txmq tx list"
    )


def is_large(state: State, token: bytes) -> bool:
    """Whether the batches of a transaction are kept in pieces."""
    row = state.transactions.get(token)
    return row is not None and Transaction(*row).large is not None


def every_batch(
    state: State, token: bytes, row: Transaction
) -> Iterator[tuple[HeldBatch, int | None]]:
    """All batches of a transaction, and the offsets of those that are published, and
    were not delayed.
    """
    if row.large is not None:
        return large_bundles.every_batch(state, token)
    offsets = (
        (None if offset < 0 else offset for offset in row.offsets)
        if row.offsets
        else (None,) * len(row.batches)
    )
    return zip(row.batches, offsets, strict=True)


def takes_early(decider: tuple[object, ...]) -> bool:
    """Whether a large group of this decider takes its keys as its parts come: what is
    committed with the seal does, too, so that nothing sent after that overtakes it.
    """
    return makes_holds(decider) or decider[0] == "local"


def token_time(token: bytes) -> int:
    """When a UUIDv7 was made, in microseconds."""
    return int.from_bytes(token[:6], "big") * 1_000


def is_timed(token: bytes) -> bool:
    """Whether a token tells when it was made: a UUIDv7 does."""
    return token[6] >> 4 == 7
