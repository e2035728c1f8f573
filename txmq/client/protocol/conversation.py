"""The client's side of a connection without I/O: bytes in, replies out.

It begins with the hello, and with the registration of a producer instance that has no
epoch yet. After the welcome come requests, each with a correlation. Their replies come
in any order.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Self
from uuid import UUID

from txmq.client.protocol.address import (
    TLS_SCHEME,
    Address,
    Addresses,
    Credentials,
    node_address,
)
from txmq.client.protocol.identity import ProducerInstance, process_id
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    ConnectionLost,
    LogChanged,
    MessageTooLarge,
    NotLeader,
    RemoteProtocolError,
    Throttled,
    TxmqError,
)
from txmq.model import limits
from txmq.model.cluster import NOT_LISTED, ListedLog, LogList
from txmq.version import __version__
from txmq.wire.batched import BatchedReply
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame, FrameDecoder, frame_buffers
from txmq.wire.hello import (
    VERSIONS,
    BrokerLimits,
    Challenge,
    LoginStep,
    Welcome,
    hello_payload,
)
from txmq.wire.json import parse_result
from txmq.wire.scram import MECHANISM, ScramClient
from txmq.wire.status import OK, to_error

CLIENT_NAME = (
    f"txmq-python/{__version__} {platform.python_implementation()}/{platform.python_version()}"
)
LAST_CORRELATION = (1 << 32) - 1
NEWS = (Opcode.HELLO, OK, 0)  # opcode, status and correlation of a welcome that comes unasked
IS_IT_RUNNING = "is it running, and is the address right? start one with: txmq broker --data DIR"
MAYBE_TLS = f"has it TLS? then the URL begins with {TLS_SCHEME}; otherwise its log says why"
LARGE_REPLY_BYTES = 1 << 15
LEAST_S = 0.001  # of an attempt
SILENT_S = 0.1  # of the first attempt at a node that was silent
Payload = bytes | Sequence[bytes]
# The newest boot epoch of each log that any client of this process has met.
_newest_epochs: dict[UUID, int] = {}
# The incarnation of each log that the clients of this process have met; None = the log
# was never restored.
_incarnations: dict[UUID, UUID | None] = {}


@dataclass(eq=False, slots=True)
class LogIdentity:
    """The log of a client's broker, given by the user or learnt from the first welcome.

    Offsets, and the broker's memory of repeated sends, belong to one log. A client that
    meets another log at one of its addresses therefore refuses it. A copy of a data
    directory has the same log, but begins in an earlier boot epoch. A restored log has
    another incarnation, and may lack what clients have receipts for.

    Several nodes may share the log. Each of them tells of the others, so that clients
    find nodes that their URL does not name. A node that is frozen keeps its connections
    open: `silent` has those that did not answer in time, until a node that leads does.

    `log_list` are the logs that the broker has told of, and `on_list` is called when
    they are others than before. `listed_at` is where the list has this one.
    """

    log_id: UUID | None = None
    boot_epoch: int = 0  # of the last welcome
    incarnation: UUID | None = None  # of the last welcome
    nodes: tuple[Address, ...] = ()  # as one of them told last, the leader first
    silent: dict[Address, float] = field(default_factory=dict)  # and since when
    log_list: LogList = NOT_LISTED
    on_list: Callable[[], object] = lambda: None
    listed_at: tuple[Address, ...] = ()

    def learn(self, nodes: Iterable[str]) -> None:
        """Take the addresses of nodes from one that knows them; none = it does not."""
        self.nodes = tuple(filter(None, map(node_address, nodes))) or self.nodes

    def note_silence(self, address: Address) -> None:
        """Note that no answer has come from there in time."""
        self.silent.setdefault(address, monotonic())

    def in_turn(
        self, given: Iterable[Address], left: Callable[[], float]
    ) -> Iterator[tuple[Address, float]]:
        """Yield the addresses to try, each once, with its share of the seconds `left`.

        Nodes come before the addresses that were given. A node that does not lead tells
        of the leader, which is then the next one. Who was silent comes last, and gets
        as long as it has been silent: then the others are asked again who leads.
        """
        tried = set[Address]()
        while untried := [
            one for one in dict.fromkeys((*self.nodes, *self.listed_at, *given)) if one not in tried
        ]:
            address = min(untried, key=self.silent.__contains__)
            share = max(left(), LEAST_S) / len(untried)
            since = self.silent.get(address)
            if since is not None and tried:
                share = min(share / 2, max(monotonic() - since, SILENT_S))
            tried.add(address)
            yield address, share

    def take_news(self, welcome: Welcome) -> None:
        """Take what the welcome of a broker that leads says of nodes, and of logs."""
        self.learn(welcome.nodes)
        self.silent.clear()
        if welcome.log_list.version > self.log_list.version:
            self.log_list = welcome.log_list
            self.on_list()

    def check(self, welcome: Welcome) -> None:
        """Remember log, incarnation and boot epoch of the welcome.

        Raises LogChanged for any other log than that of the first welcome, and for
        another incarnation or an earlier boot epoch than any client of this process has
        met.
        """
        if self.log_id is None:
            self.log_id = welcome.log_id
        if welcome.log_id != self.log_id:
            raise LogChanged(
                f"broker {welcome.broker} has log {welcome.log_id}, not {self.log_id} as before",
                hint="its data directory was replaced: find out why, then make a new client",
            )
        known = _incarnations.get(welcome.log_id, welcome.incarnation)
        if welcome.incarnation != known:
            raise LogChanged(
                f"broker {welcome.broker} has incarnation {welcome.incarnation or 'original'} of "
                f"log {welcome.log_id}, and this process knows {known or 'the original'}",
                hint="the log was restored from a backup, and may lack messages that this process "
                "has receipts for, or has seen: `txmq log lost`; restart this process to go on",
            )
        newest = _newest_epochs.get(welcome.log_id, 0)
        if welcome.boot_epoch < newest:
            raise LogChanged(
                f"broker {welcome.broker} with log {welcome.log_id} is in boot epoch "
                f"{welcome.boot_epoch}, and was in {newest} before",
                hint="its data directory is a copy, or an older state: stop that broker; to go on "
                "from a backup, use `txmq log restore`",
            )
        _newest_epochs[welcome.log_id] = welcome.boot_epoch
        _incarnations[welcome.log_id] = self.incarnation = welcome.incarnation
        self.boot_epoch = welcome.boot_epoch


class MeetsLog:
    """A client's core, which knows the log of its broker from the first welcome on."""

    _log: LogIdentity
    _addresses: Addresses

    @property
    def known_log_id(self) -> UUID | None:
        """The id of the broker's log, if it is known without asking."""
        return self._log.log_id

    def expect_log(self, log_id: UUID) -> None:
        """Take a log for the broker's until it answers; another one is refused then."""
        self._log.log_id = self._log.log_id or log_id

    @property
    def log_list(self) -> LogList:
        """The logs that the broker has told of."""
        return self._log.log_list

    def when_listed(self, told: Callable[[], object]) -> None:
        """Have `told` called, by any thread, when the broker has told of other logs."""
        self._log.on_list = told

    def expects(self, listed: ListedLog) -> bool:
        """Return whether the broker has a listed log. While its log is not known, it is
        expected to have the one that is listed at its address.
        """
        if self._log.log_id is None:
            return not set(self.addresses_of(listed)).isdisjoint(self._addresses)
        return self._log.log_id == listed.log_id

    def note_listed(self, listed: ListedLog) -> None:
        """Expect a listed log, also where the list has it."""
        self.expect_log(listed.log_id)
        self._log.listed_at = self.addresses_of(listed)

    def addresses_of(self, listed: ListedLog) -> Addresses:
        """Return where a listed log is, with the login and TLS of this broker."""
        parts = filter(None, map(node_address, listed.addresses.split(",")))
        return Addresses(parts, self._addresses.login, self._addresses.tls)

    @property
    def incarnation(self) -> UUID | None:
        """Return the incarnation of the broker's log, after the first welcome; None =
        the log was never restored from a backup.
        """
        return self._log.incarnation

    @property
    def boot_epoch(self) -> int:
        """The boot epoch of the broker as this client has met it last."""
        return self._log.boot_epoch


class Conversation:
    """The protocol state of one connection. A ProtocolError ends it.

    `registering`: it registers the producer instance, until `close` or the reply.
    """

    address: Address | None = None  # of the broker

    def __init__(
        self,
        service: str | None,
        log: LogIdentity,
        instance: ProducerInstance | None = None,
        *,
        any_node: bool = False,
    ) -> None:
        """`any_node`: a node of a cluster need not lead to be asked about it."""
        self._service, self._any_node = service, any_node
        # the login under way; what it has to send is in `outgoing`
        self._login: ScramClient | None = None
        self.outgoing: list[bytes] = []
        self._log = log
        self._instance = instance
        self.registering = False
        self._greeted: Welcome | None = None  # before the registration is answered
        self._decoder = FrameDecoder(limits.FRAME_BEFORE_HELLO)
        self._expected: dict[int, int] = {}  # opcodes of unanswered requests
        self._last = 0
        self.welcome: Welcome | None = None
        self.in_large_reply = False  # more of a reply is due than an ordinary read brings

    @property
    def has_other_nodes(self) -> bool:
        """True where another node may lead instead of the broker."""
        return len(self._log.nodes) > 1

    @property
    def is_superseded(self) -> bool:
        """True where a node has proved that it leads after the broker."""
        return self.welcome is not None and self.welcome.boot_epoch < self._log.boot_epoch

    def note_silence(self) -> None:
        """Note that the broker has not answered in time, by all of its addresses."""
        told = self.welcome.nodes[:1] if self.welcome is not None else ()
        for address in (self.address, *map(node_address, told)):
            if address is not None:
                self._log.note_silence(address)

    def log_in(self, login: Credentials | None) -> Self:
        """Begin with a login, before `hello`. Raises ConfigError without a password."""
        if login is not None:
            self._login = ScramClient(login.user, login.get_password())
        return self

    @property
    def limits(self) -> BrokerLimits:
        """The broker's limits. Raises ConnectionLost before the welcome."""
        if self.welcome is None:
            raise ConnectionLost("the broker has not answered the hello")
        return self.welcome.limits

    def hello(self) -> list[bytes]:
        """Return the first bytes to send, in pieces.

        Raises BrokerUnavailable while another connection registers the producer
        instance of this client.
        """
        instance = self._instance
        if instance is None:
            return self._hello(None, 0)
        if instance.epoch:
            return self._hello(instance.name, instance.epoch)
        if not instance.claim():
            raise BrokerUnavailable(
                f"another connection is registering instance {instance.name!r}", hint="try again"
            )
        self.registering = True
        if instance.epoch:  # another connection registered it just before the claim
            self.close()
            return self._hello(instance.name, instance.epoch)
        hello = self._hello(instance.name, 0)
        # after a login: the broker takes no other request before
        return hello if self._login is not None else [*hello, *self._register(instance)]

    def _register(self, instance: ProducerInstance) -> list[bytes]:
        args: dict[str, Any] = {"service": self._service, "instance": instance.name}
        return self.request(Opcode.CALL, encode_call("producer.register", args))[1]

    def take_outgoing(self) -> list[bytes]:
        """Return what the login has to send after `receive`, in pieces."""
        pieces, self.outgoing = self.outgoing, []
        return pieces

    def _hello(self, instance: str | None, epoch: int) -> list[bytes]:
        process = process_id() if self._service is not None else None
        login = None
        if self._login is not None:
            login = {"mechanism": MECHANISM, "message": self._login.first()}
        hello = hello_payload(
            CLIENT_NAME, self._service, instance, epoch, process, login, any_node=self._any_node
        )
        return self.request(Opcode.HELLO, hello)[1]

    def close(self) -> None:
        """End the conversation, so that another one may register the instance."""
        if self.registering and self._instance is not None:
            self.registering = False
            self._instance.release()

    def request(self, opcode: int, payload: Payload = b"") -> tuple[int, list[bytes]]:
        """Return the correlation of a new request and its bytes, in pieces.

        Raises MessageTooLarge where the frame is over the broker's limit.
        """
        # 0 is for what the broker tells unasked
        self._last = correlation = self._last % LAST_CORRELATION + 1
        pieces = frame_buffers(opcode, correlation, payload)
        if self.welcome is not None:
            length, limit = sum(map(len, pieces)), self.welcome.limits.frame
            if length > limit:
                raise MessageTooLarge(
                    f"a frame of {length} bytes is over the broker's limit of {limit}",
                    hint="send it in parts",
                )
        self._expected[correlation] = opcode
        return correlation, pieces

    def receive(self, data: bytes) -> list[Frame]:
        """Return the replies that `data` completes, without those to the hello.

        Raises RemoteProtocolError, LogChanged, or the error that the broker refused the
        hello with.
        """
        replies = []
        frames = self._decoder.feed(data)
        self.in_large_reply = self._decoder.pending >= LARGE_REPLY_BYTES
        for frame in frames:
            if self._expected.pop(frame.correlation, None) != frame.opcode:
                self._take_news(frame)
            elif self.welcome is None:
                self._greet(frame)
            else:
                replies.append(frame)
        return replies

    def _take_news(self, frame: Frame) -> None:
        """Take a frame that was not asked for: a welcome as it would be now.

        Raises what any other one says.
        """
        if self._greeted is not None and frame[:3] == NEWS:
            self._log.take_news(Welcome.parse(frame))
            return
        error = _unexpected(frame)
        if isinstance(error, NotLeader):
            self._log.learn(error.nodes)
        raise error

    def _greet(self, frame: Frame) -> None:
        """Handle the challenge, the welcome, or the reply to the registration that
        follows it.
        """
        if self._login is not None and frame.opcode == Opcode.HELLO:
            final = self._login.final(Challenge.parse(frame).login.get("message", ""))
            self.outgoing += self.request(Opcode.LOGIN, LoginStep(message=final).encode())[1]
        elif self._login is not None:
            welcome = Welcome.parse(frame)
            self._login.finish((welcome.login or {}).get("message", ""))
            self._login = None
            self._greeted = self._check(welcome)
            self._decoder.limit = limits.FRAME
            if self.registering and self._instance is not None:
                self.outgoing += self._register(self._instance)
        elif self._greeted is None:
            self._greeted = self._check(Welcome.parse(frame))
            self._decoder.limit = limits.FRAME
        elif self._instance is not None:
            self._instance.epoch = int(parse_result(reply_payload(frame))["epoch"])
            self.close()
        if self._greeted is not None and not self.registering:
            self.welcome = self._greeted

    def _check(self, welcome: Welcome) -> Welcome:
        if not VERSIONS[0] <= welcome.version <= VERSIONS[1]:
            raise RemoteProtocolError(
                f"the broker chose protocol version {welcome.version};"
                f" this client speaks {VERSIONS[0]} to {VERSIONS[1]}"
            )
        if not self._any_node:
            self._log.check(welcome)
            self._log.take_news(welcome)
        return welcome


def reply_payload(reply: Frame | BatchedReply) -> bytes:
    """Return the payload of a reply, or of one answer in it. Raises the reply's
    error.
    """
    if reply.status != OK:
        raise to_error(reply.status, reply.payload)
    return reply.payload


def pause_before_repeat(refused: Throttled, left_s: float) -> float:
    """Return how long to wait before a refused call is made again, which was not done.
    Raises the refusal where it names no pause, or one that leaves no time.
    """
    pause = refused.retry_after_s
    if not 0 < pause < left_s:
        raise refused
    return pause


def no_answer(
    seconds: float, failures: Mapping[str, BaseException], *, encrypted: bool
) -> BrokerUnavailable:
    """Return the error after attempts to connect. `failures` has the last one of each
    address, or of all of them under "".
    """
    said = {place: _reason(error) for place, error in failures.items()}
    tried = "; ".join(
        reason if not place or place in reason else f"{place}: {reason}"
        for place, reason in said.items()
    )
    closed = any(isinstance(error, ConnectionLost) for error in failures.values())
    return BrokerUnavailable(
        "no broker answered"
        + (f" within {seconds:.1f} s" if seconds else "")
        + (f" ({tried})" if tried else ""),
        hint=MAYBE_TLS if closed and not encrypted else IS_IT_RUNNING,
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, TxmqError):
        return error.message
    if reason := getattr(error, "reason", None):  # of TLS, whose numbers are its own
        return str(reason)
    number = getattr(error, "errno", None)
    if number and number > 0:  # asyncio's text is "Connect call failed"
        return os.strerror(number)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def silent_for(seconds: float) -> ConnectionLost:
    """Return the error of a connection without an answer for so many seconds."""
    return ConnectionLost(f"the broker has not answered for {seconds:.3g} s")


def superseded() -> ConnectionLost:
    """Return the error of a connection to a silent node after which another leads."""
    return ConnectionLost("the broker does not answer, and another node leads")


def client_closed() -> ClientClosed:
    """Return the error of every call after `close`."""
    return ClientClosed("the client was closed", hint="make a new one with connect(…)")


def _unexpected(frame: Frame) -> Exception:
    """Return the error of a reply without a request.

    A broker that cannot parse a request refuses it as if it were the hello.
    """
    if frame.status != OK and frame.opcode == Opcode.HELLO:
        return to_error(frame.status, frame.payload)
    return RemoteProtocolError(
        "a reply to a request that was not made:"
        f" opcode {frame.opcode}, correlation {frame.correlation}"
    )
