"""The opening of an inbox's partitions, before the first message of each is applied.

The database is the authority for what was applied, the broker for what must be. A
partition is opened once for each connection to the database and each join of the group.
What the group has settled and the inbox lacks is delivered again: the database was
restored to the past. The broker knows what has no effect by an operator's word, by
retention or by failure, so gaps in the inbox are no signs.

An inbox that has more of an earlier run than the log had at the begin of this one is of
another history: the log was restored to the past, whatever was sent since.

A consumer with tags or a selector cannot compare: messages that it does not want are
acked without a trace in the inbox.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.membership import Membership
from txmq.errors import InboxMismatch, StaleGeneration
from txmq.model.topic_partition import FIRST_EPOCH
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.identity import Server, read_server
from txmq.tx.postgres.inbox import Position, applied, note_run, noted_run

if TYPE_CHECKING:
    from uuid import UUID

    from txmq.client.protocol.consumer.settings import ConsumerSettings
    from txmq.client.protocol.consumer.stats import ConsumerStats

RANGES_AT_ONCE = 10_000
FAR = 1 << 63
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
OffsetRange = tuple[int, int]
log = get_logger()


class InboxMember(Protocol):
    """A member of a consumer, as its inbox uses it.

    `owner` is stored in the batches that it fetches. `log_id` is the log of its broker.
    """

    @property
    def owner(self) -> object: ...
    @property
    def settings(self) -> ConsumerSettings: ...
    @property
    def group(self) -> str: ...
    @property
    def log_id(self) -> UUID | None: ...
    @property
    def membership(self) -> Membership | None: ...
    @property
    def stats(self) -> ConsumerStats: ...
    @property
    def rejoined(self) -> int: ...
    def rejoin(self) -> None: ...


Call = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class OpeningPauses:
    """Pauses of a handler whose partitions cannot be opened, longer each time: behind
    each, a member of an ordered group joins anew, and all that it has comes again.
    """

    def __init__(self) -> None:
        """Begin with the shortest one."""
        self._next = FIRST_PAUSE_S

    def next(self) -> float:
        """Return the seconds to wait now."""
        pause, self._next = self._next, min(2 * self._next, LONGEST_PAUSE_S)
        return pause

    def restart(self) -> None:
        """Begin anew, behind a success."""
        self._next = FIRST_PAUSE_S


class InboxOpenings:
    """The open partitions of a member's inbox.

    `lost` has the messages whose effects nothing restores, by position. One opening at
    a time: whoever shares this between threads or tasks has a lock.
    """

    def __init__(self, member: InboxMember, call: Call) -> None:
        """`call` makes a control call, which may be repeated."""
        self._member, self._call_broker = member, call
        self._open: set[Position] = set()
        self._server: Server | None = None  # that of the last look
        self._restored: dict[Position, int] = {}  # messages, until the member joins anew
        self._rejoined = 0  # the count of joins before these were opened
        self.lost: dict[Position, str] = {}

    def position(self, topic_id: int, partition: int, epoch: int) -> Position:
        """Return what the inbox knows a partition by."""
        member = self._member
        return Position(member.group, str(member.log_id), topic_id, partition, epoch)

    def assigned(self) -> list[tuple[Position, str]]:
        """Return the member's partitions, with their topics."""
        membership = self._member.membership
        if membership is None:
            return []
        identities = membership.identities
        return [
            (self.position(identities.topics[topic], partition, epoch), topic)
            for topic, partition in sorted(membership.assignment)
            for epoch in identities.epochs_of((topic, partition))
        ]

    def forget(self) -> None:
        """Open all partitions anew: the database may be another one now."""
        self._open = set()

    async def check_server(self, driver: Driver) -> None:
        """Open all partitions anew where the connection leads to another server than at
        the last call, or to an earlier state of it.

        Behind a pooler a failover leaves connections open. Raises DatabaseError.
        """
        before, found = self._server, await read_server(driver)
        self._server = found
        if before is not None and (
            found.identity != before.identity or found.position < before.position
        ):
            log.warning("inbox.server_changed", group=self._member.group)
            self.forget()

    def are_open(self, positions: Iterable[Position]) -> bool:
        """Return whether all these positions are open."""
        return self._of_this_run().issuperset(positions)

    def _of_this_run(self) -> set[Position]:
        """Return what is open: nothing after each join. The broker may be in another
        run, or have made the group again.
        """
        rejoined = self._member.rejoined
        if rejoined != self._rejoined:
            self._open, self._restored = set(), {}
            self._rejoined = rejoined
        return self._open

    async def open_position(self, driver: Driver, position: Position, topic: str) -> int:
        """Open a position, if it is not, and return the number of restored messages.

        In an ordered group the member joins anew then, and the position is not open
        before: what the member has of it would precede what was restored.

        Raises DatabaseError, InboxMismatch, and RequestRejected where the group, the
        topic or the epoch is another one by now.
        """
        opened = self._of_this_run()
        if position in opened:
            return 0
        if position in self._restored:
            return self._restored[position]
        restored = await self._compare(driver, position, topic)
        if restored and self._member.settings.ordered:
            self._of_this_run()
            self._restored[position] = restored
            self._member.rejoin()
        else:
            opened.add(position)
        return restored

    async def _compare(self, driver: Driver, position: Position, topic: str) -> int:
        shown = await self._call("inbox.show", position, topic)
        if position.epoch not in shown["older"]:
            raise StaleGeneration(
                f"epoch {position.epoch} of topic {topic!r} is over",
                hint="fetch again: the group was reset, or made again",
            )
        settings, present = self._member.settings, shown["epoch"] == position.epoch
        if present:
            await self._note_run(driver, position, topic, shown)
        if settings.tags is not None or settings.selector is not None or not present:
            return 0
        # The broker was asked before: all that it has settled is committed.
        ranges: list[OffsetRange] = []
        for epoch, start, end in epoch_parts(shown):
            found = await applied(driver, position._replace(epoch=epoch))
            ranges += cut(found.ranges, start, end)
        top = ranges[-1][1] if ranges else 0
        if top > shown["end"]:
            await self._refuse_ahead(position, topic, top)
        if shown["base"] is None:
            await self._call("inbox.open", position, topic, applied=ranges[-RANGES_AT_ONCE:])
            return 0
        return await self._restore(position, topic, lacking(shown, ranges))

    async def _note_run(
        self, driver: Driver, position: Position, topic: str, shown: dict[str, Any]
    ) -> None:
        """Note the run of the broker, before messages of it are applied. Raises
        InboxMismatch where earlier ones had messages that the log does not have.
        """
        run: str = shown["run"]
        noted = await noted_run(driver, position)
        if noted == run:
            return
        ranges = (await applied(driver, position)).ranges if noted is not None else ()
        if ranges and ranges[-1][1] > shown["began_at"]:
            # Another member may have noted the run and gone on, since it was read.
            if await noted_run(driver, position) == run:
                return
            self._refuse(position, topic, ranges[-1][1], shown["began_at"])
        await note_run(driver, position, run)

    async def _refuse_ahead(self, position: Position, topic: str, top: int) -> None:
        """Raise InboxMismatch, if the inbox has messages that the log does not have.

        Other members may have applied newer ones since the broker was asked.
        """
        end = (await self._call("inbox.show", position, topic))["end"]
        if top > end:
            self._refuse(position, topic, top, end)

    def _refuse(self, position: Position, topic: str, top: int, end: int) -> NoReturn:
        raise InboxMismatch(
            f"the inbox of group {position.group!r} has messages of {topic}/{position.partition}"
            f" up to {top}, the broker's log had them only up to {end}: the log was restored to"
            " the past, and new messages would be taken for duplicates",
            hint=f"let them take effect: txmq group reset {position.group} {topic}"
            f" --to {position.partition}={end} --reprocess",
        )

    async def _restore(self, position: Position, topic: str, lacking: Sequence[OffsetRange]) -> int:
        restored = 0
        for at in range(0, len(lacking), RANGES_AT_ONCE):
            ranges = lacking[at : at + RANGES_AT_ONCE]
            reply = await self._call("inbox.restore", position, topic, ranges=ranges)
            restored += reply["restored"]
            if reply["lost"]:
                await self._lose(position, topic, reply["lost"])
        if restored:
            place = f"{topic}/{position.partition}"
            log.error("inbox.behind", group=position.group, place=place, restored=restored)
        return restored

    async def _lose(self, position: Position, topic: str, lost: Sequence[OffsetRange]) -> None:
        """Note messages that are not retained, then give them up."""
        text = ", ".join(f"{start} to {end}" for start, end in lost[:5])
        self.lost[position] = f"messages {text} of {topic}/{position.partition}"
        log.error("inbox.lost", group=position.group, messages=self.lost[position])
        await self._call("inbox.restore", position, topic, ranges=lost, lost=True)

    async def _call(
        self, name: str, position: Position, topic: str, **args: object
    ) -> dict[str, Any]:
        at = {
            "group": position.group,
            "topic": topic,
            "topic_id": position.topic_id,
            "partition": position.partition,
        }
        return await self._call_broker(name, at | args)


def epoch_parts(shown: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return the epochs that the messages of a partition have, each with its offsets
    [start, end).
    """
    steps = shown["steps"]
    if not steps or steps[0][0]:
        steps = [(0, FIRST_EPOCH), *steps]
    ends = [*(start for start, _epoch in steps[1:]), FAR]
    return [(epoch, start, end) for (start, epoch), end in zip(steps, ends, strict=True)]


def cut(ranges: Iterable[OffsetRange], start: int, end: int) -> list[OffsetRange]:
    """Return what ranges have within [start, end)."""
    cut = ((max(low, start), min(high, end)) for low, high in ranges)
    return [(low, high) for low, high in cut if low < high]


def lacking(shown: dict[str, Any], ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
    """Return what the group has settled, the inbox does not have, and nobody passed
    over. Failed messages are among it: only the broker tells them.
    """
    settled = [(shown["base"], shown["floor"])] if shown["base"] < shown["floor"] else []
    settled += [(start, end) for start, end in shown["settled"] if start >= shown["base"]]
    known = sorted([*ranges, *map(tuple, shown["passed"])])
    return [gap for start, end in settled for gap in _gaps(known, start, end)]


def _gaps(known: Iterable[OffsetRange], start: int, end: int) -> Iterable[OffsetRange]:
    """Yield what sorted ranges leave of [start, end)."""
    for low, high in known:
        if low >= end:
            break
        if start < low:
            yield start, low
        start = max(start, high)
    if start < end:
        yield start, end
