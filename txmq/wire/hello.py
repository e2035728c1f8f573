"""The HELLO request and its reply: identities, protocol version, limits."""

from __future__ import annotations

from typing import Annotated, Self
from uuid import UUID

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from txmq.errors import LoginFailed, RemoteProtocolError
from txmq.model.cluster import NOT_LISTED, LogList
from txmq.model.message import is_name
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import MIN_LENGTH, Frame
from txmq.wire.json import WireModel, parse_as
from txmq.wire.status import OK, to_error

VERSIONS = (1, 1)  # oldest and newest version of the protocol that this txmq supports


def _checked(text: str) -> str:
    if not is_name(text):
        raise ValueError("invalid name: use letters, digits, '.', '_' and '-'")
    return text


Name = Annotated[str, AfterValidator(_checked)]
Version = Annotated[int, Field(ge=1, le=65_535)]
# printable ASCII, because logs show it
PrintableText = Annotated[str, StringConstraints(pattern=r"^[ -~]{1,127}$")]
Process = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Login = Annotated[dict[PrintableText, str], Field(max_length=16)]


class Hello(WireModel):
    """A client's first request. A client without a checker needs no `service`.

    `instance` names a producer of the service that outlives its process. `incarnation`
    is the number that this process got when it registered as the instance; 0 = not yet.
    `process` is the same in all connections of a process, and unique to it: check-backs
    go first to the process that stored the bundle. `any_node`: a node of a cluster need
    not lead to be asked about it.
    """

    versions: tuple[Version, Version]
    client: PrintableText
    service: Name | None = None
    instance: Name | None = None
    incarnation: Annotated[int, Field(ge=0, le=(1 << 32) - 1)] = 0
    login: Login | None = None
    process: Process | None = None
    any_node: bool = False

    @classmethod
    def parse(cls, frame: Frame) -> Self:
        """Return the hello in a client's first frame. Raises RemoteProtocolError."""
        if frame.opcode != Opcode.HELLO or frame.status:
            raise RemoteProtocolError(f"request {frame.opcode} came before the hello")
        return parse_as(cls, frame.payload)

    @model_validator(mode="after")
    def _an_instance_is_a_services(self) -> Self:
        if (self.instance is not None and self.service is None) or (
            self.incarnation and self.instance is None
        ):
            raise ValueError("an instance needs a service, and an incarnation needs an instance")
        return self

    def encode(self) -> bytes:
        """Return the payload of the request."""
        return self.model_dump_json(exclude=None if self.any_node else {"any_node"}).encode()


def hello_payload(
    client: str,
    service: str | None,
    instance: str | None,
    incarnation: int,
    process: str | None,
    login: dict[str, str] | None = None,
    *,
    any_node: bool = False,
) -> bytes:
    """Return the payload of the hello of this txmq."""
    hello = Hello(
        versions=VERSIONS,
        client=client,
        service=service,
        instance=instance,
        incarnation=incarnation,
        process=process,
        login=login,
        any_node=any_node,
    )
    return hello.encode()


class Challenge(WireModel):
    """The broker's reply to a hello with a login, which goes on with `LoginStep`."""

    login: Login

    @classmethod
    def parse(cls, frame: Frame) -> Self:
        """Return the challenge in a frame. Raises the error of the broker's refusal,
        RemoteProtocolError, or LoginFailed for a broker that asks for no login.
        """
        if frame.status != OK:
            raise to_error(frame.status, frame.payload)
        try:
            return parse_as(cls, frame.payload)
        except RemoteProtocolError:
            Welcome.parse(frame)
            raise LoginFailed(
                "the broker has no users, and asks for no login",
                hint="leave the user out of the URL, or see whether this is the right broker",
            ) from None

    def encode(self) -> bytes:
        """Return the payload of the reply."""
        return self.model_dump_json().encode()


class LoginStep(WireModel):
    """The client's second and last message of a login."""

    message: Annotated[str, StringConstraints(max_length=2_048)]

    @classmethod
    def parse(cls, frame: Frame) -> Self:
        """Return the step in a LOGIN frame. Raises RemoteProtocolError."""
        return parse_as(cls, frame.payload)

    def encode(self) -> bytes:
        """Return the payload of the request."""
        return self.model_dump_json().encode()


class BrokerLimits(WireModel):
    """The broker's limits in bytes."""

    frame: Annotated[int, Field(gt=MIN_LENGTH)]
    message: Annotated[int, Field(gt=0)]


class Welcome(WireModel):
    """The broker's reply. Another `log_id` than before means another broker's data.

    Another `incarnation` means that the log was restored from a backup; None = never.
    `nodes` are the addresses of a cluster's, the leader's first; a broker alone has
    none. `log_list` are logs that have topics in common with this one. The broker sends
    its welcome again when these change, with correlation 0.
    """

    version: Version
    broker: Name
    log_id: UUID
    boot_epoch: Annotated[int, Field(ge=0)]
    limits: BrokerLimits
    login: Login | None = None
    incarnation: UUID | None = None
    nodes: tuple[str, ...] = ()
    log_list: LogList = NOT_LISTED

    @classmethod
    def parse(cls, frame: Frame) -> Self:
        """Return the welcome in a frame.

        Raises the error of the broker's refusal, or RemoteProtocolError.
        """
        if frame.opcode not in (Opcode.HELLO, Opcode.LOGIN):
            raise RemoteProtocolError(f"the reply to a hello has opcode {frame.opcode}")
        if frame.status != OK:
            raise to_error(frame.status, frame.payload)
        return parse_as(cls, frame.payload)

    def encode(self) -> bytes:
        """Return the payload of the reply."""
        told = {"nodes": self.nodes, "log_list": self.log_list.logs}
        return self.model_dump_json(exclude={name for name in told if not told[name]}).encode()


def negotiate(hello: Hello, spoken: tuple[int, int] = VERSIONS) -> int:
    """Return the newest version that both sides support. Raises RemoteProtocolError."""
    oldest, newest = max(hello.versions[0], spoken[0]), min(hello.versions[1], spoken[1])
    if oldest > newest:
        ranges = (
            f"{spoken[0]} to {spoken[1]}, the client {hello.versions[0]} to {hello.versions[1]}"
        )
        raise RemoteProtocolError(
            f"the broker supports versions {ranges}", hint="upgrade the older of the two"
        )
    return newest
