"""What a topic lets in and out, by the settings of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.batch import largest_body
from txmq.core.state.state import Rejected
from txmq.core.topics.topics import find
from txmq.errors import MessageTooLarge, TopicClosed

if TYPE_CHECKING:
    from txmq.batch import BatchHeader
    from txmq.core.state.state import State, Topic


def admitted(
    state: State, name: str, partition: int, epoch: int, header: BatchHeader, batch: bytes
) -> Topic | Rejected:
    """The topic that a sender means, as `topics.find` has it, if it takes the batch."""
    topic = find(state, name, partition, epoch)
    if isinstance(topic, Rejected):
        return topic
    settings = topic.settings
    if not settings.writable:
        return Rejected(
            TopicClosed,
            f"topic {name!r} is closed for writing",
            "txmq topic alter --set writable=yes",
        )
    large = settings.message_bytes >= 0 and too_large(
        header, batch, settings.message_bytes, f"topic {name!r}"
    )
    return large or topic


def too_large(header: BatchHeader, batch: bytes, limit: int, who: str) -> Rejected | None:
    """The no to a batch with a body of more bytes than that."""
    if header.size <= limit:  # of all bodies together
        return None
    largest = largest_body(batch, header)
    if largest <= limit:
        return None
    hint = "keep what is larger in a store, and send its address"
    return Rejected(
        MessageTooLarge,
        f"a message of {largest} bytes: {who} takes {limit}",
        hint,
        {"limit": limit},
    )


def unreadable(topic: Topic) -> Rejected | None:
    """Why nobody may read the topic; None = it is open."""
    if topic.settings.readable:
        return None
    return Rejected(
        TopicClosed,
        f"topic {topic.name!r} is closed for reading",
        "txmq topic alter --set readable=yes",
    )
