"""The queues of a group's letters that replay plans have put back (`put_back`).

A letter that waits in a queue counts as a retry of its group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.state import letter_cells
from txmq.core.state.put_back import NO_KEY, PlainLetter, PutBackQueue, WaitingLetters
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State


def add(group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> tuple[int, int]:
    """Apply: a letter waits for a consumer. Return its error and slot in the index."""
    tp, letter = TopicPartition(ref[0], ref[1]), plain_letter(row)
    queue = group.put_back.get(tp)
    if queue is None:
        queue = group.put_back[tp] = PutBackQueue(keyed=group.ordered)
    queue.add(ref[2], row.position, None if _has_more(row) else letter)
    return letter.error, letter.slot


def _has_more(row: FailedMessage) -> bool:
    """Return True if the ack of a letter has to read its row."""
    return bool(row.edits or row.copies or row.key_hash == NO_KEY)


def plain_letter(row: FailedMessage) -> PlainLetter:
    """Return what the ack of a letter with this row has to know."""
    error = letter_cells.error_of(row.error_type, row.fingerprint)
    slot = letter_cells.slot_at(row.died_at)
    return PlainLetter(row.plan, error, slot, row.key_hash)


def waiting_at(
    group: ConsumerGroup, tp: TopicPartition, start: int, count: int
) -> WaitingLetters | None:
    """Return what is known of the letters at these offsets that plans have put back;
    None = not all of them wait.
    """
    queue = group.put_back.get(tp)
    return None if queue is None else queue.waiting_at(start, count)


def take(state: State, group: ConsumerGroup, refs: list[MessageRef]) -> bool:
    """Apply: neighbours that plans have put back go to a consumer. Return False if not
    all of them are such letters, near the front of their queue.
    """
    tp = TopicPartition(refs[0][0], refs[0][1])
    queue = group.put_back.get(tp)
    letters = None if queue is None else queue.take(refs[0][2], len(refs))
    if queue is None or letters is None:
        return False
    known = zip(refs, letters, strict=True)
    group.leased_letters.update((ref, letter) for ref, letter in known if letter is not None)
    if not queue:
        del group.put_back[tp]
    count_retries(group, tp, -len(refs))
    state.groups.dirty_groups.add(group.group_id)
    return True


def discard(group: ConsumerGroup, ref: MessageRef) -> None:
    """Apply: a letter, which waits, leaves its queue."""
    tp = TopicPartition(ref[0], ref[1])
    queue = group.put_back[tp]
    queue.discard(ref[2])
    if not queue:
        del group.put_back[tp]
    count_retries(group, tp, -1)


def count_retries(group: ConsumerGroup, tp: TopicPartition, change: int) -> None:
    """Apply: a partition has more retries, or fewer."""
    group.retrying[tp] += change
    if not group.retrying[tp]:
        del group.retrying[tp]
