"""The greeting: who speaks, in which version of the protocol, within which limits."""

from __future__ import annotations

from typing import Annotated, Self
from uuid import UUID

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from txmq.errors import RemoteProtocolError
from txmq.model.message import is_name
from txmq.wire.frames import LEAST, Frame
from txmq.wire.headers import Opcode
from txmq.wire.json import WireModel, parse_as
from txmq.wire.status import OK, to_error

VERSIONS = (1, 1)  # the oldest and the newest that are spoken here


def _checked(text: str) -> str:
    if not is_name(text):
        raise ValueError("is no name")
    return text


Name = Annotated[str, AfterValidator(_checked)]
Version = Annotated[int, Field(ge=1, le=65_535)]
Words = Annotated[
    str, StringConstraints(pattern=r"^[ -~]{1,127}$")
]  # printable ASCII, because it goes into logs
Features = Annotated[tuple[Words, ...], Field(max_length=64)]
Process = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Login = Annotated[dict[Words, str], Field(max_length=16)]


class Hello(WireModel):
    """A client's first request. A client that registers no checker needs no `service`.

    `instance` names a producer of the service that outlives its process, and
    `incarnation` is the number this process got when it registered as that, 0 before.
    `process` is the same in all connections of a process, and in no other: it is asked
    first about what it stored.
    """

    versions: tuple[Version, Version]
    features: Features = ()
    client: Words
    service: Name | None = None
    instance: Name | None = None
    incarnation: Annotated[int, Field(ge=0, le=(1 << 32) - 1)] = 0
    login: Login | None = None
    process: Process | None = None

    @classmethod
    def parse(cls, frame: Frame) -> Self:
        """The hello that a client's first frame must be, else RemoteProtocolError."""
        if frame.opcode != Opcode.HELLO or frame.status:
            raise RemoteProtocolError(f"request {frame.opcode} before the hello")
        return parse_as(cls, frame.payload)

    @model_validator(mode="after")
    def _an_instance_is_a_services(self) -> Self:
        if (self.instance is not None and self.service is None) or (
            self.incarnation and self.instance is None
        ):
            raise ValueError(
                "an instance is one of a service, and an incarnation one of an instance"
            )
        return self

    def encode(self) -> bytes:
        """The payload of the request; without an instance and a process it is that of
        clients before there were any.
        """
        absent = {"instance", "incarnation"} if self.instance is None else set[str]()
        return self.model_dump_json(
            exclude=absent | ({"process"} if self.process is None else set())
        ).encode()


class Limits(WireModel):
    """What the broker takes at most, in bytes."""

    frame: Annotated[int, Field(gt=LEAST)]
    message: Annotated[int, Field(gt=0)]


class Welcome(WireModel):
    """The broker's reply. A client that meets another `log_id` than before talks to
    another broker's data.
    """

    version: Version
    features: Features = ()
    broker: Name
    log_id: UUID
    boot_epoch: Annotated[int, Field(ge=0)]
    limits: Limits
    login: Login | None = None

    @classmethod
    def parse(cls, frame: Frame) -> Self:
        """The welcome that a frame brings. Raises what the broker refused it with, or
        RemoteProtocolError.
        """
        if frame.opcode != Opcode.HELLO:
            raise RemoteProtocolError(f"reply {frame.opcode} to a hello")
        if frame.status != OK:
            raise to_error(frame.status, frame.payload)
        return parse_as(cls, frame.payload)

    def encode(self) -> bytes:
        """The payload of the reply."""
        return self.model_dump_json().encode()


def negotiate(hello: Hello, spoken: tuple[int, int] = VERSIONS) -> int:
    """The newest version that both sides speak. Raises RemoteProtocolError where there
    is none.
    """
    oldest, newest = max(hello.versions[0], spoken[0]), min(hello.versions[1], spoken[1])
    if oldest > newest:
        ranges = (
            f"{spoken[0]} to {spoken[1]}, the client {hello.versions[0]} to {hello.versions[1]}"
        )
        raise RemoteProtocolError(
            f"the broker speaks versions {ranges}", hint="upgrade the older of the two"
        )
    return newest
