"""Interfaces of Twisted objects that the broker uses. Tests pass doubles of just
these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable

    from twisted.internet.defer import Deferred

    from txmq.core.state.state import State
    from txmq.errors import LoginFailed, TxmqError
    from txmq.model.access import Grant, Need
    from txmq.wire.scram import ScramServer


class Timer(Protocol):
    """A call scheduled for later."""

    def cancel(self) -> None: ...
    def active(self) -> int: ...


class Clock(Protocol):
    """Monotonic seconds and timers: the reactor, or `twisted.internet.task.Clock`."""

    def seconds(self) -> float: ...
    def callLater(self, delay: float, callable: Callable[..., object], *args: object) -> Timer: ...  # noqa: A002


class CallsFromThreads(Protocol):
    """The reactor, for threads: it makes their calls in its own, in their order."""

    def callFromThread(self, callable: Callable[..., object], *args: object) -> None: ...  # noqa: A002, N802  # Twisted's


class Transport(Protocol):
    """The transport of a TCP connection."""

    connected: int
    disconnecting: int

    def write(self, data: bytes) -> None: ...
    def writeSequence(self, data: Iterable[bytes]) -> None: ...  # noqa: N802  # Twisted's
    def loseConnection(self) -> None: ...
    def abortConnection(self) -> None: ...
    def setTcpNoDelay(self, enabled: bool) -> None: ...  # Twisted's  # noqa: FBT001
    def getPeer(self) -> object: ...
    def registerProducer(self, producer: object, streaming: bool) -> None: ...  # noqa: FBT001  # Twisted's
    def pauseProducing(self) -> None: ...
    def resumeProducing(self) -> None: ...


class DiskPace(Protocol):
    """Pace of the disk (`txmq.broker.engine`)."""

    @property
    def is_behind(self) -> bool: ...
    def has_room(self, size: int) -> bool: ...
    def seconds_for(self, size: int) -> float: ...
    def answer_when_durable(self, deliver: Callable[[Any], None], reply: object) -> None: ...
    def hurry(self) -> None: ...


class UserRights(Protocol):
    """Rights of a user (`txmq.broker.access.guard`)."""

    user: str
    roles: tuple[str, ...]
    grants: tuple[Grant, ...]
    most_connections: int  # 0 = any number

    @property
    def meter(self) -> object | None: ...  # where the user has a quota

    def allows(self, need: Need) -> bool: ...
    def require(self, needs: Iterable[Need]) -> None: ...
    def check_quota(self, state: State, opcode: int, payload: bytes) -> None: ...
    def check_call_quota(self, name: str) -> None: ...
    def refused_connection(self) -> TxmqError: ...
    def check(self, state: State, opcode: int, payload: bytes) -> None: ...
    def judge_call(self, state: State, name: str, args: Any) -> Any: ...  # noqa: ANN401  # the call's own model


class LoginGuard(Protocol):
    """Logins and rights of a broker (`txmq.broker.access.guard`)."""

    logins: Counter[str]

    @property
    def has_users(self) -> bool: ...
    def asks(self, login: dict[str, str] | None) -> bool: ...
    def rights_of(self, name: str) -> UserRights | None: ...
    def rights_after(self, login: ScramServer) -> UserRights | None: ...
    def certified(self, transport: object) -> UserRights | None: ...
    def check_login(self, peer: str, user: str) -> None: ...
    def begin(self, peer: str, message: str) -> ScramServer: ...
    def failed(self, peer: str, user: str) -> LoginFailed: ...
    def note_host(self, peer: str) -> None: ...


class RunInThread(Protocol):
    """Runs a blocking function in a thread, one after the other."""

    def __call__(self, function: Callable[..., Any], *args: object) -> Deferred[Any]: ...
