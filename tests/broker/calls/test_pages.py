"""Long lists: in pages, in steps, and without holding up others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import BrokerInMemory
from txmq.batch import encode, verify
from txmq.broker.calls import pages
from txmq.broker.engine import turn_work
from txmq.core.consumers import membership
from txmq.core.consumers.commands import JoinGroup, RequestedSettings
from txmq.core.steps import Steps
from txmq.core.topics import topics as topic_rules
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic, DeleteTopic, GrowTopic
from txmq.errors import BadRequest, RequestRejected, Throttled, UnknownTopic
from txmq.model.message import Message
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame

NAMES = sorted(f"t{number}" for number in range(25))


def topics(broker: BrokerInMemory) -> None:
    for name in NAMES:
        broker.do(CreateTopic(name, 2))


def test_pages_give_every_name_once_and_an_old_client_gets_the_whole_list(
    broker: BrokerInMemory,
) -> None:
    topics(broker)
    seen: list[str] = []
    page: dict[str, Any] = {"next": ""}
    while page["next"] is not None:
        page = broker.ask("topic.list", limit=10, after=page["next"])
        seen += [topic["name"] for topic in page["topics"]]
    assert seen == NAMES
    whole = broker.ask("topic.list")
    assert [topic["name"] for topic in whole["topics"]] == NAMES
    assert whole["next"] is None
    assert broker.ask("group.list", limit=3) == {"groups": [], "next": None}


def test_a_list_that_is_too_long_for_one_reply_is_refused_and_its_pages_are_not(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_WHOLE", 24)
    topics(broker)
    refused = broker.ask("topic.list")
    assert isinstance(refused, RequestRejected)
    assert (type(refused), refused.message) == (
        BadRequest,
        "there are 25 topics: too many for one reply",
    )
    assert len(broker.ask("topic.list", limit=25)["topics"]) == 25


def test_a_long_read_lets_others_in_between_its_steps(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time at all for a turn, each step is a turn of its own. A topic that is
    deleted meanwhile is left out.
    """
    topics(broker)
    monkeypatch.setattr(turn_work, "TURN_S", 0.0)
    monkeypatch.setattr(turn_work, "STEP_S", 0.0)
    slow, quick = broker.connect(), broker.connect()
    slow.session.dataReceived(encode_frame(Opcode.CALL, 3, encode_call("topic.list", {})))  # type: ignore[attr-defined]
    assert slow.replies() == []
    quick.session.dataReceived(encode_frame(Opcode.PING, 4))  # type: ignore[attr-defined]
    assert len(quick.replies()) == 1
    broker.engine.submit(DeleteTopic(NAMES[-1]), lambda _reply: None)
    broker.pass_time(0)
    [reply] = slow.replies()
    assert reply.status == 0
    assert reply.payload.count(b'"name"') == 24


@pytest.mark.parametrize("remade", [False, True])
@pytest.mark.parametrize(
    ("call", "args"),
    [("message.find", {"topic": "wide", "limit": 1_000}), ("topic.show", {"name": "wide"})],
)
def test_a_long_read_of_one_topic_is_refused_once_that_is_deleted(
    broker: BrokerInMemory,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    args: dict[str, object],
    remade: bool,  # noqa: FBT001  # of the test
) -> None:
    broker.do(CreateTopic("wide", 200))
    for partition in range(50):
        data = encode(
            [Message(b"x")], producer_id=b"p" * 16, epoch=0, sequence=partition, born_at=1
        )
        broker.do(StoreBatch("wide", 0, partition, data, verify(data)))
    monkeypatch.setattr(turn_work, "TURN_S", 0.0)
    monkeypatch.setattr(turn_work, "STEP_S", 0.0)
    slow = broker.connect()
    slow.session.dataReceived(encode_frame(Opcode.CALL, 3, encode_call(call, args)))  # type: ignore[attr-defined]
    broker.engine.submit(DeleteTopic("wide"), lambda _reply: None)
    if remade:
        broker.engine.submit(CreateTopic("wide", 1), lambda _reply: None)
    broker.pass_time(0)
    assert isinstance(slow.refusal(), UnknownTopic)


def test_a_connection_with_many_long_reads_delays_another_by_a_step(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_work, "TURN_S", 0.0)
    monkeypatch.setattr(turn_work, "STEP_S", 0.0)
    steps: list[str] = []

    def read(name: str, length: int) -> Steps[str]:
        for _ in range(length):
            steps.append(name)
            yield
        return name

    answers: list[str] = []
    turns = broker.assembly.turns
    for number in range(500):
        turns.run("many", read(f"long read {number}", 20), answers.append)
    turns.run("one", read("one", 2), answers.append)
    broker.pass_time(0)
    assert answers[0] == "one"
    assert len(answers) == 501
    assert steps.index("one") < 5


def join(broker: BrokerInMemory, *names: str, group: str = "g") -> Any:
    command = JoinGroup(group, "m", "i", "concurrent", topics=names, wanted=RequestedSettings())
    reply = broker.do(command)
    while isinstance(reply, membership.JoinBegun):  # very many partitions begin by steps
        reply = broker.do(command._replace(continued=True))
    return reply


def test_partitions_are_bounded_per_join_and_over_all_groups_and_topics(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        broker.do(CreateTopic(f"wide{number}", topic_rules.MAX_PARTITIONS))
    assert not isinstance(join(broker, *(f"wide{n}" for n in range(2))), RequestRejected)
    refused = join(broker, *(f"wide{n}" for n in range(3)), group="h")
    assert type(refused) is BadRequest
    assert "12288 partitions: a member reads at most 8192" in refused.message
    monkeypatch.setattr(membership, "MAX_POSITIONS", 8_192)
    assert type(join(broker, "wide2", group="h")) is Throttled
    assert not isinstance(join(broker, "wide0"), RequestRejected)  # it has its positions

    monkeypatch.setattr(topic_rules, "MAX_ALL_PARTITIONS", 3 * 4_096 + 1)
    assert not isinstance(broker.do(CreateTopic("small", 1)), RequestRejected)
    assert type(broker.do(CreateTopic("more", 1))) is Throttled
    assert type(broker.do(GrowTopic("small", 2))) is Throttled
    assert type(broker.ask("topic.describe", names=["new"], create=True)) is Throttled
    broker.do(DeleteTopic("wide2"))
    assert not isinstance(broker.do(CreateTopic("more", 1)), RequestRejected)


@pytest.mark.parametrize("after", [-2, 2**63, 2**64 - 1])
def test_letters_behind_a_number_that_no_letter_has_are_refused_or_none(
    broker: BrokerInMemory, after: int
) -> None:
    refused = broker.connect()
    refused.send(
        encode_frame(Opcode.CALL, 3, encode_call("dlq.list", {"group": "g", "after": after}))
    )
    assert isinstance(refused.refusal(), BadRequest)
    assert not broker.engine.faults.counts
