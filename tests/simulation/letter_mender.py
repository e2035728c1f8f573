"""A simulated operator who edits dead letters before they are replayed, and touches
what is retried.

An edited body is the published one with a suffix that names the group and the number of
the edit. Consumers strip it, and check that it is theirs, and the newest.
"""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

from tests.simulation import operators
from tests.simulation.history import InvariantBroken
from txmq.batch import BatchView
from txmq.broker.engine.log_reader import read_batches
from txmq.errors import RequestRejected
from txmq.store.tables import EDITS, ENTRY_KEY, BatchEntry

if TYPE_CHECKING:
    from tests.simulation.simulated_broker import SimulatedBroker
    from tests.simulation.world import SimulatedWorld

SHARE = 0.3  # of the seeds
GROUPS = ("c", "o")
MARK = "~"  # before the suffix
COPIES = "copies"  # the topic
Origin = tuple[str, str, int, int]  # group, topic, partition, offset


def is_at_work(seed: int) -> bool:
    """Return whether the operator edits letters; a reset would take the edits back."""
    resets = seed // 2 % operators.EVERY == 0
    return not resets and Random(seed + 0.625).random() < SHARE


class LetterMender(operators.LetterReplayer):
    """Edit some of the letters, then replay all of them."""

    def __init__(self, world: SimulatedWorld, name: str, seed: int) -> None:
        super().__init__(world, name)
        self._own = Random(seed + 0.75)  # seeds without edits draw the same numbers

    async def _replay(self, group: str) -> None:
        if group in GROUPS:
            letters = (await self.connection.call("dlq.list", group=group))["letters"]
            for letter in letters:
                if letter["state"] == "dead" and self._own.random() < 0.6:
                    await self._edit(letter)
                if letter["state"] == "dead" and self._own.random() < 0.3:
                    await self._redrive(letter)
                if letter["state"] == "dead" and self._own.random() < 0.3:
                    await self._try(letter)
            await self._touch_retries(group)
        await super()._replay(group)

    async def _touch_retries(self, group: str) -> None:
        """Edit, hasten or bury some of the messages that are retried."""
        select = {"states": ["retrying", "replaying"]}
        retried = (await self.connection.call("dlq.list", group=group, select=select))["letters"]
        for one in retried:
            chance = self._own.random()
            if chance < 0.3:
                await self._edit(one)
            elif chance < 0.6:
                call = "retry.bury" if chance < 0.45 else "retry.now"
                place = [one["topic"], one["partition"], one["offset"]]
                reply = await self.connection.call(
                    call, group=group, letters=[place], operator="sim", reason="test"
                )
                self.world.history.counts[call] += len(reply["done"])

    async def _edit(self, letter: dict[str, Any]) -> None:
        place = {name: letter[name] for name in ("group", "topic", "partition", "offset")}
        group, _topic, partition, offset = place.values()
        published, number = self.world.history.bodies_at.get((partition, offset)), letter["edits"]
        if published is None:  # its deliveries were lost on their way
            return
        edits = self.world.history.edits.setdefault((group, partition, offset), [published])
        # edits that were made, and whose replies were lost
        self.world.history.edited[group, partition, offset] = number
        del edits[number + 1 :]
        reverts = number > 0 and self._own.random() < 0.3
        body = published if reverts else f"{published}{MARK}{group}{number + 1}"
        edits.append(body)
        changes = {"revert": True} if reverts else {"body": b64encode(body.encode()).decode()}
        if body == edits[number]:
            edits.pop()
            return
        try:
            reply = await self.connection.call(
                "dlq.edit", **place, edits=number, **changes, operator="sim", reason="test"
            )
        except RequestRejected:  # it is no open letter any more
            edits.pop()
            return
        self.world.history.edited[group, partition, offset] = reply["edits"]
        self.world.history.counts["edits"] += 1

    async def _redrive(self, letter: dict[str, Any]) -> None:
        """Copy a letter to a topic, often once more: a topic has one of each death."""
        copies = self.world.history.copies
        if not copies:
            topic = {"name": COPIES, "partitions": 1}
            await self.connection.call("topic.create", **topic)
        place = [letter["topic"], letter["partition"], letter["offset"]]
        death = (letter["group"], *place, letter["number"])
        copies.setdefault(death, False)
        for _repetition in range(self._own.choice((1, 2))):
            reply = await self.connection.call(
                "dlq.redrive", group=letter["group"], letters=[place], to=COPIES, operator="sim",
                reason="test",
            )  # fmt: skip
            copies[death] |= bool(reply["done"])
            self.world.history.counts["copies"] += len(reply["done"])

    async def _try(self, letter: dict[str, Any]) -> None:
        """Have a member try a letter. What it does not process dies again."""
        place = {name: letter[name] for name in ("group", "topic", "partition", "offset")}
        try:
            await self.connection.call(
                "dlq.try", **place, member=self._own.choice(("m0", "m1")), operator="sim"
            )
        except RequestRejected:  # there is no such member, or it does not own the partition
            return
        self.world.history.counts["trials"] += 1


def check_received(
    world: SimulatedWorld, group: str, partition: int, offset: int, body: str
) -> str:
    """Check that a group gets the newest version of a message that is known to be
    there, or a later one; return the body that was published.
    """
    place = (group, partition, offset)
    edits, least = world.history.edits.get(place, []), world.history.edited[place]
    published = body.partition(MARK)[0]
    if body not in (edits[least:] or [published]):
        raise InvariantBroken(
            f"{group} received {body} at {partition}/{offset} after {least} edits of {edits}"
        )
    world.history.counts["edited received"] += body != published
    return published


def check(world: SimulatedWorld) -> None:
    """Check at the end, when all letters are processed, that no version is left, and
    that the topic of copies has each death at most once.
    """
    assert world.broker is not None
    check_copies(world, origins(world.broker))
    left = [*world.broker.engine.state.tables[EDITS].range(b"")]
    if left:
        raise InvariantBroken(f"versions of letters that are processed: {left}")


def origins(broker: SimulatedBroker) -> Counter[Origin]:
    """Return the number of copies of each letter."""
    state, found = broker.engine.state, Counter[Origin]()
    topic = state.topics.get(COPIES)
    if topic is None:
        return found
    prefix = ENTRY_KEY.pack(topic.topic_id, 0, 0), ENTRY_KEY.pack(topic.topic_id, 1, 0)
    for _key, row in state.entries.range(*prefix):
        entry = BatchEntry._make(row)
        [data] = read_batches(broker.engine.store, [entry[:2]])
        for headers in BatchView(bytes(data)).headers:
            named = dict(headers)
            group, topic_name = named["txmq-origin-group"], named["txmq-origin-topic"]
            place = (int(named["txmq-origin-partition"]), int(named["txmq-origin-offset"]))
            found[group, topic_name, *place] += 1
    return found


def check_copies(world: SimulatedWorld, found: Counter[Origin]) -> None:
    """Check that each death has the copy that was reported, and at most one."""
    known, wanted = Counter[Origin](), Counter[Origin]()
    for (*origin, _number), is_known in world.history.copies.items():
        place: Any = tuple(origin)
        wanted[place] += 1
        known[place] += is_known
    if not known <= found <= wanted:
        raise InvariantBroken(f"copies of letters: {found}, not {known} to {wanted}")
