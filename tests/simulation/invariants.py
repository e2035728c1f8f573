"""Checks of the simulation: invariants I1 to I7, I10 and I11 of docs/FAULTS.md."""

from __future__ import annotations

from collections import Counter
from itertools import product

from tests.simulation.history import InvariantBroken
from tests.simulation.simulated_broker import dump_tables, recover, without_broker_counters
from tests.simulation.world import COMMITTED, SimulatedWorld
from txmq.batch import BatchView
from txmq.broker.engine.log_reader import published_batches
from txmq.core.retention.broker_time import TOLERATED_US
from txmq.core.transactions.model import get
from txmq.model.bundle import BundleState

TOKEN_DIGITS = 32


def require(condition: bool, what: str) -> None:  # noqa: FBT001
    if not condition:
        raise InvariantBroken(what)


def check_delivery(world: SimulatedWorld, partition: int, offset: int, body: str) -> None:
    """Check a message at the moment of its delivery to a consumer."""
    world.history.record_seen(partition, offset, body)
    _check_transaction(world, body)
    _check_time(world, body)
    _check_certain(world)


def _check_certain(world: SimulatedWorld) -> None:
    """Check that what cannot be undone goes by a time that is past."""
    assert world.broker is not None
    engine = world.broker.engine
    ahead = engine.certain() - world.now()
    require(ahead <= TOLERATED_US, f"the certain time is {ahead} µs ahead")


def _check_transaction(world: SimulatedWorld, body: str) -> None:
    """Check that a delivered message is committed, and that its whole bundle is
    published.
    """
    _key, version, name = body.split("|")
    if len(name) < TOKEN_DIGITS:  # of a plain send
        return
    token = bytes.fromhex(name.split("-")[0])
    require(
        token not in world.history.rolled_back,
        f"{body} was delivered, but its transaction was rolled back",
    )
    if int(version):
        require(
            token in world.database.committed,
            f"{body} was delivered before its transaction committed",
        )
    assert world.broker is not None
    row = get(world.broker.engine.state, token)
    require(
        row is not None and row.state is BundleState.PUBLISHED,
        f"{body} was delivered, but its bundle is not published",
    )


def _check_time(world: SimulatedWorld, body: str) -> None:
    """Check by the clock of the broker that a message is due, and was not recalled."""
    assert world.broker is not None
    require(
        world.history.due_at.get(body, 0) <= world.broker.engine.now(),
        f"{body} was delivered before its time",
    )
    require(body not in world.history.recalled, f"{body} was delivered, but it was recalled")


def check_everything(world: SimulatedWorld) -> None:
    """Check the whole history at the end, when nothing is left to do."""
    bodies = _read_topic(world)
    _check_losses_and_duplicates(world, bodies)
    _check_transactions(world, bodies)
    _check_branches(world, bodies)
    _check_order(bodies)
    _check_times(world, bodies)
    _check_tickets(world, bodies)
    _check_consumers(world, bodies)
    _check_certain(world)
    _check_recovery(world)


def _read_topic(world: SimulatedWorld) -> list[list[str]]:
    """Return the bodies that readers can see, by partition."""
    assert world.broker is not None
    engine, found = world.broker.engine, []
    topic = engine.state.topics["t"]
    for partition in range(len(topic.end_offsets)):
        rows: list[str] = []
        for base, entry in published_batches(
            engine.state, topic.topic_id, partition, 0, engine.store.durable
        ):
            require(base == len(rows), f"a gap before offset {base} of partition {partition}")
            rows += [
                raw.decode()
                for raw in BatchView(engine.store.read(entry.position, entry.length)).bodies
            ]
        for offset, body in enumerate(rows):
            world.history.record_seen(partition, offset, body)
        found.append(rows)
    return found


def _check_losses_and_duplicates(world: SimulatedWorld, bodies: list[list[str]]) -> None:
    times = Counter(body for rows in bodies for body in rows)
    for body, count in times.items():
        require(count == 1, f"{body} is in the topic {count} times")
    for body, place in world.history.acknowledged.items():
        require(body in times, f"{body} was acknowledged and is lost")
        if place is not None:
            require(bodies[place[0]][place[1]] == body, f"{body} is not where its receipt says")


def _check_transactions(world: SimulatedWorld, bodies: list[list[str]]) -> None:
    there = {body for rows in bodies for body in rows}
    for token, bundle in world.history.bundles.items():
        present = sum(body in there for body in bundle)
        require(present in (0, len(bundle)), f"a part of bundle {token.hex()} is in the topic")
        committed = token in world.database.committed or token in world.history.committed
        require(not committed or present > 0, f"{bundle} was committed and is lost")
        require(
            not (token in world.history.rolled_back and present),
            f"{bundle} was rolled back and is in the topic",
        )


def _check_branches(world: SimulatedWorld, bodies: list[list[str]]) -> None:
    """Check that messages and branches of a home transaction ended in the same way."""
    there = {body for rows in bodies for body in rows}
    for token, state in world.branches.items():
        present = any(body in there for body in world.history.bundles.get(token, []))
        require(
            present == (state == COMMITTED),
            f"the branch of {token.hex()} is {state}, messages there: {present}",
        )


def _check_order(bodies: list[list[str]]) -> None:
    for rows in bodies:
        last: dict[str, int] = {}
        sequences: dict[tuple[str, str], int] = {}
        for body in rows:
            key, version, name = body.split("|")
            if int(version):
                require(int(version) > last.get(key, 0), f"{body} is after version {last.get(key)}")
                last[key] = int(version)
            elif len(name) < TOKEN_DIGITS:
                producer, number = name.split("-")
                require(
                    int(number) > sequences.get((producer, key), -1),
                    f"{body} is after {sequences.get((producer, key))}",
                )
                sequences[producer, key] = int(number)


def _check_times(world: SimulatedWorld, bodies: list[list[str]]) -> None:
    """Check that recalled messages stay away, and that delayed ones of a key come in
    the order of their times.
    """
    history = world.history
    for rows in bodies:
        last: dict[str, int] = {}
        for body in rows:
            require(body not in history.recalled, f"{body} was recalled and is in the topic")
            key, due = body.split("|")[0], history.due_at[body] if body in history.delayed else 0
            require(
                not due or due >= last.get(key, 0),
                f"{body} is due at {due}, and is after {last.get(key)}",
            )
            last[key] = max(last.get(key, 0), due)


def _check_tickets(world: SimulatedWorld, bodies: list[list[str]]) -> None:
    """Check that messages sent after a half message of their key was stored come after
    it, whenever the half message is decided.
    """
    history = world.history
    for rows in bodies:
        for at, body in enumerate(rows):
            key, version, name = body.split("|")
            since = (
                history.stored_at.get(bytes.fromhex(name.split("-")[0])) if int(version) else None
            )
            overtaking = [
                b
                for b in rows[:at]
                if b.startswith(f"{key}|")
                and since is not None
                and history.sent_at.get(b, 0) > since
            ]
            require(
                not overtaking, f"{overtaking} were sent when {body} was stored, and are before it"
            )


def _check_consumers(world: SimulatedWorld, bodies: list[list[str]]) -> None:
    history = world.history
    groups = {group for group, topic in world.consumer_groups.items() if topic == "t"}
    prefixes = {group: "" if group == "c" else f"{group}:" for group in groups}
    for rows in bodies:
        for body, (group, prefix) in product(rows, prefixes.items()):
            require(
                history.handled[prefix + body] > 0, f"{body} was never processed by group {group}"
            )
    for key, version in world.database.versions.items():
        for group in groups - {"c"}:
            name = key if group == "o" else prefixes[group] + key
            require(
                len(history.processed_versions.get(name, [])) == version,
                f"{name}: {version} versions, processed {history.processed_versions.get(name)}",
            )


def _check_recovery(world: SimulatedWorld) -> None:
    """Check that recovery from the disk would give the state that is in memory."""
    assert world.broker is not None
    now = without_broker_counters(dump_tables(world.broker.engine.state))
    _log, state = recover(world.disk.restart(), world.now())
    again = without_broker_counters(dump_tables(state))
    difference = [row[:2] for row in set(now) ^ set(again)]
    require(not difference, f"recovery differs in {sorted(difference)[:5]}")
