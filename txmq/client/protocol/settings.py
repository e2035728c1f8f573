"""Settings of a client, checked before anything is connected."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, TypeVar, Unpack
from uuid import UUID

from txmq.batch import NO_COMPRESSION, Codec, Compression, codec_library
from txmq.client.protocol.address import parse_url
from txmq.client.protocol.identity import ProducerInstance
from txmq.errors import ConfigError, LocalProtocolError
from txmq.errors.extras import require
from txmq.errors.validation import check_options
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import is_name

if TYPE_CHECKING:  # OpenTelemetry is for those who ask for it
    from txmq.client.protocol.telemetry.tracing import Telemetry

T = TypeVar("T")

# Of topic, key and number of partitions; None leaves the choice to the key's hash.
Partitioner = Callable[[str, str | None, int], int | None]
MAX_TIMEOUT_S = 86_400.0
CLOSE_S = 10.0  # the default time-out of `close`
EXIT_S = 5.0  # for the sends of a process that ends without `close`
CODECS = {"zstd": Codec.ZSTD, "lz4": Codec.LZ4}
OPTIONS_HINT = "see txmq.Options"


class Options(TypedDict, total=False):
    """The keyword arguments of `txmq.connect`. `ClientSettings` has the defaults.

    `instance`: the name of a producer of the service that outlives its process, such as
    "orders-1". A new client of that name replaces the one before: whatever the old one
    sends later fails with ProducerFenced. `timeout`: seconds that a call may take,
    retries included. `retries`: attempts after the first, of calls that can be
    repeated. `partitioner(topic, key, partitions)` chooses the partition, or returns
    None to leave the choice to the key. `connections`: at most so many calls at once.
    `window`, `window_bytes`: messages of `send_async` without a receipt, and their
    bytes, before it waits. `log_id`: the broker's log, if it is known beforehand
    (`client.log_id`); the client refuses any other. `delivery_timeout`: seconds
    until a message of `send_async` without a receipt fails, reconnections included.
    `compression`: "zstd" or "lz4", of the bodies of a batch that have together more
    than `compress_over` bytes, 4,096. Keys, tags and headers stay uncompressed. Only
    consumers decompress, whatever their own setting. `spool`: a directory for
    messages while no broker answers, which are sent in their order when it is back.
    `spool_bytes`: the most that may wait there, 1 GiB. `spool_full`: at this limit
    sends "block" for up to `timeout` seconds, or "refuse" at once; both fail with
    SpoolFull. `telemetry`: True sends spans and metrics to the providers of
    OpenTelemetry that the program has set (extra `otel`); `txmq.Telemetry(…)` names
    others.
    """

    instance: str | None
    timeout: Duration
    retries: int
    partitioner: Partitioner | None
    connections: int
    window: int
    window_bytes: int
    delivery_timeout: Duration
    log_id: UUID | str | None
    compression: Literal["zstd", "lz4"] | None
    compress_over: int
    spool: str | PathLike[str] | None
    spool_bytes: int
    spool_full: Literal["block", "refuse"]
    telemetry: Telemetry | bool


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The checked settings of one client, explained in `Options`. `timeout` and
    `retries` default to RocketMQ's values.
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
    spool: str | PathLike[str] | None = None
    spool_bytes: int = 1 << 30
    spool_full: Literal["block", "refuse"] = "block"
    telemetry: Telemetry | None = None

    def __post_init__(self) -> None:
        if self.service is not None and not is_name(self.service):
            raise ConfigError(
                "service", f"{self.service!r} cannot name a service", hint="use a name like: orders"
            )
        if self.instance is not None and not (self.service and is_name(self.instance)):
            raise ConfigError(
                "instance",
                f"{self.instance!r} cannot name an instance",
                hint='use a name like "orders-1", together with a service',
            )
        self._check_numbers()
        if not isinstance(self.log_id, UUID | None):
            raise self._invalid("log_id", "give a uuid.UUID, or its text")
        if self.compression not in {None, *CODECS}:
            raise self._invalid("compression", 'give "zstd", "lz4" or None')
        if self.compression is not None:
            # A missing library is an error here, and not at the first large send.
            codec_library(CODECS[self.compression])
        if self.spool_full not in {"block", "refuse"}:
            raise self._invalid("spool_full", 'give "block" or "refuse"')
        if self.spool is not None and not (
            isinstance(self.spool, str | PathLike) and fspath(self.spool)
        ):
            raise self._invalid("spool", "give the path of a directory")
        if self.partitioner is not None and not callable(self.partitioner):
            raise self._invalid("partitioner", "give a function")

    def _check_numbers(self) -> None:
        for name in ("timeout", "delivery_timeout"):
            object.__setattr__(self, name, require_seconds(name, getattr(self, name)))
        for name, least in (
            ("retries", 0),
            ("connections", 1),
            ("window", 1),
            ("window_bytes", 1),
            ("compress_over", 0),
            ("spool_bytes", 1 << 16),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise self._invalid(name, f"give a whole number, {least} or more")

    def _invalid(self, name: str, hint: str) -> ConfigError:
        return ConfigError(name, f"{getattr(self, name)!r:.80} is not accepted", hint=hint)

    @property
    def body_compression(self) -> Compression:
        """The compression of the bodies of each batch."""
        if self.compression is None:
            return NO_COMPRESSION
        return Compression(CODECS[self.compression], self.compress_over)

    @property
    def attempt_s(self) -> float:
        """Seconds of the first of all attempts that a call may make."""
        return self.timeout / (self.retries + 1)

    def producer_instance(self) -> ProducerInstance | None:
        """Return the producer instance of a new client, or None without one."""
        return None if self.instance is None else ProducerInstance(self.instance)

    def at(self, url: object) -> Self:
        """Return the settings for the broker at `url`, whose address spans tell, if it
        has only one, beside the client's id. Raises ConfigError.
        """
        if self.telemetry is None:
            return self
        telemetry = self.telemetry.of_client(self.instance)
        if isinstance(url, str):
            first, *others = parse_url(url)
            telemetry = telemetry if others else telemetry.at(*first)
        return replace(self, telemetry=telemetry)

    @classmethod
    def of(cls, service: str | None, **options: Unpack[Options]) -> Self:
        """Return the settings with these options. Raises ConfigError."""
        check_options("connect", options, Options.__optional_keys__)
        fields: dict[str, Any] = {**options, "telemetry": _telemetry(options.get("telemetry"))}
        if isinstance(log := options.get("log_id"), str):
            with suppress(ValueError):  # it is refused as text, like all that is no UUID
                fields["log_id"] = UUID(log)
        try:
            return cls(service, **fields)
        except TypeError as error:
            raise ConfigError("connect", str(error), hint=OPTIONS_HINT) from error


def require_seconds(name: str, duration: Duration) -> float:
    """Return a setting that is a duration in seconds. Raises ConfigError."""
    try:
        seconds = seconds_of(duration, name)
    except LocalProtocolError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ConfigError(
            name,
            f"{duration!r:.80} is not accepted",
            hint=f"give seconds or a timedelta, more than 0 and up to {MAX_TIMEOUT_S:.0f} s",
        )
    return seconds


def _telemetry(option: object) -> Telemetry | None:
    """Return where spans and metrics go. Raises ConfigError, or MissingExtra."""
    if option is None or option is False:
        return None
    require("otel", "opentelemetry")
    # for those who ask for it
    from txmq.client.protocol.telemetry.tracing import Telemetry  # noqa: PLC0415

    if option is True:
        return Telemetry()
    if not isinstance(option, Telemetry):
        raise ConfigError(
            "telemetry", f"{option!r:.80} is not accepted", hint="give True, or txmq.Telemetry(…)"
        )
    return option


def traced(client: T, settings: ClientSettings) -> T:
    """Return a client, with spans around its calls if the settings say so."""
    if settings.telemetry is not None:
        # for those who ask for it
        from txmq.client.protocol.telemetry.instrument import instrument_client  # noqa: PLC0415

        instrument_client(client, settings.telemetry)
    return client


def refuse_spool(settings: ClientSettings) -> None:
    """Raise ConfigError for a client of several brokers with a spool."""
    if settings.spool is not None:
        raise ConfigError(
            "spool",
            "a cluster has no spool yet: its messages go to another broker instead",
            hint="leave it out, or make a client with a spool for each broker",
        )


def no_spool() -> ConfigError:
    """Return the error for a client without a spool."""
    return ConfigError(
        "spool", "this client has none", hint='make it with txmq.connect(url, spool="directory")'
    )
