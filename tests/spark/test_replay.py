"""Replays of plans: once, complete, and in order, through crashes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

import txmq
from tests.spark.consuming import drain, let_die
from tests.spark.damaging import damage
from tests.spark.plans import plan_of
from tests.spark.test_writing import sent, undecided
from txmq.client.protocol.transaction.parts import PART_BYTES
from txmq.errors import ConfigError, RequestRejected
from txmq.testing.own_broker import OwnBroker
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq_spark import resend
from txmq_spark.plan import broker_plans
from txmq_spark.plan.directory import OUTCOMES, StoredPlan
from txmq_spark.plan.held_letters import held_letters
from txmq_spark.replay import ReplayOptions, expected, replay
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.job_bundles import store_bundle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEYS = 4
AT_ONCE = {"rate": 0, "ramp_s": 0, "stop_after": 0}
REST = {b"%d" % key: [b"1", b"2", b"3", b"4"] for key in range(KEYS)}


class Killed(Exception):
    """The end of a driver."""


@pytest.fixture
def dead(broker: str, topic: str, client: txmq.Client) -> str:
    """A topic and a group of that name with letters.

    The second of five messages of each key is a letter; three wait behind it.
    """
    return fill(client, topic)


def fill(client: txmq.Client, topic: str) -> str:
    client.call("topic.create", name=topic, partitions=2)
    for n in range(5 * KEYS):
        client.send(topic, b"%d-%d" % (n % KEYS, n // KEYS), key=f"k{n % KEYS}")
    let_die(client, topic, topic, [b"%d-1" % key for key in range(KEYS)])
    return topic


def in_order(bodies: Iterable[bytes]) -> dict[bytes, list[bytes]]:
    """Return the messages of each key, in order."""
    found: dict[bytes, list[bytes]] = {}
    for body in bodies:
        found.setdefault(body[:1], []).append(body[2:])
    return found


def at_once(url: str, **more: Any) -> ReplayOptions:
    return ReplayOptions(url, settings=AT_ONCE, wait=False)._replace(**more)


def test_letters_are_put_back_once_and_their_keys_follow_in_order(
    spark: SparkSession, broker: str, dead: str, client: txmq.Client, tmp_path: Path
) -> None:
    plan = plan_of(spark, tmp_path / "plan", broker, dead)
    counts = expected(plan, broker).groupBy("outcome").count().collect()
    assert [tuple(row) for row in counts] == [("planned", KEYS)]
    begun = replay(plan, at_once(broker))
    assert not begun.is_over
    assert in_order(drain(client, dead, dead)) == REST
    assert client.call("group.show", group=dead)["fence_list"] == []
    done = replay(plan, at_once(broker, wait=True))
    assert (done.is_over, done.counts, done.gone) == (True, {"processed": KEYS}, 0)
    assert drain(client, dead, dead) == []
    rows = spark.read.parquet(f"{plan.path}/{OUTCOMES}").collect()
    assert {(row["group"], row["topic"], row["outcome"]) for row in rows} == {
        (dead, dead, "processed")
    }
    [gone] = {row["outcome"] for row in expected(plan, broker).collect()}
    assert gone == "gone"
    wrong = {"log_id": "is of log", "incarnation": "was restored from a backup since"}
    for fact, says in wrong.items():
        facts = plan.manifest.facts.model_copy(update={fact: "another"})
        other = plan._replace(manifest=plan.manifest.model_copy(update={"facts": facts}))
        with BrokerLink(broker) as link, pytest.raises(ConfigError, match=says):
            broker_plans.require_log(link, other)


def test_a_replay_whose_driver_dies_goes_on_when_it_is_run_again(
    spark: SparkSession,
    broker: str,
    dead: str,
    client: txmq.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver dies before and after each of its calls that change something."""
    plan = plan_of(spark, tmp_path / "plan", broker, dead)
    call, deaths = BrokerLink.call, list[str]()

    def killing(name: str, *, late: bool) -> Callable[..., dict[str, Any]]:
        def dying(link: BrokerLink, called: str, /, **args: object) -> dict[str, Any]:
            if called != name:
                return call(link, called, **args)
            if late:
                call(link, called, **args)
            deaths.append(name)
            raise Killed(name)

        return dying

    for name in ("plan.create", "plan.freeze", "plan.start"):
        for late in (False, True):
            monkeypatch.setattr(BrokerLink, "call", killing(name, late=late))
            with pytest.raises(Killed, match=name):
                replay(plan, at_once(broker))
            monkeypatch.undo()
    assert len(deaths) == 6
    assert replay(plan, at_once(broker)).plans[0]["letters"] == KEYS
    assert in_order(drain(client, dead, dead)) == REST
    assert replay(plan, at_once(broker, wait=True)).counts == {"processed": KEYS}


def test_a_repeated_task_adds_its_letters_once_and_none_that_died_again(
    broker: str, dead: str, client: txmq.Client
) -> None:
    with BrokerLink(broker) as link:
        rows = [
            {name: told[name] for name in ("group", "topic", "partition", "offset", "number")}
            for told in link.letters(dead, bodies=False)
        ]
        rows[0]["number"] -= 1
        link.call("plan.create", name=dead, group=dead, settings=AT_ONCE)
        added = [broker_plans._added(link, dead, rows).to_pylist()[0] for _ in range(2)]
        shown = link.call("plan.show", name=dead)
    assert [(one["added"], one["skipped"]) for one in added] == [(KEYS - 1, 1), (0, 0)]
    assert (shown["planned"], shown["skipped"]) == (KEYS - 1, 1)
    one, other = rows[:2], [row | {"group": "another"} for row in rows]
    assert list(broker_plans.pages([*one, *other, *one])) == [one, other, one]


def kill_once(spark: SparkSession, letters: Any, directory: Path, pid: int) -> Any:
    """Return letters whose tasks kill a process as soon as they have the first."""
    marker = str(directory / "killed")

    def kill(batches: Iterator[Any]) -> Iterator[Any]:
        import os
        import signal

        for batch in batches:
            if batch.num_rows and not os.path.exists(marker):  # noqa: PTH110
                with open(marker, "x"):  # noqa: PTH123
                    os.kill(pid, signal.SIGKILL)
            yield batch

    del spark
    return letters.mapInArrow(kill, letters.schema)


def test_a_broker_that_is_killed_while_letters_are_added_goes_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    with OwnBroker(tmp_path / "broker") as own:
        with txmq.connect(own.url, timeout=PATIENCE_S) as client:
            fill(client, "t")
        plan = plan_of(spark, tmp_path / "plan", own.url, "t")
        pid = own.process.process.pid
        killing = plan._replace(letters=kill_once(spark, plan.letters, tmp_path, pid))
        with restarted(own, tmp_path / "killed"):
            begun = replay(killing, at_once(own.url))
        assert own.starts == 2, "the broker was killed"
        assert (begun.plans[0]["letters"], begun.plans[0]["skipped"]) == (KEYS, 0)
        own.restart()
        with txmq.connect(own.url, timeout=PATIENCE_S) as client:
            assert in_order(drain(client, "t", "t")) == REST
        assert replay(plan, at_once(own.url, wait=True)).counts == {"processed": KEYS}


@contextmanager
def restarted(own: OwnBroker, marker: Path) -> Iterator[None]:
    """Start the broker again in the block, once it is killed."""

    def restart() -> None:
        wait_until(lambda: marker.exists() and not own.process.alive, what="its end")
        own.start()

    with ThreadPoolExecutor(1) as pool:
        restarting = pool.submit(restart)
        yield
        restarting.result(PATIENCE_S)


def test_letters_are_sent_again_once_in_the_order_of_their_keys(
    spark: SparkSession,
    broker: str,
    topic: str,
    client: txmq.Client,
    tmp_path: Path,
) -> None:
    """The driver dies behind the decision; another plan has one of the letters.

    To another topic these letters are not sent. The one that stayed is open when the
    other plan has ended, and no later run takes it for sent.
    """
    bodies = [b"%d-%d" % (n % KEYS, n // KEYS) for n in range(3 * KEYS)]
    for n, body in enumerate(bodies):
        client.send(topic, body, key=f"k{n % KEYS}", tag="x", headers={"n": str(n)})
    let_die(client, topic, topic, bodies, "concurrent")
    plan = plan_of(spark, tmp_path / "plan", broker, topic)
    [taken] = [one for one in client.call("dlq.list", group=topic)["letters"] if one["number"] == 1]
    place = [taken["topic"], taken["partition"], taken["offset"]]
    client.call("plan.create", name=f"{topic}-other", group=topic)
    client.call("plan.add", name=f"{topic}-other", letters=[place])

    die_resending(plan, broker, f"{topic}-again", "crashpoint")  # before it abandons
    client.call("topic.create", name=f"{topic}-else", partitions=1)
    elsewhere = resend.resend(plan, broker, f"{topic}-else")
    assert (elsewhere.abandoned, sent(broker, f"{topic}-else")) == (0, [])
    again = resend.resend(plan, broker, f"{topic}-again")
    assert (again.abandoned, again.kept) == (len(bodies) - 1, 1)
    client.call("plan.cancel", name=f"{topic}-other")
    assert resend.resend(plan, broker, f"{topic}-again").abandoned == 0
    seen = drain(client, f"{topic}-a", f"{topic}-again")
    left = [body for body in bodies if body != bodies[int(taken["headers"]["n"])]]
    assert in_order(seen) == in_order(sorted(left, key=bodies.index))
    states = client.call("dlq.stats", group=topic)
    assert states["letters"] == 1, json.dumps(states)
    with pytest.raises(RequestRejected):
        client.call("plan.start", name=resend.holding_name(plan, f"{topic}-again"))


def die_resending(plan: StoredPlan, url: str, topic: str, step: str) -> None:
    """Send letters again by a driver that dies where it calls `step`."""

    def killed(*arguments: object) -> None:
        assert step != "crashpoint" or arguments == ("spark.letters_sent",)
        raise Killed(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resend, step, killed)
        with pytest.raises(Killed, match=step):
            resend.resend(plan, url, topic)


@pytest.mark.parametrize("late", [False, True])
def test_letters_are_sent_once_though_their_task_is_killed(
    spark: SparkSession,
    broker: str,
    topic: str,
    client: txmq.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    late: bool,  # noqa: FBT001  # a case
) -> None:
    """Early, between parts of its bundle; late, when the bundle is stored."""
    client.call("topic.create", name=topic, partitions=1)
    client.call("topic.create", name=f"{topic}-again", partitions=1)
    bodies = [b"%d" % n + bytes(PART_BYTES // 3) for n in range(5)]
    for body in bodies:
        client.send(topic, body, key="k")
    let_die(client, topic, topic, bodies, "concurrent")
    plan = plan_of(spark, tmp_path / "plan", broker, topic)
    before = undecided(client)
    dying = killing_once(str(tmp_path / "killed"), after=len(bodies) - 1)
    if late:
        monkeypatch.setattr(resend, "store_bundle", killed_behind(dying))
    else:
        monkeypatch.setattr(resend, "held_letters", lambda *given: dying(held_letters(*given)))
    done = resend.resend(plan, broker, f"{topic}-again")
    assert (tmp_path / "killed").read_text() == "killed"
    assert (done.abandoned, done.kept) == (len(bodies), 0)
    assert [message.body for _, message in sent(broker, f"{topic}-again")] == bodies
    if late:  # one that is not complete is rolled back later, by the broker's clock
        assert undecided(client) <= before


def test_letters_are_sent_once_though_each_task_runs_twice_at_once(
    spark: SparkSession,
    broker: str,
    topic: str,
    client: txmq.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with speculation: each attempt of a task stores a bundle; Spark takes one."""
    client.call("topic.create", name=topic, partitions=2)
    client.call("topic.create", name=f"{topic}-again", partitions=3)
    bodies = [b"%d-%02d" % (n % 7, n // 7) for n in range(63)]
    for n, body in enumerate(bodies):
        client.send(topic, body, key=f"k{n % 7}")
    let_die(client, topic, topic, bodies, "concurrent")
    plan = plan_of(spark, tmp_path / "plan", broker, topic)
    before, stored, store_once = undecided(client), list[int](), resend.store_letters

    def store_twice(*given: Any) -> list[UUID]:
        with ThreadPoolExecutor(2) as pool:
            attempts = [
                attempt.result() for attempt in [pool.submit(store_once, *given) for _ in range(2)]
            ]
        stored.append(len(undecided(client) - before))
        return attempts[1]

    monkeypatch.setattr(resend, "store_letters", store_twice)
    assert resend.resend(plan, broker, f"{topic}-again").abandoned == len(bodies)
    assert stored == [2], "of one task"
    seen = [message.body for _, message in sent(broker, f"{topic}-again")]
    assert in_order(seen) == in_order(bodies)
    assert len(seen) == len(bodies)
    assert undecided(client) <= before


def killing_once(marker: str, after: int) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Return what passes items on, and kills its process, once, behind so many."""

    def passed(items: Iterable[Any]) -> Iterator[Any]:
        import os
        import signal

        for number, item in enumerate(items, 1):
            yield item
            if number == after and not os.path.exists(marker):  # noqa: PTH110
                with open(marker, "x") as file:  # noqa: PTH123
                    file.write("killed")
                os.kill(os.getpid(), signal.SIGKILL)

    return passed


def killed_behind(dying: Callable[[Iterable[Any]], Iterator[Any]]) -> Callable[..., Any]:
    """Return `store_bundle` whose process dies once the bundle is stored."""

    def dying_store(*given: Any) -> Any:
        stored = store_bundle(*given)
        for _ in dying(range(9)):
            pass
        return stored

    return dying_store


def test_a_key_is_sent_in_order_though_its_topic_has_grown_between(
    spark: SparkSession, broker: str, topic: str, client: txmq.Client, tmp_path: Path
) -> None:
    client.call("topic.create", name=topic, partitions=2)
    client.call("topic.create", name=f"{topic}-again", partitions=3)
    bodies = [b"%d-%02d" % (n % 7, n // 7) for n in range(63)]
    for n, body in enumerate(bodies):
        if n == len(bodies) // 2:
            client.call("topic.grow", name=topic, partitions=5)
        client.send(topic, body, key=f"k{n % 7}")
    let_die(client, topic, topic, bodies, "concurrent")
    places = [(one["topic"], one["partition"]) for one in letters_of(client, topic)]
    assert len(set(places)) > 2, "the topic has grown for the client, too"
    plan = plan_of(spark, tmp_path / "plan", broker, topic)
    assert resend.resend(plan, broker, f"{topic}-again").abandoned == len(bodies)
    seen = [message.body for _, message in sent(broker, f"{topic}-again")]
    assert sorted(seen) == sorted(bodies)
    assert in_order(seen) == in_order(bodies)


def letters_of(client: txmq.Client, group: str) -> list[dict[str, Any]]:
    return list(client.call("dlq.list", group=group, bodies=False)["letters"])


def test_letters_with_messages_behind_them_are_not_sent_again(
    spark: SparkSession, broker: str, dead: str, client: txmq.Client, tmp_path: Path
) -> None:
    plan = plan_of(spark, tmp_path / "plan", broker, dead)
    client.call("topic.create", name=f"{dead}-again", partitions=1)
    done = resend.resend(plan, broker, f"{dead}-again")
    assert (done.abandoned, done.kept) == (0, KEYS)
    assert drain(client, f"{dead}-a", f"{dead}-again") == []


def test_a_letter_that_is_damaged_after_it_was_sent_is_abandoned_like_the_others(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The driver dies behind the decision, and a body cannot be read any more. The next
    run leaves no letter open that it has sent.
    """
    with OwnBroker(tmp_path / "broker") as own, txmq.connect(own.url, timeout=PATIENCE_S) as client:
        plan = loose_letters(spark, own.url, client, tmp_path, BODIES)

        die_resending(plan, own.url, "again", "crashpoint")  # before it abandons
        damage(own.data, BODIES[1])
        done = resend.resend(plan, own.url, "again")
        assert (done.abandoned, done.kept) == (len(BODIES), 0)
        assert client.call("dlq.stats", group="t")["letters"] == 0
        assert sorted(message.body for _, message in sent(own.url, "again")) == sorted(BODIES)


def test_a_letter_that_is_damaged_before_it_was_sent_stays_open(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The driver dies before the decision, and a body cannot be read any more."""
    with OwnBroker(tmp_path / "broker") as own, txmq.connect(own.url, timeout=PATIENCE_S) as client:
        plan = loose_letters(spark, own.url, client, tmp_path, BODIES)

        die_resending(plan, own.url, "again", "write_letters")
        damage(own.data, BODIES[1])
        done = resend.resend(plan, own.url, "again")
        assert (done.abandoned, done.kept) == (len(BODIES) - 1, 1)
        letters = client.call("dlq.list", group="t", bodies=False)["letters"]
        assert [one["offset"] for one in letters if one["state"] == "dead"] == [1]
        assert sorted(message.body for _, message in sent(own.url, "again")) == [
            BODIES[0],
            BODIES[2],
        ]


BODIES = [b"first-letter", b"rotten-letter", b"last-letter"]


def loose_letters(
    spark: SparkSession, url: str, client: txmq.Client, path: Path, bodies: list[bytes]
) -> StoredPlan:
    """Return a plan of letters without keys, of group and topic `t`; make a topic
    `again`.
    """
    client.call("topic.create", name="t", partitions=1)
    client.call("topic.create", name="again", partitions=1)
    for body in bodies:
        client.send("t", body)
    let_die(client, "t", "t", bodies, "concurrent")
    return plan_of(spark, path / "plan", url, "t")


def test_letters_that_somebody_replays_are_not_sent_again(
    spark: SparkSession,
    broker: str,
    dead: str,
    client: txmq.Client,
    tmp_path: Path,
) -> None:
    """Somebody starts the plan that holds the letters: no run sends them besides."""
    plan = plan_of(spark, tmp_path / "plan", broker, dead)
    target = f"{dead}-again"
    client.call("topic.create", name=target, partitions=1)

    die_resending(plan, broker, target, "write_letters")
    client.call("plan.start", name=resend.holding_name(plan, target))
    with pytest.raises(ConfigError, match="was started: the broker replays the letters"):
        resend.resend(plan, broker, target)
    assert sent(broker, target) == []
    assert in_order(drain(client, dead, dead)) == REST
    with pytest.raises(ConfigError, match="was started"):
        resend.resend(plan, broker, target)
