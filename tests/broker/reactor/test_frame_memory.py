"""Unfinished frames: their memory and time are bounded, and honest clients get theirs
through.
"""

from __future__ import annotations

import struct

from twisted.internet.task import Clock

from tests.broker.support import BrokerInMemory, Client
from txmq.broker.reactor.frame_memory import (
    HELD_BYTES,
    LARGE_BYTES,
    LARGE_FRAME,
    SLOW_S,
    WAITED_FOR_S,
    FrameMemory,
)
from txmq.model import limits
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame

ADMITTED = LARGE_BYTES // limits.FRAME
PIECE = 60 << 10


def begin(client: Client, size: int, length: int = limits.FRAME) -> None:
    """Send the first bytes of a frame."""
    client.session.dataReceived(struct.pack("<I", length) + bytes(size - 4))  # type: ignore[attr-defined]


def is_read(client: Client) -> bool:
    return client.transport.producerState == "producing"


def test_so_many_large_frames_grow_at_a_time_as_there_is_memory_for(
    broker: BrokerInMemory,
) -> None:
    clients = [broker.connect() for _ in range(ADMITTED + 3)]
    for client in clients:
        begin(client, PIECE)
    assert [is_read(client) for client in clients] == [True] * ADMITTED + [False] * 3
    clients[0].session.connectionLost()  # type: ignore[attr-defined]
    assert [is_read(client) for client in clients[1:]] == [True] * ADMITTED + [False] * 2


def test_a_large_frame_that_is_complete_makes_room_for_the_next(broker: BrokerInMemory) -> None:
    clients = [broker.connect() for _ in range(ADMITTED + 1)]
    whole = encode_frame(Opcode.PING, 5, bytes(limits.FRAME - 12))
    for client in clients:
        client.session.dataReceived(whole[:PIECE])  # type: ignore[attr-defined]
    assert not is_read(clients[-1])
    clients[0].session.dataReceived(whole[PIECE:])  # type: ignore[attr-defined]
    assert clients[0].replies()[0].status == 0
    assert is_read(clients[-1])


def test_a_frame_that_came_whole_without_memory_does_not_stop_the_next(
    broker: BrokerInMemory,
) -> None:
    """TLS delivers what it has received, though nobody reads on."""
    clients = [broker.connect() for _ in range(ADMITTED + 1)]
    whole = encode_frame(Opcode.PING, 5, bytes(limits.FRAME - 12))
    for client in clients:
        client.session.dataReceived(whole[:PIECE])  # type: ignore[attr-defined]
    last = clients[-1]
    assert not is_read(last)
    last.session.dataReceived(whole[PIECE:])  # type: ignore[attr-defined]
    assert last.replies()[0].status == 0
    assert is_read(last)


def test_pieces_of_a_large_frame_keep_its_memory_behind_requests_that_wait(
    broker: BrokerInMemory,
) -> None:
    clients = [broker.connect() for _ in range(ADMITTED + 1)]
    first, last = clients[0], clients[-1]
    first.session.pause()  # type: ignore[attr-defined]  # so that its requests wait
    first.session.dataReceived(encode_frame(Opcode.PING, 5, b""))  # type: ignore[attr-defined]
    for client in clients:
        begin(client, PIECE)
    assert not is_read(last)
    first.session.dataReceived(bytes(PIECE))  # type: ignore[attr-defined]
    assert not is_read(last), "it has no memory yet"


def test_a_broker_that_drains_reads_on_what_waited_for_memory(broker: BrokerInMemory) -> None:
    """Unread bytes would make the kernel reset the connection, and lose replies."""
    clients = [broker.connect() for _ in range(ADMITTED + 1)]
    for client in clients:
        begin(client, PIECE)
    assert not is_read(clients[-1])
    broker.assembly.sessions.ignore_requests()
    assert all(map(is_read, clients))
    broker.pass_time(SLOW_S + limits.FRAME / (4 << 10))
    assert not any(client.transport.disconnected for client in clients)


def test_whoever_is_slow_with_a_large_frame_is_cut_when_others_wait(
    broker: BrokerInMemory,
) -> None:
    clients = [broker.connect() for _ in range(ADMITTED)]
    for client in clients:
        begin(client, PIECE)
    broker.pass_time(10 * WAITED_FOR_S)
    assert not any(client.transport.disconnected for client in clients)  # nobody waits
    waiting = broker.connect()
    begin(waiting, PIECE)
    broker.pass_time(WAITED_FOR_S)
    assert any(client.transport.disconnected for client in clients)
    assert is_read(waiting)


def test_a_frame_has_a_time_by_its_length(broker: BrokerInMemory) -> None:
    slow, large = broker.connect(), broker.connect()
    begin(slow, 10, 1_000)
    begin(large, PIECE)
    broker.pass_time(SLOW_S - 1)
    assert not slow.transport.disconnected
    broker.pass_time(3)
    assert slow.transport.disconnected
    assert not large.transport.disconnected
    assert broker.connect().ask(Opcode.PING, b"").status == 0


def test_very_many_small_unfinished_frames_cost_the_oldest(broker: BrokerInMemory) -> None:
    size = LARGE_FRAME - 100
    count = HELD_BYTES // size
    clients = [broker.connect() for _ in range(count + 3)]
    for client in clients:
        begin(client, size, LARGE_FRAME - 8)
    cut = [client.transport.disconnected for client in clients]
    assert cut[0]
    assert sum(cut) <= 4
    assert not any(cut[4:])
    assert clients[-1].broker.connect().ask(Opcode.PING, b"").status == 0


class OneOf:
    """A connection of a user, or of a host."""

    def __init__(self, memory: FrameMemory, owner: str) -> None:
        self.owner, self._memory = owner, memory
        self.is_admitted = self.is_cut = False

    def begin(self, size: int, length: int) -> OneOf:
        self.is_admitted = self._memory.update(self, size, length)
        return self

    def admit_frame(self) -> None:
        self.is_admitted = True

    def cut(self, why: str) -> None:
        assert why
        self.is_cut = True
        self._memory.finish(self)


def test_users_get_memory_for_large_frames_in_turn() -> None:
    memory = FrameMemory(Clock())
    many = [OneOf(memory, "many").begin(4, limits.FRAME) for _ in range(100)]
    growing = [one for one in many if one.is_admitted]
    assert len(growing) == ADMITTED
    few = [OneOf(memory, owner).begin(4, limits.FRAME) for owner in ("few", "other", "few")]
    waiting = [*many[ADMITTED:], *few]
    order = list[str]()
    for _ in range(8):
        memory.finish(growing.pop(0))
        [admitted] = [each for each in waiting if each.is_admitted]
        waiting.remove(admitted)
        growing.append(admitted)
        order.append(admitted.owner)
    assert order == ["many", "few", "other", "many", "few", "many", "many", "many"]


def test_small_unfinished_frames_of_one_user_cost_others_nothing() -> None:
    memory, size = FrameMemory(Clock()), LARGE_FRAME - 100
    few = [OneOf(memory, "few").begin(size, size + 8) for _ in range(8)]
    many = [OneOf(memory, "many").begin(size, size + 8) for _ in range(2 * HELD_BYTES // size)]
    few += [OneOf(memory, f"host-{number}").begin(size, size + 8) for number in range(8)]
    assert not any(one.is_cut for one in few)
    cut = [one.is_cut for one in many]
    assert cut == [True] * sum(cut) + [False] * (len(many) - sum(cut)), "the oldest"
    for one in (*few, *many):
        memory.finish(one)
    assert memory._held == memory._reserved == 0
    assert not memory._held_by
    assert not memory._holding


def test_one_connection_s_requests_wait_while_its_replies_are_unread(
    broker: BrokerInMemory,
) -> None:
    client = broker.connect()
    client.session.pause()  # type: ignore[attr-defined]  # its transport's buffer is full
    ping = encode_frame(Opcode.PING, 5)
    client.session.dataReceived(ping * 1_000)  # type: ignore[attr-defined]
    broker.pass_time(1)
    assert client.replies() == []
    assert not is_read(client)
    client.session.resume()  # type: ignore[attr-defined]
    broker.pass_time(1)
    assert len(client.replies()) == 1_000
    assert is_read(client)


def test_requests_without_a_reply_are_bounded_per_connection(broker: BrokerInMemory) -> None:
    """Long polls beyond the limit end the oldest ones; nobody is refused."""
    from txmq.broker.delivery.long_polls import MAX_WAITING
    from txmq.wire.data_requests import Read, pack_read

    client, other = broker.connect(), broker.connect()
    client.call("topic.create", name="t", partitions=1)
    read = pack_read(Read(0, 0, 60_000, 1 << 20, "t"))
    total = 3 * MAX_WAITING
    client.send(b"".join(encode_frame(Opcode.READ, number, read) for number in range(total)))
    broker.pass_time(1)
    ended = client.replies()
    assert [reply.correlation for reply in ended] == list(range(total - MAX_WAITING))
    assert {reply.status for reply in ended} == {0}
    assert other.ask(Opcode.PING, b"").status == 0
    client.session.connectionLost()  # type: ignore[attr-defined]
    assert not broker.engine.readers_waiting
