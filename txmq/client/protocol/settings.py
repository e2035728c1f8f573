"""What a client is made with, checked before anything is connected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, TypedDict, Unpack
from uuid import UUID

from txmq.batch import PLAIN, Codec, Compression, library
from txmq.client.protocol.incarnation import Incarnation
from txmq.client.protocol.sender.topics import Partitioner
from txmq.errors import ConfigError
from txmq.model.message import is_name

LONGEST_S = 86_400.0
CODECS = {"zstd": Codec.ZSTD, "lz4": Codec.LZ4}


class Options(TypedDict, total=False):
    """The keyword arguments of `txmq.connect`; what is left out is as in `Settings`.

    `instance`: the name of a producer of the service that outlives its process, such as
    "orders-1". Each client made with it takes the place of those before: whatever they
    send later fails with ProducerFenced. `timeout`: seconds that a call may take, its
    attempts together. `retries`: attempts after the first, of what does no harm twice.
    `partitioner(topic, key, partitions)` chooses partitions, or None to leave it to the
    key. `connections`: at most so many calls at once. `window`, `window_bytes`: what
    `send_async` may have without a receipt, before it waits. `log_id`: the broker's
    log, where it is known beforehand (`txmq broker show`); any other is then refused.
    `delivery_timeout`: seconds until a message of `send_async` without a receipt fails,
    reconnections included. `compression`: "zstd" or "lz4", of bodies that go out
    together and have more than `compress_over` bytes, 4,096. Keys, tags and headers
    stay as they are. Only consumers unpack them, whatever their own setting.
    """

    instance: str | None
    timeout: float
    retries: int
    partitioner: Partitioner | None
    connections: int
    window: int
    window_bytes: int
    delivery_timeout: float
    log_id: UUID | None
    compression: Literal["zstd", "lz4"] | None
    compress_over: int


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings of one client; `Options` tells what they mean. Time-out and
    retries are RocketMQ's.
    """

    service: str | None = None
    instance: str | None = None
    timeout: float = 3.0
    retries: int = 2
    partitioner: Partitioner | None = None
    connections: int = 64
    window: int = 20_000
    window_bytes: int = 64 << 20
    delivery_timeout: float = 30.0
    log_id: UUID | None = None
    compression: Literal["zstd", "lz4"] | None = None
    compress_over: int = 4_096

    def __post_init__(self) -> None:
        if self.service is not None and not is_name(self.service):
            raise ConfigError(
                "service", f"{self.service!r} cannot name a service", hint="such as: orders"
            )
        if self.instance is not None and not (self.service and is_name(self.instance)):
            hint = 'such as "orders-1", together with a service'
            raise ConfigError("instance", f"{self.instance!r} cannot name an instance", hint=hint)
        for name in ("timeout", "delivery_timeout"):
            seconds = getattr(self, name)
            fits = type(seconds) in (int, float) and 0 < seconds <= LONGEST_S
            _require(name, fits, f"seconds, up to {LONGEST_S:.0f}, are needed")
        for name, least in (
            ("retries", 0),
            ("connections", 1),
            ("window", 1),
            ("window_bytes", 1),
            ("compress_over", 0),
        ):
            value = getattr(self, name)
            _require(
                name, type(value) is int and value >= least, f"a number from {least} is needed"
            )
        _require("log_id", isinstance(self.log_id, UUID | None), "a UUID is needed")
        _require(
            "compression", self.compression in {None, *CODECS}, '"zstd", "lz4" or None is needed'
        )
        if self.compression is not None:
            library(CODECS[self.compression])  # to be told here, not by the first large send
        _require(
            "partitioner",
            self.partitioner is None or callable(self.partitioner),
            "a function is needed",
        )

    @property
    def packing(self) -> Compression:
        """What becomes of the bodies of each batch."""
        return (
            PLAIN
            if self.compression is None
            else Compression(CODECS[self.compression], self.compress_over)
        )

    def incarnation(self) -> Incarnation | None:
        """The incarnation of one new client; None = it is of no instance."""
        return None if self.instance is None else Incarnation(self.instance)

    @classmethod
    def of(cls, service: str | None, **options: Unpack[Options]) -> Self:
        """The settings with these options. Raises ConfigError."""
        if unknown := options.keys() - Options.__optional_keys__:
            why = f"there is no option {min(unknown)!r}"
            raise ConfigError("connect", why, hint="see txmq.client.protocol.settings.Options")
        try:
            return cls(service, **options)
        except TypeError as error:
            raise ConfigError(
                "connect", str(error), hint="see txmq.client.protocol.settings.Options"
            ) from error


def _require(name: str, condition: bool, rule: str) -> None:
    if not condition:
        raise ConfigError(name, "a value that is not accepted", hint=rule)
