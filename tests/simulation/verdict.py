"""What must hold: FAULTS.md, invariants I1 to I7, I10, I11, in the words of this
simulation.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.simulation.branches import COMMITTED
from tests.simulation.history import Broken
from tests.simulation.node import dumped, recover, without_boot
from txmq.batch import BatchView
from txmq.broker.log_reader import published
from txmq.core.transactions.model import get
from txmq.model.bundle import GroupState

if TYPE_CHECKING:
    from tests.simulation.world import World


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


def check_group(world: World, body: str) -> None:
    """At the moment of a delivery: nothing undecided, nothing rolled back, and never a
    part of a group.
    """
    key, version, name = body.split("|")
    if len(name) < 32:  # a plain send's
        return
    token = bytes.fromhex(name.split("-")[0])
    require(
        token not in world.history.dead_tokens,
        f"{body} was delivered, but its transaction was rolled back",
    )
    if int(version):
        require(
            token in world.database.committed,
            f"{body} was delivered before its transaction committed",
        )
    assert world.node is not None
    row = get(world.node.engine.state, token)
    require(
        row is not None and row.state is GroupState.PUBLISHED,
        f"{body} was delivered, but its group is not published",
    )
    del key


def check_time(world: World, body: str) -> None:
    """At the moment of a delivery: nothing comes early, by the broker's own clock, and
    nothing that was taken back.
    """
    assert world.node is not None
    require(
        world.history.due.get(body, 0) <= world.node.engine.now(),
        f"{body} was delivered before its time",
    )
    require(body not in world.history.recalled, f"{body} was delivered, but it was recalled")


def check_everything(world: World) -> None:
    """When all is calm and drained."""
    bodies = _topic(world)
    _nothing_lost_or_doubled(world, bodies)
    _transactions(world, bodies)
    _branches(world, bodies)
    _order(bodies)
    _times(world, bodies)
    _tickets(world, bodies)
    _consumers(world, bodies)
    _recovery_is_a_fold(world)


def _topic(world: World) -> list[list[str]]:
    """All that readers can see, partition by partition."""
    assert world.node is not None
    engine, found = world.node.engine, []
    topic = engine.state.topics["t"]
    for partition in range(len(topic.ends)):
        rows: list[str] = []
        for base, entry in published(
            engine.state, topic.topic_id, partition, 0, engine.store.durable
        ):
            require(base == len(rows), f"a gap before offset {base} of partition {partition}")
            rows += [
                raw.decode()
                for raw in BatchView(engine.store.read(entry.position, entry.length)).bodies
            ]
        for offset, body in enumerate(rows):
            world.history.seen(partition, offset, body)
        found.append(rows)
    return found


def _nothing_lost_or_doubled(world: World, bodies: list[list[str]]) -> None:
    times = Counter(body for rows in bodies for body in rows)
    for body, count in times.items():
        require(count == 1, f"{body} is in the topic {count} times")
    for body, place in world.history.acknowledged.items():
        require(body in times, f"{body} was acknowledged and is lost")
        if place is not None:
            require(bodies[place[0]][place[1]] == body, f"{body} is not where its receipt says")


def _transactions(world: World, bodies: list[list[str]]) -> None:
    there = {body for rows in bodies for body in rows}
    for token, group in world.history.groups.items():
        present = sum(body in there for body in group)
        require(present in (0, len(group)), f"a part of group {token.hex()} is in the topic")
        wanted = token in world.database.committed or token in world.history.decided
        require(not wanted or present > 0, f"{group} was committed and is lost")
        require(
            not (token in world.history.dead_tokens and present),
            f"{group} was rolled back and is in the topic",
        )


def _branches(world: World, bodies: list[list[str]]) -> None:
    """What a home broker decided is the same everywhere."""
    there = {body for rows in bodies for body in rows}
    for token, state in world.branches.items():
        present = any(body in there for body in world.history.groups.get(token, []))
        require(
            present == (state == COMMITTED),
            f"the branch of {token.hex()} is {state}, messages there: {present}",
        )


def _order(bodies: list[list[str]]) -> None:
    for rows in bodies:
        last: dict[str, int] = {}
        sequences: dict[tuple[str, str], int] = {}
        for body in rows:
            key, version, name = body.split("|")
            if int(version):
                require(
                    int(version) > last.get(key, 0), f"{body} stands after version {last.get(key)}"
                )
                last[key] = int(version)
            elif not len(name) >= 32:
                producer, number = name.split("-")
                require(
                    int(number) > sequences.get((producer, key), -1),
                    f"{body} stands after {sequences.get((producer, key))}",
                )
                sequences[producer, key] = int(number)


def _times(world: World, bodies: list[list[str]]) -> None:
    """What was recalled never comes; the rest of one key comes in the order of its
    times.
    """
    history = world.history
    for rows in bodies:
        last: dict[str, int] = {}
        for body in rows:
            require(body not in history.recalled, f"{body} was recalled and is in the topic")
            key, due = body.split("|")[0], history.due[body] if body in history.waited else 0
            require(
                not due or due >= last.get(key, 0),
                f"{body} is due at {due}, and stands after {last.get(key)}",
            )
            last[key] = max(last.get(key, 0), due)


def _tickets(world: World, bodies: list[list[str]]) -> None:
    """What is sent once a half of its key is stored comes after it, whenever the half
    is decided.
    """
    history = world.history
    for rows in bodies:
        for at, body in enumerate(rows):
            key, version, name = body.split("|")
            since = history.stored.get(bytes.fromhex(name.split("-")[0])) if int(version) else None
            passed = [
                b
                for b in rows[:at]
                if b.startswith(f"{key}|")
                and since is not None
                and history.started.get(b, 0) > since
            ]
            require(not passed, f"{passed} were sent when {body} was stored, and stand before it")


def _consumers(world: World, bodies: list[list[str]]) -> None:
    history = world.history
    for rows in bodies:
        for body in rows:
            require(history.handled[body] > 0, f"{body} was never processed by group c")
            require(history.handled[f"o:{body}"] > 0, f"{body} was never processed by group o")
    for key, version in world.database.versions.items():
        require(
            len(history.processed.get(key, [])) == version,
            f"{key}: {version} versions, processed {history.processed.get(key)}",
        )


def _recovery_is_a_fold(world: World) -> None:
    """What a restart would make of the disk is what is in memory now."""
    assert world.node is not None
    now = without_boot(dumped(world.node.engine.state))
    _log, state = recover(world.disk.restart(), world.now())
    again = without_boot(dumped(state))
    difference = [row[:2] for row in set(now) ^ set(again)]
    require(not difference, f"recovery differs in {sorted(difference)[:5]}")
