"""Dead letters for services, by both faces of the client, on a real broker."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel

import txmq
import txmq.twisted
from tests.cli.peer import peer
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from txmq.client.blocking.client import Client
from txmq.client.protocol.letters import LetterSearch
from txmq.errors import Conflict, LocalProtocolError, UnknownGroup, UnknownTopic

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
    assert client.revert_letter(letter, **named) == 2
    [letter] = client.letters("edits-g", bodies=True)
    assert (letter.edits, letter.body) == (2, b"0")


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
