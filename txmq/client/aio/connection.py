"""Connections of the asyncio client: futures around the conversation without I/O."""

from __future__ import annotations

import asyncio
import socket
from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from ssl import SSLCertVerificationError
from typing import cast

from txmq.client.aio.loop import expire
from txmq.client.protocol.address import Address, Addresses
from txmq.client.protocol.conversation import (
    Conversation,
    LogIdentity,
    Payload,
    client_closed,
    no_answer,
    reply_payload,
    superseded,
)
from txmq.client.tls import not_trusted, tls_context
from txmq.errors import (
    BrokerUnavailable,
    ConnectionLost,
    ProtocolError,
    RequestTimeout,
    TxmqError,
)
from txmq.wire.frames import Frame
from txmq.wire.lost_peers import notice_lost_peer

CONNECT_S = 5.0  # and as long for the welcome
END_S = 2.0  # for what is written and not yet sent
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # between two connections
READ_BYTES = 1 << 16


class AioConnection(asyncio.BufferedProtocol):
    """A connection. `frames` gets the replies that no future of `request` waits for."""

    def __init__(
        self,
        loop: AbstractEventLoop,
        conversation: Conversation,
        frames: Callable[[Sequence[Frame]], None],
    ) -> None:
        self._loop, self._frames = loop, frames
        self._waiting: dict[int, Future[bytes]] = {}
        self._transport: asyncio.Transport | None = None
        # Into one buffer for good: a StreamReader would copy each byte three times.
        self._buffer = memoryview(bytearray(READ_BYTES))
        self.failure: TxmqError | None = None  # that of requests from then on
        self.conversation = conversation
        self.last_received = 0.0  # or the moment since which a reply is due
        self.write_paused = False  # the transport has enough unsent bytes
        self.on_drained: Callable[[], None] | None = None
        # Has the other nodes asked who leads, as this one has not answered for long.
        self.on_silence: Callable[[], None] = lambda: None
        self.welcomed: Future[None] = loop.create_future()
        self.lost: Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_lost_peer(sock, socket)
        try:
            self.write(self.conversation.hello())
        # Another connection is registering the client's producer instance.
        except BrokerUnavailable as error:
            self._fail(error)
            self.abort()

    def write(self, pieces: Iterable[bytes]) -> None:
        """Send bytes of the conversation."""
        assert self._transport is not None, "there is a connection"
        data = b"".join(pieces)
        if data:
            self._transport.write(data)

    def request(self, opcode: int, payload: Payload = b"") -> Future[bytes]:
        """Return the future of the payload of the reply.

        It fails with RequestRejected or ConnectionLost. Raises MessageTooLarge.
        """
        if self.failure is not None:
            raise ConnectionLost(self.failure.message)
        correlation, pieces = self.conversation.request(opcode, payload)
        reply: Future[bytes] = self._loop.create_future()
        self._waiting[correlation] = reply
        self.write(pieces)
        return reply

    def doubt_after(self, seconds: float, reply: Future[bytes]) -> None:
        """Have the other nodes asked who leads, where nothing comes from this one for
        so many seconds while the reply is due.
        """
        if self.conversation.has_other_nodes:
            now = self._loop.time()
            timer = self._loop.call_later(seconds, self._doubt, seconds, now, reply)
            reply.add_done_callback(lambda _reply: timer.cancel())

    def _doubt(self, seconds: float, since: float, reply: Future[bytes]) -> None:
        if reply.done():
            return
        if self.last_received <= since:
            self.on_silence()
        # Others were answered meanwhile, or it was busy: it may be frozen from here on.
        self._loop.call_later(seconds, self._doubt, seconds, self._loop.time(), reply)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.last_received = self._loop.time()
        greeted = self.conversation.welcome is not None
        try:
            frames = self.conversation.receive(bytes(self._buffer[:nbytes]))
        except TxmqError as error:
            self._fail(error)
            self.abort()
            return
        if self.conversation.outgoing:
            self.write(self.conversation.take_outgoing())
        if not greeted and self.conversation.welcome is not None and not self.welcomed.done():
            self.welcomed.set_result(None)
        waiting = self._waiting
        others = [frame for frame in frames if not (waiting and self._answer(frame))]
        if others:
            self._frames(others)

    def _answer(self, frame: Frame) -> bool:
        reply = self._waiting.pop(frame.correlation, None)
        if reply is None:
            return False
        if not reply.done():  # cancelled, or too late
            try:
                reply.set_result(reply_payload(frame))
            except TxmqError as error:
                reply.set_exception(error)
        return True

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def give_up(self, reason: TxmqError) -> None:
        """End the connection at once, as its node does not answer: others are tried
        first then.
        """
        self.conversation.note_silence()
        self._fail(reason)
        self.abort()

    def end(self) -> None:
        """End the connection when everything is written."""
        if self._transport is not None:
            self._transport.close()

    def eof_received(self) -> bool:
        return False  # close

    def connection_lost(self, exc: Exception | None) -> None:
        self.conversation.close()
        self._fail(ConnectionLost(f"the connection was lost: {exc or 'closed by the broker'}"))
        if not self.lost.done():
            self.lost.set_result(None)

    def _fail(self, error: TxmqError) -> None:
        self.failure = self.failure or error
        if not self.welcomed.done():
            self.welcomed.set_exception(error)
            self.welcomed.exception()  # whoever has given up does not ask
        waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(ConnectionLost(error.message))

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.on_drained is not None:
            self.on_drained()


class Connector:
    """The way to a broker: addresses that are tried in turn, of the nodes that share
    the log and of those given.
    """

    def __init__(self, addresses: Addresses, log: LogIdentity) -> None:
        self._addresses, self._log = addresses, log
        self.encrypted = addresses.tls is not None

    async def open(
        self, loop: AbstractEventLoop, make: Callable[[], AioConnection]
    ) -> AioConnection:
        """Return a connection to the first address that answers, once it is welcomed.

        Each has a share of the time: the node that led may be gone with its machine.
        Raises the last error that another attempt may avoid, if there is one.
        """
        failure: OSError | TxmqError | None = None
        for address, seconds in self._log.in_turn(self._addresses, lambda: CONNECT_S):
            ends = loop.time() + seconds
            try:
                return await self._open_one(loop, make, address, seconds)
            except (OSError, TxmqError) as error:
                if loop.time() >= ends:
                    self._log.note_silence(address)
                if failure is None or not _is_permanent(error) or _is_permanent(failure):
                    failure = error
        assert failure is not None, "there is at least one address"
        raise failure

    async def _open_one(
        self,
        loop: AbstractEventLoop,
        make: Callable[[], AioConnection],
        address: Address,
        seconds: float,
    ) -> AioConnection:
        tls = self._addresses.tls
        context = None if tls is None else tls_context(tls)
        try:
            async with asyncio.timeout(seconds):
                dialled = await _dial(loop, address, seconds)
                _transport, link = await loop.create_connection(
                    make,
                    sock=dialled,
                    ssl=context,
                    server_hostname=None if tls is None else address.host,
                )
        except SSLCertVerificationError as error:
            raise not_trusted(address, error) from None
        link.conversation.address = address
        try:
            silent = ConnectionLost("no answer to the hello")
            await expire(loop, link.welcomed, seconds, silent)
        except BaseException:
            link.abort()
            raise
        return link


async def _dial(loop: AbstractEventLoop, address: Address, seconds: float) -> socket.socket:
    """Return a socket that is connected to the first of the host's addresses that
    answers.

    Each has a share of the time: one may be a black hole. asyncio's own way out, Happy
    Eyeballs, is not uvloop's. Raises OSError or TimeoutError, that of the last address.
    """
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    ends = loop.time() + seconds
    for left, (family, kind, protocol, _name, target) in zip(
        range(len(found), 0, -1), found, strict=True
    ):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            async with asyncio.timeout((ends - loop.time()) / left):
                await loop.sock_connect(sock, target)
        except BaseException as error:
            sock.close()
            if left == 1 or not isinstance(error, OSError):  # such as a cancellation
                raise
        else:
            return sock
    raise OSError(f"{address.host} has no address")


class PersistentConnection:
    """A connection that reconnects whenever it is lost.

    `attach` is called with each connection once it is welcomed. `refused` is called
    with an error that no other attempt can avoid, such as another log.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        connector: Connector,
        make: Callable[[], AioConnection],
        attach: Callable[[AioConnection], None],
        refused: Callable[[TxmqError], None] | None = None,
    ) -> None:
        self._loop, self._connector, self._make = loop, connector, make
        self._attach, self._refused = attach, refused
        self.error: TxmqError | OSError | None = None  # of the last attempt
        self._link: AioConnection | None = None
        self._waiting: deque[Future[AioConnection]] = deque()
        self._found: AioConnection | None = None  # leads to who leads after a silent node
        self._search: asyncio.Task[None] | None = None
        self._searches_at = 0.0  # not before that moment
        self._stopped = False
        self._task = loop.create_task(self._run(), name="txmq-connection")

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        try:
            while not self._stopped:
                link = await self._connect()
                if link is not None:
                    pause = FIRST_PAUSE_S
                    self._link = link
                    try:
                        while self._waiting:
                            waiter = self._waiting.popleft()
                            if not waiter.done():
                                waiter.set_result(link)
                        await link.lost
                    finally:
                        self._link = None
                        link.abort()
                if not self._stopped and self._found is None:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
        finally:  # also where the loop ends without `stop`
            self._stopped = True
            self._fail_waiting(client_closed())

    async def _connect(self) -> AioConnection | None:
        """Return a welcomed connection; None after a failed attempt."""
        found, self._found = self._found, None
        try:
            link = found or await self._connector.open(self._loop, self._make)
        except Exception as error:  # noqa: BLE001  # whatever it was, it is tried again
            self.error = error if isinstance(error, TxmqError | OSError) else None
            if isinstance(error, TxmqError) and is_final(error):
                self._fail_waiting(error)
                if self._refused is not None:
                    self._refused(error)
            return None
        self.error = None
        link.on_silence = partial(self._doubt, link)
        self._attach(link)
        return link

    def _doubt(self, silent: AioConnection) -> None:
        if self._loop.time() >= self._searches_at and (self._search is None or self._search.done()):
            self._search = self._loop.create_task(self._find_leader(silent), name="txmq-search")

    async def _find_leader(self, silent: AioConnection) -> None:
        """Ask who leads until the silent connection answers or is lost, or another node
        proves that it leads: go on there.

        Until then the requests stay where they are: the node may be busy.
        """
        silent.conversation.note_silence()
        heard, pause = silent.last_received, FIRST_PAUSE_S
        while self._link is silent and silent.last_received == heard:
            try:
                found = await self._connector.open(self._loop, self._make)
            except (OSError, TxmqError):
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            if self._link is silent and silent.conversation.is_superseded:
                self._found = found
                silent.give_up(superseded())
            else:
                found.abort()
                self._searches_at = self._loop.time() + LONGEST_PAUSE_S
            return

    def _fail_waiting(self, error: TxmqError) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(error)

    async def wait_connected(self, seconds: float) -> AioConnection:
        """Return the connection, as soon as there is one.

        Raises BrokerUnavailable after so many `seconds`, or a permanent error at once.
        """
        if self._link is not None and self._link.failure is None:
            return self._link
        if isinstance(self.error, TxmqError) and not self.error.retriable:
            raise self.error
        if self._stopped:
            raise client_closed()
        waiter: Future[AioConnection] = self._loop.create_future()
        self._waiting.append(waiter)
        try:
            return await expire(self._loop, waiter, seconds, TimeoutError())
        except TimeoutError:
            raise self._no_answer(seconds) from None
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def require_available(self) -> None:
        """Raise BrokerUnavailable where the last attempt to connect has failed."""
        if self._link is None and self.error is not None:
            raise self._no_answer(0.0)

    def _no_answer(self, seconds: float) -> BrokerUnavailable:
        last = {} if self.error is None else {"": self.error}
        return no_answer(seconds, last, encrypted=self._connector.encrypted)

    async def stop(self) -> None:
        """End the connection, and make no other."""
        self._stopped = True
        if self._search is not None:
            self._search.cancel()
        if self._found is not None:
            self._found.abort()
        if self._link is not None:
            self._link.end()
            await asyncio.wait([self._task], timeout=END_S)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])


def is_final(error: TxmqError) -> bool:
    """Return whether no other connection can avoid the error.

    A protocol error is not final: it may have been an accident.
    """
    return not error.retriable and not isinstance(error, ProtocolError)


def _is_permanent(error: OSError | TxmqError) -> bool:
    return isinstance(error, TxmqError) and is_final(error)


def request_timeout(seconds: float) -> RequestTimeout:
    """Return the error of a request without a reply."""
    return RequestTimeout(
        f"no reply within {seconds:.3g} s", hint="the request may have been carried out"
    )
