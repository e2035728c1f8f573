"""`txmq.connect`: a client of one broker, or of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Unpack, overload

from txmq.client.blocking.client import Client
from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.green_threads import require_threads
from txmq.client.protocol.settings import ClientSettings, Options, refuse_spool, traced
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.client.blocking.cluster import Cluster


@overload
def connect(url: str, *, service: str | None = None, **options: Unpack[Options]) -> Client: ...


@overload
def connect(
    url: list[str] | tuple[str, ...],
    *,
    service: str | None = None,
    partition_map: Mapping[str, Sequence[int]] | None = None,
    **options: Unpack[Options],
) -> Cluster: ...


def connect(
    url: str | list[str] | tuple[str, ...],
    *,
    service: str | None = None,
    partition_map: Mapping[str, Sequence[int]] | None = None,
    **options: Unpack[Options],
) -> Client | Cluster:
    """Return a client of the broker at `url`, or of several brokers.

    `url` is `txmq://host:port`. One broker with several addresses is
    `txmq://a:7650,b:7650`. A sequence of URLs makes a Cluster: each URL is a broker
    with a log of its own. `partition_map` has the partitions of topics at each of them,
    in their order. Without it the brokers are asked, and each must answer before a
    message with a key can be sent.

    The client connects when it is first used. `service` names what this process is part
    of; checkers are registered and transactions listed under this name.
    `txmq.Options` describes the options. Raises ConfigError.
    """
    require_threads()
    settings = ClientSettings.of(service, **options).at(url)
    if not isinstance(url, str):
        # Programs with one broker need not load it.
        from txmq.client.blocking.cluster import Cluster  # noqa: PLC0415

        refuse_spool(settings)
        return traced(Cluster(url, settings, partition_map), settings)
    if partition_map is not None:
        raise ConfigError(
            "partition_map",
            "a broker knows its own partitions",
            hint="leave it out, or give a sequence of URLs",
        )
    if settings.spool is None:
        return traced(Client(BlockingCore(url, settings)), settings)
    from txmq.client.blocking.spooling_client import SpoolingClient  # noqa: PLC0415
    from txmq.client.blocking.spooling_core import SpoolingCore  # noqa: PLC0415

    return traced(SpoolingClient(SpoolingCore(url, settings)), settings)
