"""Hello and login of a connection, up to the rights of its user."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.errors import LoginFailed, RemoteProtocolError
from txmq.wire.data_requests import Opcode
from txmq.wire.hello import Challenge, Hello, LoginStep, negotiate
from txmq.wire.scram import MECHANISM

if TYPE_CHECKING:
    from txmq.broker.reactor.interfaces import LoginGuard, UserRights
    from txmq.wire.frames import Frame
    from txmq.wire.scram import ScramServer

LOGIN_HINT = "give a user: txmq://USER@HOST:PORT, and the password in TXMQ_PASSWORD"


class Greeting(NamedTuple):
    """The end of a handshake: who the client is, and what its user may do.

    `rights` are None where nobody logs in. `proof` is the broker's own, that it knows
    the password of the user.
    """

    hello: Hello
    rights: UserRights | None = None
    proof: str | None = None


class Handshake:
    """The handshake of one connection. `guard` None = nobody has to log in."""

    def __init__(self, guard: LoginGuard | None, transport: object, peer_host: str) -> None:
        self._guard, self._transport, self._peer_host = guard, transport, peer_host
        self._login: tuple[Hello, ScramServer] | None = None  # under way

    def receive(self, frame: Frame) -> Challenge | Greeting:
        """Take the next frame of the client. Raises RemoteProtocolError, LoginFailed
        and Throttled.
        """
        if self._login is not None:
            return self._end_login(frame, *self._login)
        hello, guard = Hello.parse(frame), self._guard
        if guard is None or not guard.asks(hello.login):
            return Greeting(hello)
        negotiate(hello)  # or refuse
        if hello.login is None:
            rights = guard.certified(self._transport)
            if rights is None:
                raise LoginFailed("this broker asks for a login", hint=LOGIN_HINT)
            return Greeting(hello, rights)
        if hello.login.get("mechanism") != MECHANISM:
            raise LoginFailed(f"unknown mechanism of login: use {MECHANISM}")
        login = guard.begin(self._peer_host, hello.login.get("message", ""))
        self._login = hello, login
        return Challenge(login={"message": login.challenge()})

    def _end_login(self, frame: Frame, hello: Hello, login: ScramServer) -> Greeting:
        guard = self._guard
        assert guard is not None, "it began the login"
        if frame.opcode != Opcode.LOGIN or frame.status:
            raise RemoteProtocolError(f"request {frame.opcode} came before the end of the login")
        guard.check_login(self._peer_host, login.user)
        proof = login.verify(LoginStep.parse(frame).message)
        rights = None if proof is None else guard.rights_after(login)
        if proof is None or rights is None:
            raise guard.failed(self._peer_host, login.user)
        guard.logins["succeeded"] += 1
        guard.note_host(self._peer_host)
        self._login = None
        return Greeting(hello, rights, proof)
