"""A broker in memory with users, and clients that log in."""

from __future__ import annotations

from tests.broker.support import BrokerInMemory, Client
from txmq.core.users import GrantAccess, SetUser
from txmq.model.access import Grant
from txmq.wire import scram
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.hello import Challenge, Hello, LoginStep, Welcome

USERS = {
    "root": ("admin",),
    "nobody": (),
    "shop": ("producer",),
    "billing": ("consumer",),
    "ops": ("operator",),
    "checks": ("auditor",),
}
PASSWORD = "correct horse"  # of all of them
VERIFIER = scram.make_verifier(PASSWORD, b"s" * 16, scram.MIN_ITERATIONS)


def login(user: str, client: scram.ScramClient | None = None) -> dict[str, str]:
    """Return the login of a hello."""
    made = client or scram.ScramClient(user, PASSWORD)
    return {"mechanism": scram.MECHANISM, "message": made.first()}


class BrokerWithUsers(BrokerInMemory):
    """A broker with a user of each role, and one without any."""

    def __init__(self) -> None:
        super().__init__()
        self.start()
        for name, roles in USERS.items():
            self.do(SetUser(name, roles, tuple(VERIFIER), "test", b"x" * 32))  # type: ignore[arg-type]  # a plain tuple
        self.assembly.guard.forget()

    def grant(self, user: str, what: str, resource: str) -> None:
        """Give a user a grant, as the call does."""
        self.do(GrantAccess(user, Grant(what, resource), "test"))
        self.assembly.guard.forget()
        self.assembly.sessions.renew_rights()

    def log_in(
        self,
        user: str,
        password: str = PASSWORD,
        service: str | None = "shop",
        instance: str | None = None,
        *,
        any_node: bool = False,
    ) -> Client:
        """Return a connection of a user that is logged in."""
        scram_client = scram.ScramClient(user, password)
        client = self.connect(None)
        hello = Hello(
            versions=(1, 1),
            client="test",
            service=service,
            instance=instance,
            login=login(user, scram_client),
            any_node=any_node,
        )
        client.send(encode_frame(Opcode.HELLO, 1, hello.encode()))
        [challenge] = client.replies()
        final = scram_client.final(Challenge.parse(challenge).login["message"])
        client.send(encode_frame(Opcode.LOGIN, 2, LoginStep(message=final).encode()))
        [reply] = client.replies()
        welcome = Welcome.parse(reply)
        assert welcome.login is not None
        scram_client.finish(welcome.login["message"])
        return client
