"""The numbered parts of a bundle, as GROUP requests carry them.

See docs/PROTOCOL.md 1 and docs/FORMATS.md 2.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from txmq.batch import read_header
from txmq.client.protocol.sender.rows import PART_ROWS
from txmq.wire.bundle import NO_DIGEST, BundleDescription, BundlePart, PartBatch, bundle_digest

EPOCH = 0  # of every bundle: tokens are never reused, so no older incarnation exists
PART_BYTES = 8 << 20  # of batches; a single batch may be larger and still fit in a frame


def split_into_parts(
    token: UUID,
    description: BundleDescription,
    batches: Sequence[PartBatch],
    max_bytes: int = PART_BYTES,
    stored: Sequence[BundlePart] = (),
) -> list[BundlePart]:
    """Return all parts of a bundle; the last one is sealed and has the digest.

    Parts that are `stored` stay as they are, and have the first of the batches.
    """
    parts = [*stored]
    for cut in cut_batches(batches[batch_count(stored) :], max_bytes):
        described = None if parts else description
        parts.append(
            BundlePart(token.bytes, len(parts), EPOCH, False, False, NO_DIGEST, described, cut)
        )
    return [*parts[:-1], parts[-1]._replace(sealed=True, digest=bundle_digest(parts))]


def batch_count(parts: Iterable[BundlePart]) -> int:
    """Return the number of the batches of parts."""
    return sum(len(part.batches) for part in parts)


def cut_batches(
    batches: Sequence[PartBatch], max_bytes: int, max_rows: int = PART_ROWS
) -> list[tuple[PartBatch, ...]]:
    """Return the batches of each part: at least one part, each within the limits."""
    if len(batches) < 2:
        return [tuple(batches)]
    cuts: list[list[PartBatch]] = [[]]
    size = rows = 0
    for batch in batches:
        count = read_header(batch.batch).count
        if cuts[-1] and (size + len(batch.batch) > max_bytes or rows + count > max_rows):
            cuts.append([])
            size = rows = 0
        cuts[-1].append(batch)
        size += len(batch.batch)
        rows += count
    return [tuple(cut) for cut in cuts]
