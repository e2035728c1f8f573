"""Store a committed transaction of PostgreSQL as one bundle, exactly once.

The broker's watermark of the source keeps out duplicates (docs/FORMATS.md 2.1). A
bundle moves the watermark from the LSN of the bundle before to its own LSN, in the
record that stores the messages. The broker stores it only if the watermark stands at
the LSN of the bundle before. So the broker skips a bundle that any relay sends again,
and refuses a bundle behind a refused one. LSNs only grow and watermarks are never
forgotten, so it does not matter how long the relay was away.

The token is derived from the transaction, with the time of the commit. The broker
refuses tokens older than a week, because it has forgotten their outcomes. The relay
then derives another token of the same transaction, three days younger each time. Every
relay derives the same ones.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import count
from typing import Final, NamedTuple
from uuid import UUID

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.bundle_upload import BundleUpload
from txmq.client.blocking.transaction.decisions import decide, state_of
from txmq.client.protocol.transaction.buffer import Buffer
from txmq.client.protocol.transaction.parts import split_into_parts
from txmq.client.protocol.transaction.tokens import VARIANT, VERSION
from txmq.errors import UnknownTransaction
from txmq.model import limits
from txmq.model.actions import RELAY, WatermarkAction
from txmq.model.bundle import BundleState
from txmq.model.decider import ByBroker, ByChecker, Decider
from txmq.model.message import COMMIT, ROLLBACK
from txmq.model.units import DAY, MILLISECOND
from txmq.relay.pgoutput import CommittedTransaction
from txmq.relay.slot_stream import SlotSource
from txmq.wire.bundle import BundleDescription, BundlePart
from txmq.wire.logical_message import EmittedMessage

# Less than the week for which tokens are accepted: one of them is always young enough.
ATTEMPT_MS: Final = 3 * DAY // MILLISECOND
# No process registers it: a relay decides what it or its predecessor has stored.
CHECKER: Final = RELAY
# The bits of a UUIDv7 that are neither its time, version nor variant.
RANDOM: Final = (1 << 76) - 1 & ~(3 << 62)


class RelayedTransaction(NamedTuple):
    """A transaction to store; the watermark stands at `previous_lsn` by then."""

    source: SlotSource
    committed: CommittedTransaction
    messages: tuple[EmittedMessage, ...]
    previous_lsn: int


def token_time(committed: CommittedTransaction, attempt: int) -> int:
    """Return the time of a transaction's token, in milliseconds."""
    return committed.committed_at // 1_000 + attempt * ATTEMPT_MS


def derive_token(source: SlotSource, committed: CommittedTransaction, attempt: int) -> UUID:
    """Return the token of a transaction, a UUIDv7; `attempt` counts its tokens.

    It does not depend on the timeline, so it outlives a promotion.
    """
    identity = (
        f"{source.system_id} {source.slot} {committed.lsn} {committed.committed_at} {attempt}"
    )
    low = int.from_bytes(sha256(identity.encode()).digest()[:10], "big") & RANDOM
    return UUID(int=token_time(committed, attempt) << 80 | VERSION | VARIANT | low)


def first_attempt(committed: CommittedTransaction, refused_ms: int) -> int:
    """Return the first attempt whose token is younger than one refused as too old."""
    return max(0, (refused_ms - committed.committed_at // 1_000) // ATTEMPT_MS + 1)


def build_parts(
    core: BlockingCore, relayed: RelayedTransaction, token: UUID, decider: Decider
) -> list[BundlePart]:
    """Return the parts of the bundle. Raises as `client.send` does."""
    buffer = Buffer(core.topics)
    for topic, message, partition, born_at in relayed.messages:
        buffer.add(topic, message, born_at, partition)
    source, committed = relayed.source, relayed.committed
    watermark = WatermarkAction(
        source.watermark_name(source.timeline),
        relayed.previous_lsn,
        committed.lsn,
        committed.committed_at,
    )
    return split_into_parts(
        token,
        BundleDescription(decider, CHECKER, (watermark,)),
        buffer.build(token).batches,
        limits.BATCH,
    )


def build_whole(core: BlockingCore, relayed: RelayedTransaction, token: UUID) -> BundlePart | None:
    """Return the bundle as one part, whose seal decides it; None = it is too large."""
    parts = build_parts(core, relayed, token, ByBroker())
    return parts[0]._replace(commit=True) if len(parts) == 1 else None


def store_in_parts(core: BlockingCore, relayed: RelayedTransaction, deadline: float) -> None:
    """Store a bundle of any size and commit it; finish or drop an earlier attempt's.

    Raises as `client.send` does, and SequenceGap if the watermark stands elsewhere.
    """
    for attempt in count():
        token = derive_token(relayed.source, relayed.committed, attempt)
        state = state_of(core, token, core.settings.timeout)
        if state is None:
            state = _store(core, relayed, token, deadline)
        if state is BundleState.OPEN:
            # A relay died between two parts. A new cut may differ, so no part is added.
            decide(core, token, ROLLBACK)
        if state is BundleState.UNDECIDED:
            decide(core, token, COMMIT)
        if state not in (None, BundleState.OPEN, BundleState.ROLLED_BACK):
            return


def _store(
    core: BlockingCore, relayed: RelayedTransaction, token: UUID, deadline: float
) -> BundleState | None:
    """Store the bundle and return its state; None = the token is too old."""
    upload = BundleUpload(core, build_parts(core, relayed, token, ByChecker(CHECKER)), deadline)
    upload.send()
    try:
        return BundleState(upload.await_receipt().state)
    except UnknownTransaction:
        return None
