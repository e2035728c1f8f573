"""Dead letters for services, by both faces of the client, on a real broker."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel

import txmq
import txmq.twisted
from tests.cli.peer import peer
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from txmq.client.blocking.client import Client
from txmq.client.protocol.awaited.jobs import JobBundle
from txmq.client.protocol.letters import DeadLetter, LetterSearch
from txmq.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    LocalProtocolError,
    UnknownGroup,
    UnknownMember,
    UnknownTopic,
)
from txmq.testing.wait import PATIENCE_S

Connect = Callable[..., Client]


def make_letters(real: RealBroker, client: Client, topic: str, group: str, count: int) -> None:
    for number in range(count):
        client.send(topic, b"%d" % number, key=f"k{number % 2}", headers={"n": str(number)})
    with peer(real.url) as member:
        member.dead_letters(group, topic, count)


def test_a_service_iterates_over_a_selection(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    make_letters(real, client, "letters-blocking", "letters-g", 5)
    found = list(client.letters("letters-g"))
    assert [letter.body for letter in found] == [None] * 5
    assert {letter.error_type for letter in found} == {"ValueError"}
    keyed = list(client.letters("letters-g", key="k1", bodies=True))
    assert sorted(letter.body or b"" for letter in keyed) == [b"1", b"3"]
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    assert len(list(client.letters("letters-g", died_from=hour_ago, text="NO SUCH"))) == 5
    assert list(client.letters("letters-g", died_before=hour_ago)) == []
    [one] = client.letters("letters-g", header=("n", "4"))
    assert (one.key, one.headers, one.state, one.damaged) == ("k0", {"n": "4"}, "dead", "")
    client.call("dlq.save", name="letters-one", select={"header": ["n", "3"]})
    [saved] = client.letters("letters-g", saved="letters-one", bodies=True)
    assert saved.body == b"3"
    with pytest.raises(UnknownGroup):
        list(client.letters("letters-nobody"))
    with pytest.raises(UnknownTopic):
        list(client.letters("letters-g", topic="letters-nowhere"))
    with pytest.raises(LocalProtocolError, match="letters-one"):
        list(client.letters("letters-g", saved="letters-one", key="k1"))


def test_a_service_touches_what_is_retried(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    named: dict[str, Any] = {"operator": "kim", "reason": "a test"}
    for number in range(3):
        client.send("retried", b"%d" % number, key=f"k{number}")
    with client.consumer("retried-g", ["retried"], retry=txmq.RetryPolicy((3_600,))) as consumer:
        for _ in range(3):
            received = consumer.receive(timeout=PATIENCE_S)
            assert received is not None
            consumer.nack(received, error=ValueError("boom"))
    first, second, third = client.letters("retried-g", states=["retrying"])
    assert (first.state, first.held_by, first.error_type) == ("retrying", "", "ValueError")
    assert first.next_at > first.first_failed_at
    with pytest.raises(LocalProtocolError, match="neither letters"):
        client.retry_now("retried-g", operator="kim")
    assert client.edit_letter(first, body=b"mended", **named) == 1
    assert len(client.retry_now("retried-g", key=first.key or "", operator="kim").done) == 1
    assert client.bury_retries("retried-g", [second], **named).refused == []
    assert client.skip_retries("retried-g", [third], **named).refused == []
    ended = client.letters("retried-g", states=["open", "abandoned"])
    states = {one.key: one.state for one in ended}
    assert states == {second.key: "dead", third.key: "abandoned"}
    with client.consumer("retried-g", ["retried"]) as consumer:
        again = consumer.receive(timeout=PATIENCE_S)
    assert again is not None
    assert again.body == b"mended"


def test_the_twisted_face_iterates_over_a_selection(
    real: RealBroker, connect: Connect, in_reactor: InReactor, reactor: Any
) -> None:
    make_letters(real, connect(real.url), "letters-twisted", "letters-t", 3)

    async def use() -> list[bytes | None]:
        client = txmq.twisted.connect(reactor, real.url, service="s")
        try:
            return [letter.body async for letter in client.letters("letters-t", bodies=True)]
        finally:
            await client.close()

    assert sorted(map(bytes, filter(None, in_reactor(use)))) == [b"0", b"1", b"2"]


def test_a_cluster_has_the_letters_of_its_brokers(real: RealBroker, connect: Connect) -> None:
    """Here they are one broker twice, so that each letter comes twice."""
    make_letters(real, connect(real.url), "letters-cluster", "letters-c", 2)
    with txmq.connect([real.url, real.url], service="s") as cluster:
        assert len(list(cluster.letters("letters-c"))) == 4
        with pytest.raises(UnknownGroup):
            list(cluster.letters("letters-nobody"))


def test_a_search_goes_on_over_empty_pages_to_the_last_one() -> None:
    search = LetterSearch("g", None, {"died_from": 5}, bodies=False)
    first = search.next_args()
    assert first == {"group": "g", "limit": 100, "bodies": False, "select": {"died_from": 5}}
    assert search.read({"letters": [], "next": "aa", "scanned": 2_000}) == []
    args = search.next_args()
    assert args is not None
    assert args["cursor"] == "aa"
    assert search.read({"letters": [], "next": None, "scanned": 1}) == []
    assert search.next_args() is None


class Order(BaseModel):
    """What a service expects of a body."""

    amount: int


def test_a_service_edits_a_letter_and_takes_it_back(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    make_letters(real, client, "edits-blocking", "edits-g", 1)
    named: dict[str, Any] = {"operator": "mender", "reason": "amounts were texts"}
    [letter] = client.letters("edits-g")
    with pytest.raises(LocalProtocolError, match="no Order: amount"):
        client.edit_letter(letter, body=b'{"amount": "x"}', model=Order, **named)
    assert client.edit_letter(letter, body=b'{"amount": 7}', model=Order, **named) == 1
    with pytest.raises(Conflict):
        client.edit_letter(letter, headers={}, **named)
    [letter] = client.letters("edits-g", bodies=True)
    assert (letter.edits, letter.body, letter.headers) == (1, b'{"amount": 7}', {"n": "0"})
    with pytest.raises(BadRequest, match="no JSON"):
        client.edit_letter(letter, body=b"seven", **named)
    assert client.edit_letter(letter, body=b"seven", any_format=True, **named) == 2
    [letter] = client.letters("edits-g")
    assert client.revert_letter(letter, **named) == 3
    [letter] = client.letters("edits-g", bodies=True)
    assert (letter.edits, letter.body) == (3, b"0")


def test_the_twisted_face_edits_a_letter(
    real: RealBroker, connect: Connect, in_reactor: InReactor, reactor: Any
) -> None:
    make_letters(real, connect(real.url), "edits-twisted", "edits-t", 1)

    def no_text(body: bytes) -> None:
        raise ValueError(f"{len(body)} bytes")

    async def use() -> tuple[int, int]:
        client = txmq.twisted.connect(reactor, real.url, service="s")
        [letter] = [one async for one in client.letters("edits-t")]
        named: dict[str, Any] = {"operator": "mender", "reason": "test"}
        with pytest.raises(LocalProtocolError, match="the body is invalid: ValueError: 1 bytes"):
            await client.edit_letter(letter, body=b"1", model=no_text, **named)
        first = await client.edit_letter(letter, headers={"by": "mender"}, **named)
        [letter] = [one async for one in client.letters("edits-t")]
        reverted = await client.revert_letter(letter, **named)
        await client.close()
        return first, reverted

    assert in_reactor(use) == (1, 2)


def test_a_service_mends_letters_and_sees_what_became_of_them(
    real: RealBroker, connect: Connect, tmp_path: Path
) -> None:
    client = connect(real.url)
    make_letters(real, client, "mend", "mend-g", 4)
    named: dict[str, Any] = {"operator": "kim", "reason": "a test"}
    client.call("topic.create", name="mend-spare", partitions=1)
    copied = client.redrive_letters("mend-g", to="mend-spare", key="k1", **named)
    assert (len(copied.done), copied.refused) == (2, [])
    again = client.redrive_letters("mend-g", to="mend-spare", key="k1", **named)
    assert {one.why[:21] for one in again.refused} == {"it has a copy already"}
    with pytest.raises(LocalProtocolError, match="neither letters"):
        client.replay_letters("mend-g", operator="kim")
    file = tmp_path / "letters"
    found = client.export_letters("mend-g", file, mark=True, **named)
    assert (found.letters, found.marked, found.damaged) == (4, 4, 0)
    with pytest.raises(ConfigError, match="exists already"):
        client.export_letters("mend-g", file)
    for repeated in (False, True):
        sent = client.import_letters(file, to="mend-spare", operator="kim")
        assert sent == (4, 0, repeated)
    assert len(list(client.find("mend-spare"))) == 6
    first, second, *others = client.letters("mend-g")
    with pytest.raises(UnknownMember):
        client.try_letter(first, member="nobody", operator="kim")
    assert client.abandon_letters("mend-g", [first], **named).done[0][2] == first.offset
    assert len(client.replay_letters("mend-g", others, operator="kim").done) == 2
    entries = list(client.audit(about="group:mend-g", operator="kim"))
    assert [one.call for one in entries] == [
        "dlq.redrive", "dlq.exported", "dlq.abandon", "dlq.replay",
    ]  # fmt: skip
    traced = client.trace(message_id=first.message_id)
    assert {"sent", "published", "dead letter", "dlq.abandon"} <= {
        one.what for one in traced.events
    }
    # other tests at this broker have messages of the key, too
    messages = client.trace(second.key, limit=10_000).messages
    assert ("mend", second.offset) in {(one["topic"], one["offset"]) for one in messages}


@pytest.mark.parametrize("moment", ["before it is stored", "before its decision"])
def test_of_two_who_import_a_file_at_once_one_sends_it(
    real: RealBroker,
    connect: Connect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    client, other = connect(real.url), connect(real.url)
    topic = moment.replace(" ", "-")
    make_letters(real, client, topic, f"{topic}-g", 2)
    client.call("topic.create", name=f"{topic}-spare", partitions=1)
    file = tmp_path / "letters"
    client.export_letters(f"{topic}-g", file)
    faster: list[object] = []

    def race(*_: object) -> None:
        monkeypatch.undo()
        faster.append(other.import_letters(file, to=f"{topic}-spare", operator="bob"))

    store = JobBundle.store

    async def store_late(bundle: JobBundle) -> UUID:
        race()
        return await store(bundle)

    if moment == "before it is stored":
        monkeypatch.setattr(JobBundle, "store", store_late)
    else:
        monkeypatch.setattr("txmq.client.protocol.awaited.letter_calls.crashpoint", race)
    slower = client.import_letters(file, to=f"{topic}-spare", operator="kim")
    assert (faster, slower) == ([(2, 0, False)], (2, 0, True))
    assert len(list(client.find(f"{topic}-spare"))) == 2


def test_a_trial_is_awaited_in_each_face(
    real: RealBroker, connect: Connect, in_reactor: InReactor, reactor: Any, tmp_path: Path
) -> None:
    client = connect(real.url)
    make_letters(real, client, "trials", "trials-g", 2)
    with client.consumer("trials-g", ["trials"], mode="concurrent") as consumer:
        member = consumer.member
        letter, other = client.letters("trials-g")

        async def use() -> tuple[str, int, list[str], int]:
            twisted = txmq.twisted.connect(reactor, real.url, service="s")
            try:
                late = await twisted.try_letter(letter, member=member, operator="kim", timeout=0)
                written = await twisted.export_letters("trials-g", tmp_path / "file")
                calls = [one.call async for one in twisted.audit(about="group:trials-g")]
                traced = await twisted.trace(message_id=letter.message_id)
                return late.outcome, written.letters, calls, len(traced.messages)
            finally:
                await twisted.close()

        assert in_reactor(use) == ("no answer yet", 1, ["dlq.try"], 1)
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        consumer.ack(message, wait=True)
        found = client.call("dlq.tried", **tried(letter))
        assert found["outcome"] == "processed"
    with pytest.raises(UnknownMember):
        client.try_letter(other, member=member, operator="kim")


def tried(letter: DeadLetter) -> dict[str, Any]:
    place = {name: getattr(letter, name) for name in ("group", "topic", "partition", "offset")}
    return place | {"number": 1}
