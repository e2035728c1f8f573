"""Sends that wait for their receipts: frames, receipts, repetitions and errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import txmq
from tests.client.held_sends import Gate, gate
from tests.client.scripted_broker import FakeBroker, HangUp, Silent, receipt
from txmq.batch import BatchView
from txmq.client.blocking.client import Client
from txmq.client.blocking.sender import delivery
from txmq.client.protocol.sender.rows import BATCH_BYTES
from txmq.errors import (
    ConnectionLost,
    LocalProtocolError,
    MessageTooLarge,
    ReadOnly,
    RequestTimeout,
    SequenceGap,
    StaleTopic,
    Throttled,
    UnknownProducer,
    UnknownTopic,
)
from txmq.model.keys import partition_of
from txmq.testing.wait import PATIENCE_S
from txmq.wire.data_requests import Opcode

__all__ = ["gate"]

Connect = Callable[..., Client]
LATER = 2_000_000_000_000_000


def test_a_message_arrives_as_it_was_sent_and_its_receipt_names_it(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.script.append(receipt(41))
    got = connect(fake.url).send(
        "orders",
        b"body",
        key="k",
        tag="t",
        headers={"a": "b"},
        deliver_at=LATER,
        expire_at=LATER + 1,
    )
    view = BatchView(fake.sends[0].batch)
    assert (view.bodies, view.keys, view.tags, view.deliver_at, view.expire_at) == (
        [b"body"],
        ["k"],
        ["t"],
        [LATER],
        [LATER + 1],
    )
    assert dict(view.headers[0]) == {"a": "b"}
    assert abs(view.born_at[0] - time.time() * 1e6) < 60e6
    assert got == (view.message_ids[0], "orders", 0, 41, False)


def test_a_send_behind_an_undecided_half_has_no_offset_yet(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.script.append(receipt(-1))
    assert connect(fake.url).send("orders", b"x").offset is None


def test_a_key_decides_the_partition_and_keyless_messages_take_turns(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.partitions = 4
    client = connect(fake.url)
    assert client.send("orders", b"x", key="o-7").partition == partition_of("o-7", 4)
    assert {client.send("orders", b"x").partition for _ in range(4)} == {0, 1, 2, 3}
    assert client.send("orders", b"x", key="o-7", partition=2).partition == 2


def test_a_partitioner_may_choose_or_leave_it_to_the_key(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.partitions = 4
    asked: list[tuple[str, str | None, int]] = []

    def choose(topic: str, key: str | None, partitions: int) -> int | None:
        asked.append((topic, key, partitions))
        return 3 if key == "vip" else None

    client = connect(fake.url, partitioner=choose)
    assert client.send("orders", b"x", key="vip").partition == 3
    assert client.send("orders", b"x", key="o-7").partition == partition_of("o-7", 4)
    assert [stored.partition for stored in client.send_many("orders", [b"x"], ["vip"])] == [3]
    assert asked == [("orders", "vip", 4), ("orders", "o-7", 4), ("orders", "vip", 4)]


def test_a_lost_acknowledgement_is_followed_by_the_same_send_on_another_connection(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.script += [HangUp, receipt(7, duplicate=True)]
    got = connect(fake.url).send("orders", b"once")
    assert (got.offset, got.duplicate) == (7, True)
    first, second = fake.sends
    assert first == second
    assert fake.accepted == 2


def test_a_silent_broker_is_asked_again_before_the_time_is_up(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.script += [Silent, receipt(0)]
    began = time.monotonic()
    assert connect(fake.url, timeout=6.0).send("orders", b"x").offset == 0
    assert time.monotonic() - began > 1.9
    assert fake.sends[0] == fake.sends[1]


def test_after_the_last_attempt_the_outcome_is_unknown_and_the_session_is_not_used_again(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.script += [HangUp, HangUp, HangUp]
    client = connect(fake.url)
    with pytest.raises(ConnectionLost) as caught:
        client.send("orders", b"maybe")
    assert (caught.value.outcome, caught.value.retriable) == ("unknown", True)
    client.send("orders", b"next")
    sessions = [producer for producer, _ in fake.origins()]
    assert len(set(sessions[:3])) == 1
    assert sessions[3] != sessions[0]
    assert fake.origins()[3][1] == 0


def test_no_answer_at_all_is_a_time_out_of_unknown_outcome(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url)
    client.send("orders", b"first")  # so that nothing has to succeed in the time that follows
    fake.script += [Silent] * 3
    with pytest.raises(RequestTimeout) as caught:
        client.send("orders", b"x", timeout=0.3)
    assert caught.value.outcome == "unknown"


def test_sequences_of_a_session_have_no_gaps(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    client.send("orders", b"0")
    client.send_many("orders", [b"1", b"2", b"3"])
    client.send("orders", b"4")
    [first] = {producer for producer, _ in fake.origins()}
    assert fake.origins() == [(first, 0), (first, 1), (first, 4)]


def test_a_refused_send_takes_no_sequence(fake: FakeBroker, connect: Connect) -> None:
    fake.script += [ReadOnly("no space")]
    client = connect(fake.url)
    with pytest.raises(ReadOnly):
        client.send("orders", b"x")
    client.send("orders", b"y")
    assert [sequence for _, sequence in fake.origins()] == [0, 0]


def test_a_topic_that_has_grown_is_described_anew_and_the_message_goes_to_its_new_partition(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url)
    client.send("orders", b"before", key="o-1")
    fake.partitions, fake.epoch = 16, 2
    fake.script.append(StaleTopic("grown", detail={"topic": "orders"}))
    assert client.send("orders", b"after", key="o-1").partition == partition_of("o-1", 16)
    assert [send.topic_epoch for send in fake.sends] == [1, 1, 2]


def test_a_throttled_send_waits_and_tries_again(fake: FakeBroker, connect: Connect) -> None:
    fake.script += [Throttled("busy")] * 4
    assert connect(fake.url).send("orders", b"x").offset == 0
    assert len(set(fake.origins())) == 1


def test_a_broker_that_stays_busy_throttles_the_caller(
    fake: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(delivery, "time", clock)
    fake.script += [Throttled("busy")] * 1_000
    with pytest.raises(Throttled):
        connect(fake.url, timeout=50).send("orders", b"x")
    assert len(fake.sends) == len(pauses) + 1 < 200
    assert pauses[0] < pauses[-1]


@pytest.mark.parametrize(
    "refusal", [UnknownProducer("forgotten"), SequenceGap("a send is missing")]
)
def test_a_session_that_the_broker_forgot_is_replaced(
    fake: FakeBroker, connect: Connect, refusal: txmq.errors.RequestRejected
) -> None:
    client = connect(fake.url)
    client.send("orders", b"old")
    fake.script.append(refusal)
    client.send("orders", b"new")
    (old, _), (tried, sequence), (new, first) = fake.origins()
    assert (tried, sequence) == (old, 1)
    assert new != old
    assert first == 0


def test_a_repeated_send_of_a_forgotten_session_stays_of_unknown_outcome(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.script += [HangUp, UnknownProducer("forgotten")]
    with pytest.raises(UnknownProducer) as caught:
        connect(fake.url).send("orders", b"x")
    assert caught.value.outcome == "unknown"


def test_a_refusal_after_a_lost_attempt_leaves_the_outcome_unknown(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.script += [HangUp, ReadOnly("no space")]
    with pytest.raises(ReadOnly) as caught:
        connect(fake.url).send("orders", b"x")
    assert caught.value.outcome == "unknown"


def test_an_unknown_topic_is_looked_up_again_next_time(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    client.send("orders", b"x")
    fake.script.append(UnknownTopic("deleted"))
    with pytest.raises(UnknownTopic):
        client.send("orders", b"x")
    described = len(fake.frames)
    client.send("orders", b"x")
    assert Opcode.CALL in [frame.opcode for frame in fake.frames[described:]]


def test_a_batch_goes_out_by_partition_and_its_receipts_come_in_order(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.partitions = 3
    messages = [txmq.Message(str(n).encode(), key=f"k{n % 5}") for n in range(40)]
    receipts = connect(fake.url).send_batch("orders", messages)
    assert len(fake.sends) == len({partition_of(f"k{n}", 3) for n in range(5)})
    stored = {
        (send.partition, offset): body
        for send in fake.sends
        for offset, body in enumerate(BatchView(send.batch).bodies)
    }
    for message, got in zip(messages, receipts, strict=True):
        assert got.offset is not None
        assert stored[got.partition, got.offset] == message.body
    assert len({got.message_id for got in receipts}) == 40


def test_an_empty_batch_sends_nothing(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    assert (client.send_batch("orders", []), client.send_many("orders", [])) == ([], [])
    assert fake.sends == []


def test_columns_are_split_into_frames_and_keep_the_order_of_a_key(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.partitions = 2
    bodies = [str(n).encode().ljust(BATCH_BYTES // 10) for n in range(45)]
    keys = [f"k{n % 4}" for n in range(45)]
    stored = connect(fake.url).send_many("orders", bodies, keys)
    assert sum(batch.count for batch in stored) == 45
    assert max(len(send.batch) for send in fake.sends) < BATCH_BYTES * 1.2
    for key in set(keys):
        found = [
            body
            for send in fake.sends
            for body, own in zip(
                BatchView(send.batch).bodies, BatchView(send.batch).keys, strict=True
            )
            if own == key
        ]
        assert found == [body for body, own in zip(bodies, keys, strict=True) if own == key]


def test_columns_without_keys_go_to_the_partitions_in_turn(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.partitions = 3
    client = connect(fake.url)
    stored = [batch for _ in range(3) for batch in client.send_many("orders", [b"x"] * 10)]
    assert sorted(batch.partition for batch in stored) == [0, 1, 2]
    assert [batch.count for batch in stored] == [10, 10, 10]
    ids = BatchView(fake.sends[0].batch).message_ids
    assert stored[0].first_id == ids[0]


def test_a_connection_lost_in_the_middle_of_columns_loses_and_doubles_nothing(
    fake: FakeBroker, connect: Connect
) -> None:
    bodies = [str(n).encode().ljust(BATCH_BYTES // 2) for n in range(12)]
    fake.script += [None, None, HangUp]
    connect(fake.url).send_many("orders", bodies)
    kept = {send.batch: None for send in fake.sends}  # a repetition is the same bytes
    assert [body for batch in kept for body in BatchView(batch).bodies] == bodies


def test_frames_after_a_refused_one_are_sent_again_in_order(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.script += [None, Throttled("busy"), SequenceGap("missing"), SequenceGap("missing")]
    bodies = [str(n).encode().ljust(BATCH_BYTES // 2 + 1) for n in range(4)]
    connect(fake.url).send_many("orders", bodies)
    assert [body for [body] in fake.bodies()] == [bodies[n] for n in (0, 1, 2, 3, 1, 2, 3)]
    assert [sequence for _, sequence in fake.origins()] == [0, 1, 2, 3, 1, 2, 3]


def test_an_error_in_the_middle_says_how_much_is_stored(fake: FakeBroker, connect: Connect) -> None:
    fake.script += [None, ReadOnly("no space"), SequenceGap("missing")]
    with pytest.raises(ReadOnly) as caught:
        connect(fake.url).send_many("orders", [b"x" * (BATCH_BYTES // 2 + 1)] * 3)
    assert caught.value.__notes__ == ["stored: 1 of 3 messages"]


@pytest.mark.parametrize(
    ("send", "error"),
    [
        (lambda client: client.send("orders", "text"), LocalProtocolError),
        (lambda client: client.send("orders", b"x", key="k" * 2_000), LocalProtocolError),
        (lambda client: client.send("orders", b"x", key="\ud800"), LocalProtocolError),
        (lambda client: client.send("orders", b"x", key=5), LocalProtocolError),
        (lambda client: client.send_many("orders", [b"x"], [5]), LocalProtocolError),
        (lambda client: client.send("orders", b"x", partition=-1), LocalProtocolError),
        (lambda client: client.send("no topic", b"x"), LocalProtocolError),
        (lambda client: client.send("orders", b"x" * (5 << 20)), MessageTooLarge),
        (lambda client: client.send_batch("orders", [b"x"]), LocalProtocolError),
        (lambda client: client.send_many("orders", [b"x", b"y"], ["k"]), LocalProtocolError),
        (lambda client: client.send_many("orders", [b"x", 5]), LocalProtocolError),
        (lambda client: client.send_many("orders", [b"x"], ["\ud800"]), LocalProtocolError),
    ],
)
def test_an_invalid_message_is_refused_by_the_client_which_goes_on(
    fake: FakeBroker, connect: Connect, send: Callable[[Client], object], error: type[Exception]
) -> None:
    client = connect(fake.url)
    with pytest.raises(error):
        send(client)
    assert fake.sends == []
    assert client.send("orders", b"fine").offset == 0


def test_a_broker_may_have_a_lower_limit_than_the_format(connect: Connect) -> None:
    with FakeBroker(message=1_000) as fake:
        client = connect(fake.url)
        with pytest.raises(MessageTooLarge, match="1000"):
            client.send("orders", b"x" * 1_001)
        with pytest.raises(MessageTooLarge, match="1000"):
            client.send_many("orders", [b"x", b"x" * 1_001])
        assert fake.sends == []
        client.send("orders", b"x" * 1_000)


def test_threads_share_a_client_and_each_session_stays_gapless(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url)
    threads = [
        threading.Thread(target=lambda: [client.send("orders", b"x") for _ in range(50)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_session: dict[bytes, list[int]] = {}
    for producer, sequence in fake.origins():
        by_session.setdefault(producer, []).append(sequence)
    assert sum(map(len, by_session.values())) == 400
    assert all(sequences == list(range(len(sequences))) for sequences in by_session.values())
    assert fake.accepted <= 8


def test_more_callers_than_connections_wait_for_their_turn(
    fake: FakeBroker, connect: Connect, gate: Gate
) -> None:
    client = connect(fake.url, connections=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.send, "orders", b"x")
        assert gate.arrived.wait(PATIENCE_S)
        with pytest.raises(Throttled, match="connections"):
            client.send("orders", b"x", timeout=0.05)
        gate.open()
        assert first.result(PATIENCE_S).offset == 0
    assert client.send("orders", b"x").offset == 1


def test_the_pause_that_a_broker_asks_for_is_made(fake: FakeBroker, connect: Connect) -> None:
    fake.script.append(Throttled.after(0.25, "the disk is behind"))
    client, began = connect(fake.url, timeout=50), time.monotonic()
    assert client.send("orders", b"x").offset == 0
    assert time.monotonic() - began >= 0.25
    fake.script.append(Throttled.after(60, "the disk is behind"))
    with pytest.raises(Throttled, match="behind"):
        client.send("orders", b"y")
    assert time.monotonic() - began < 50, "it does not wait for what would be too late"


def test_a_call_waits_for_the_pause_that_the_broker_names_and_for_no_longer_one(
    fake: FakeBroker, connect: Connect, tmp_path: Path
) -> None:
    client = connect(fake.url, timeout=50)
    fake.refusals += [Throttled.after(0.1, "beyond the quota")] * 2
    began = time.monotonic()
    assert client.send("orders", b"x").offset == 0, "though its topic was not known"
    assert time.monotonic() - began >= 0.2
    fake.answers["topic.show"] = {"firsts": [0], "ends": [0]}
    fake.refusals += [Throttled.after(0.1, "beyond the quota")] * 2
    client.reader("r", ["orders"], txmq.FileOffsets(str(tmp_path))).close()
    assert time.monotonic() - began >= 0.4
    for refusal in (
        Throttled("no more groups"),
        Throttled.after(60, "beyond the quota"),
    ):
        fake.refusals += [refusal]
        with pytest.raises(Throttled, match=refusal.message):
            client.call("user.me")
        assert client.call("user.me") == {}
