"""What a transaction will send, kept until it is known whether it will."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple
from uuid import UUID

from txmq.client.protocol.sender.rows import PART_ROWS, Columns, Messages, Rows, kept
from txmq.client.protocol.sender.topics import Shape, Topics
from txmq.model.message import Message, Receipt, check_name
from txmq.wire.group import PartBatch

Action = tuple[
    object, ...
]  # of FORMATS 2.1: an ack or a replay that takes effect with the decision


class Item(NamedTuple):
    """One message, or columns of them, as the user sent it; `asked` is the partition
    that was named.
    """

    topic: str
    content: Message | Columns
    born_at: int
    asked: int | None


class Mark(NamedTuple):
    """How much there was at a savepoint."""

    items: int
    actions: int


@dataclass(slots=True)
class Lane:
    """What goes to one partition, in order; `places` are those of the messages among
    all that were sent.
    """

    topic: str
    partition: int
    epoch: int
    rows: list[Rows] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=list)
    _births: list[int] = field(default_factory=list)

    def add(self, message: Message, born_at: int, place: int) -> None:
        """One message more."""
        self._messages.append(message)
        self._births.append(born_at)
        self.places.append(place)

    def add_columns(self, columns: Columns, places: Sequence[int]) -> None:
        """Columns more."""
        self.close()
        self.rows.append(columns)
        self.places.extend(places)

    def close(self) -> None:
        """Makes rows of the single messages so far."""
        if self._messages:
            self.rows.append(Messages(self._messages, self._births))
            self._messages, self._births = [], []


class Built(NamedTuple):
    """The batches of a group in their order; for each batch, the places of its messages
    among all that were sent.
    """

    batches: list[PartBatch]
    places: list[Sequence[int]]

    def receipts(self, token: UUID, offsets: Sequence[int | None]) -> list[Receipt]:
        """The receipts of all messages in the order in which they were sent; `offsets`
        are those of the batches.
        """
        found: dict[int, Receipt] = {}
        for batch, places, offset in zip(self.batches, self.places, offsets, strict=True):
            for row, place in enumerate(places):
                number, at = f"{token.hex}-{len(found)}", None if offset is None else offset + row
                found[place] = Receipt(number, batch.topic, batch.partition, at, duplicate=False)
        return [found[place] for place in sorted(found)]


class Buffer:
    """Sends and actions in order; a savepoint can take back what came after it."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self.items: list[Item] = []
        self.actions: list[Action] = []

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send and nothing to do."""
        return not self.items and not self.actions

    def mark(self) -> Mark:
        """How much there is now."""
        return Mark(len(self.items), len(self.actions))

    def back_to(self, mark: Mark) -> None:
        """Takes back whatever came since."""
        del self.items[mark.items :]
        del self.actions[mark.actions :]

    def clear(self) -> None:
        """Forgets the messages, which were built and sent; the actions have been taken
        along.
        """
        self.back_to(Mark(0, 0))

    def add(self, topic: str, message: Message, born_at: int, asked: int | None) -> None:
        """Raises LocalProtocolError or MessageTooLarge for what could not be sent."""
        self.items.append(Item(check_name(topic, "topic"), kept(message), born_at, asked))

    def add_columns(self, topic: str, columns: Columns, asked: int | None) -> None:
        """As `add`; the columns must not be changed before the end of the
        transaction.
        """
        self.items.append(Item(check_name(topic, "topic"), columns, columns.born_at, asked))

    def build(self, token: UUID, sequence: int = 0, rows_each: int = PART_ROWS) -> Built:
        """The batches of at most `rows_each`, by what is known of the topics; the first
        message is number `sequence` of the group.
        """
        if len(self.items) == 1 and isinstance(message := self.items[0].content, Message):
            return self._build_one(message, token.bytes, sequence)
        built = Built([], [])
        for lane in self._lanes():
            at = 0
            for rows in chain.from_iterable(whole.pieces(rows_each) for whole in lane.rows):
                batch = rows.encode(token.bytes, sequence, self._topics.compression)
                built.batches.append(PartBatch(lane.topic, lane.partition, lane.epoch, batch))
                built.places.append(lane.places[at : at + len(rows)])
                at, sequence = at + len(rows), sequence + len(rows)
        return built

    def _build_one(self, message: Message, origin: bytes, sequence: int) -> Built:
        """A lone message, as most transactions have, at less cost."""
        topic, _message, born_at, asked = self.items[0]
        shape = self._topics.shape(topic)
        partition = self._topics.choose(shape, message.key, asked)
        batch = Messages((message,), (born_at,)).encode(origin, sequence, self._topics.compression)
        return Built([PartBatch(topic, partition, shape.epoch, batch)], [(0,)])

    def _lanes(self) -> Iterator[Lane]:
        lanes = Lanes(self._topics)
        place = 0
        for item in self.items:
            place += lanes.add(item, place)
        return lanes.closed()


class Lanes:
    """Sorts what was sent by partition. Messages without a key all go to one, because
    each batch has its price.
    """

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._keyless: dict[str, int] = {}

    def add(self, item: Item, place: int) -> int:
        """Takes an item whose first message is the one at `place`; returns how many
        they are.
        """
        shape, content = self._topics.shape(item.topic), item.content
        if isinstance(content, Message):
            self._lane(shape, self._choose(shape, content.key, item.asked)).add(
                content, item.born_at, place
            )
            return 1
        for partition, chosen in self._topics.spread(shape, content, item.asked).items():
            self._lane(shape, partition).add_columns(
                content.pick(chosen), [place + at for at in chosen]
            )
        return len(content)

    def closed(self) -> Iterator[Lane]:
        """The lanes, in the order of their first messages."""
        for lane in self._lanes.values():
            lane.close()
            yield lane

    def _lane(self, shape: Shape, partition: int) -> Lane:
        return self._lanes.setdefault(
            (shape.name, partition), Lane(shape.name, partition, shape.epoch)
        )

    def _choose(self, shape: Shape, key: str | None, asked: int | None) -> int:
        if asked is not None or key or self._topics.asks_user:
            return self._topics.choose(shape, key, asked)
        if shape.name not in self._keyless:
            self._keyless[shape.name] = self._topics.turn(shape)
        return self._keyless[shape.name]
