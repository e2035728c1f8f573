"""Replays of plans: once, complete, and in order, through crashes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from tests.spark.consuming import drain, let_die
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ConfigError, TransactionAborted
from txmq_spark import replay as replay_module
from txmq_spark.broker_link import BrokerLink
from txmq_spark.named_jobs import current_job, job_token
from txmq_spark.plan import Letter, PlanRules, make_plan
from txmq_spark.plan_file import PlanEntry, PlanFile, PlanInputs, decode_plan, encode_plan
from txmq_spark.replay import (
    LetterOutcome,
    ReplayResult,
    expected_outcomes,
    past_outcomes,
    replay,
    take_canary,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    import txmq

pytestmark = pytest.mark.timeout(300)  # includes the start of a JVM on a loaded machine
KEYS = 4


@pytest.fixture
def dead(broker: str, topic: str, client: txmq.Client) -> str:
    """A topic and a group of that name with letters.

    The second of five messages of each key is a letter; three wait behind it.
    """
    client.call("topic.create", name=topic, partitions=2)
    for n in range(5 * KEYS):
        client.send(topic, b"%d-%d" % (n % KEYS, n // KEYS), key=f"k{n % KEYS}")
    let_die(client, topic, topic, [b"%d-1" % key for key in range(KEYS)])
    return topic


def planned(broker: str, group: str, rules: PlanRules | None = None) -> PlanFile:
    rules = rules or PlanRules()
    with BrokerLink(broker) as link:
        facts = PlanInputs(group=group, log_id=link.log_id, ends={group: (0,)})
        letters = [
            Letter(
                **{name: told[name] for name in Letter._fields if name in told}
                | {"parked": told["parked_behind"]}
            )
            for told in link.letters(group, bodies=False)
        ]
    return decode_plan(encode_plan(facts, rules, make_plan(letters, rules)))


def in_order(bodies: Iterable[bytes]) -> dict[bytes, list[bytes]]:
    """Return the messages of each key, in order."""
    found: dict[bytes, list[bytes]] = {}
    for body in bodies:
        found.setdefault(body[:1], []).append(body[2:])
    return found


REST = {b"%d" % key: [b"1", b"2", b"3", b"4"] for key in range(KEYS)}


def test_letters_are_delivered_again_and_their_keys_follow_in_order(
    spark: SparkSession, broker: str, dead: str, client: txmq.Client
) -> None:
    manifest = planned(broker, dead, PlanRules(chunk=2))
    done = replay(spark, broker, manifest)
    assert [one.outcome for one in done.outcomes] == ["done"] * KEYS
    assert not done.repeated
    assert in_order(drain(client, dead, dead)) == REST
    assert client.call("group.show", group=dead)["fence_list"] == []
    lines = [json.loads(line) for line in done.lines()]
    assert sorted((line["key"], line["outcome"], line["why"]) for line in lines) == [
        (f"k{n}", "done", "") for n in range(KEYS)
    ]


def test_a_plan_that_is_run_twice_replays_once(
    spark: SparkSession, broker: str, dead: str, client: txmq.Client
) -> None:
    manifest = planned(broker, dead)
    replay(spark, broker, manifest)
    again = replay(spark, broker, manifest)
    assert (again.repeated, {one.outcome for one in again.outcomes}) == (True, {"done"})
    assert in_order(drain(client, dead, dead)) == REST
    let_die(client, dead, dead, [])
    assert replay(spark, broker, manifest).repeated
    assert drain(client, dead, dead) == []


def test_letters_that_die_again_are_replayed_by_another_plan_only(
    spark: SparkSession, broker: str, dead: str, client: txmq.Client
) -> None:
    first = planned(broker, dead)
    replay(spark, broker, first)
    let_die(client, dead, dead, [b"%d-1" % key for key in range(KEYS)])
    again = replay(spark, broker, first)
    assert (again.repeated, {one.outcome for one in again.outcomes}) == (True, {"done"})
    assert {one.why for one in replay(spark, broker, first, canary=1).outcomes} == {
        "it was replayed after the plan was made, and failed again"
    }
    second = planned(broker, dead)
    assert second.header.digest != first.header.digest
    assert not replay(spark, broker, second).repeated
    assert in_order(drain(client, dead, dead)) == REST


def test_a_dry_run_changes_nothing(
    spark: SparkSession, broker: str, dead: str, client: txmq.Client
) -> None:
    done = replay(spark, broker, planned(broker, dead), dry_run=True)
    assert (done.job, [one.outcome for one in done.outcomes]) == (None, ["planned"] * KEYS)
    assert drain(client, dead, dead) == []


def test_a_canary_is_replayed_first_and_the_rest_later(
    spark: SparkSession, broker: str, dead: str, client: txmq.Client
) -> None:
    manifest = planned(broker, dead)
    first = replay(spark, broker, manifest, canary=1)
    [one] = first.outcomes
    key = (one.entry.key or "")[1:].encode()
    assert in_order(drain(client, dead, dead)) == {key: REST[key]}
    rest = replay(spark, broker, manifest)
    assert sorted(one.outcome for one in rest.outcomes) == ["done"] * (KEYS - 1) + ["gone"]
    assert in_order(drain(client, dead, dead)) == {
        other: left for other, left in REST.items() if other != key
    }


def test_a_run_that_died_is_rolled_back_and_repeated(
    spark: SparkSession, broker: str, dead: str, client: txmq.Client
) -> None:
    manifest = planned(broker, dead, PlanRules(chunk=1))
    died = job_token(f"replay {manifest.header.digest}")
    with BrokerLink(broker) as link:
        foreseen = list(
            expected_outcomes(manifest.replays, replay_module._open_letters(link, dead), "done")
        )
    assert replay_module._store_chunks(spark, broker, dead, died, foreseen[:2])
    done = replay(spark, broker, manifest)
    assert (done.repeated, done.job == died) == (False, False)
    assert in_order(drain(client, dead, dead)) == REST


def test_a_repeated_task_stores_its_bundle_once(
    broker: str, dead: str, client: txmq.Client
) -> None:
    manifest = planned(broker, dead)
    places = json.dumps(
        [(entry.topic, entry.partition, entry.offset) for entry in manifest.replays]
    )
    job, token = new_token(), new_token()
    with BrokerLink(broker) as link:
        assert [
            replay_module._store_chunk(link, dead, job, token.hex, places) for _ in range(2)
        ] == [
            None,
            None,
        ]
        other = replay_module._store_chunk(link, dead, job, new_token().hex, places)
    assert "an undecided transaction replays it" in str(other)
    assert len(client.call("job.show", token=job.hex)["groups"]) == 1
    client.job(job).decide([token])
    assert in_order(drain(client, dead, dead)) == REST


def test_of_two_runs_at_once_one_replays(
    spark: SparkSession,
    broker: str,
    dead: str,
    client: txmq.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second run takes over when the first has stored all bundles and not decided."""
    manifest, others = planned(broker, dead), list[ReplayResult]()
    store = replay_module._store_chunks

    def interrupted(*arguments: Any) -> list[UUID] | None:
        stored = store(*arguments)
        monkeypatch.setattr(replay_module, "_store_chunks", store)
        others.append(replay(spark, broker, manifest))
        return stored

    monkeypatch.setattr(replay_module, "_store_chunks", interrupted)
    ours = replay(spark, broker, manifest)
    assert (ours.repeated, [other.repeated for other in others]) == (True, [False])
    assert in_order(drain(client, dead, dead)) == REST


def test_a_letter_that_is_closed_during_a_run_is_left_out_of_the_next_attempt(
    spark: SparkSession,
    broker: str,
    dead: str,
    client: txmq.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = planned(broker, dead)
    gone = manifest.replays[2]
    store = replay_module._store_chunks

    def late(*arguments: Any) -> list[UUID] | None:
        named = [[gone.topic, gone.partition, gone.offset]]
        client.call("dlq.abandon", group=dead, letters=named, operator="tests", reason="a test")
        monkeypatch.setattr(replay_module, "_store_chunks", store)
        return store(*arguments)

    monkeypatch.setattr(replay_module, "_store_chunks", late)
    done = replay(spark, broker, manifest)
    assert {one.entry: one.outcome for one in done.outcomes}[gone] == "gone"
    assert [one.outcome for one in done.outcomes].count("done") == KEYS - 1


def test_a_run_gives_up_after_several_conflicts_with_others(
    spark: SparkSession,
    broker: str,
    dead: str,
    client: txmq.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_module, "_store_chunks", lambda *_: None)
    with pytest.raises(TransactionAborted, match="run it again"):
        replay(spark, broker, planned(broker, dead))
    assert drain(client, dead, dead) == []


def test_a_plan_whose_letters_are_all_in_use_can_be_run_later(
    spark: SparkSession, broker: str, dead: str, client: txmq.Client
) -> None:
    manifest = planned(broker, dead)
    places = json.dumps(
        [(entry.topic, entry.partition, entry.offset) for entry in manifest.replays]
    )
    others = new_token()
    with BrokerLink(broker) as link:
        assert replay_module._store_chunk(link, dead, others, new_token().hex, places) is None
    refused = replay(spark, broker, manifest)
    assert (refused.job, {one.outcome for one in refused.outcomes}) == (None, {"refused"})
    client.job(others).abort()
    assert {one.outcome for one in replay(spark, broker, manifest).outcomes} == {"done"}
    assert in_order(drain(client, dead, dead)) == REST


def test_a_plan_of_another_log_is_refused(spark: SparkSession, broker: str, dead: str) -> None:
    other = planned(broker, dead)
    facts = other.header.facts.model_copy(update={"log_id": str(new_token())})
    strange = other.model_copy(update={"header": other.header.model_copy(update={"facts": facts})})
    with pytest.raises(ConfigError, match="is of log"):
        replay(spark, broker, strange)


def test_an_empty_plan_is_done_at_once(
    spark: SparkSession, broker: str, topic: str, client: txmq.Client
) -> None:
    client.send(topic, b"x")
    let_die(client, topic, topic, [])
    assert replay(spark, broker, planned(broker, topic)).outcomes == ()


# Expected outcomes, without a broker.


def entry(offset: int, key: str | None = None, chunk: int = 0) -> PlanEntry:
    return PlanEntry.model_validate(
        {
            "topic": "t",
            "partition": 0,
            "offset": offset,
            "message_id": f"m-{offset}",
            "key": key,
            "class": "replay_chain" if key else "replay_alone",
            "reason": "",
            "fingerprint": "",
            "dead_at": 7,
            "chunk": chunk,
        }
    )


def told(offset: int, **fields: Any) -> tuple[tuple[str, int, int], dict[str, Any]]:
    return ("t", 0, offset), {
        "message_id": f"m-{offset}",
        "reserved_by": None,
        "dead_at": 7,
    } | fields


def test_unavailable_letters_are_refused_and_reserved_ones_are_not_overtaken() -> None:
    entries = [
        entry(1, "a"),
        entry(2, "a"),
        entry(3, "b"),
        entry(4),
        entry(5),
        entry(6, "b"),
        entry(7, "a"),
        entry(8),
    ]
    letters = dict(
        [told(1), told(2, reserved_by="ff"), told(4, message_id="other"), told(5), told(6), told(7)]
    )
    letters |= [told(8, dead_at=9)]
    found = list(expected_outcomes(entries, letters, "done"))
    assert [(one.entry.offset, one.outcome) for one in found] == [
        (1, "done"),
        (2, "refused"),
        (3, "gone"),
        (4, "refused"),
        (5, "done"),
        (6, "done"),
        (7, "refused"),
        (8, "refused"),
    ]
    assert [one.why for one in found if one.why] == [
        "transaction ff has reserved it",
        "it is no dead letter any more: it was replayed before, or closed",
        "it was replayed after the plan was made, and failed again",
        "behind 0/2 of its key, which stays",
        "it was replayed after the plan was made, and failed again",
    ]


def test_an_earlier_run_has_replayed_all_letters_but_the_unchanged_ones() -> None:
    letters = dict([told(1), told(2, dead_at=9)])
    found = past_outcomes([entry(1), entry(2), entry(3)], letters)
    assert [(one.entry.offset, one.outcome) for one in found] == [
        (1, "refused"),
        (2, "done"),
        (3, "done"),
    ]


def test_a_canary_ends_with_a_whole_key() -> None:
    entries = [entry(1, "a"), entry(2, "a"), entry(3, "b"), entry(4), entry(5)]
    assert [len(take_canary(entries, count)) for count in (1, 2, 3, 4, 5, 9)] == [2, 2, 3, 4, 5, 5]
    with pytest.raises(ConfigError):
        take_canary(entries, 0)


class Jobs:
    """The jobs of a broker, by generation.

    Each has its outcome, or None, and the number of stored bundles.
    """

    def __init__(self, *generations: tuple[str | None, int]) -> None:
        self._jobs = {job_token("n", number).hex: job for number, job in enumerate(generations)}

    def call(self, name: str, /, **args: Any) -> dict[str, Any]:
        known, groups = self._jobs[args["token"]]
        if name == "job.decide":
            known, groups = self._jobs[args["token"]] = (known or args["outcome"], 0)
        return {"outcome": known, "groups": ["aa"] * groups}


def test_the_current_generation_is_the_first_that_is_not_rolled_back() -> None:
    assert current_job(Jobs((None, 0)), "n") == (job_token("n", 0), False)
    assert current_job(Jobs(("ROLLBACK", 0), ("ROLLBACK", 0), ("COMMIT", 0)), "n") == (
        job_token("n", 2),
        True,
    )
    assert current_job(Jobs((None, 3), (None, 0)), "n") == (job_token("n", 0), False)


def test_taking_a_job_over_rolls_back_an_undecided_generation() -> None:
    jobs = Jobs((None, 3), (None, 0))
    assert current_job(jobs, "n", take_over=True) == (job_token("n", 1), False)
    assert jobs.call("job.show", token=job_token("n", 0).hex)["outcome"] == "ROLLBACK"
    assert current_job(Jobs((None, 0)), "n", take_over=True) == (job_token("n", 0), False)


def test_tokens_of_jobs_differ_by_name_and_generation() -> None:
    tokens = {
        job_token(name, generation) for name in ("a", "b", "a 1", "") for generation in range(3)
    }
    assert len(tokens) == 12
    assert {token.version for token in tokens} == {8}
    assert job_token("a") == job_token("a", 0)


def test_outcomes_name_their_places() -> None:
    assert LetterOutcome(entry(3), "done").place == ("t", 0, 3)
