"""What all clients of Kafka are told, and what their errors say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Final, TypeVar

import structlog
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from txmq.errors import ConfigError, LogUnavailable

# How to reach Kafka and how to log in is up to the operator. What else librdkafka can
# be told decides whether the log is safe.
MAY_BE_SET: Final = ("security.", "sasl.", "ssl.", "https.", "client.", "broker.address.")
VERIFY: Final = "enable.ssl.certificate.verification"
# A node finds the new leader of the partition soon, and gives up one that stands still.
# While the old one is down, nothing but the refreshed metadata tells of the new one.
COMMON: Final = {
    "log_level": 2,  # errors come to `note` as well
    "metadata.max.age.ms": 5_000,
    "reconnect.backoff.max.ms": 200,
    "reconnect.backoff.ms": 20,
    "retry.backoff.max.ms": 200,
    "retry.backoff.ms": 20,
    "socket.keepalive.enable": True,
    "socket.nagle.disable": True,
    "socket.timeout.ms": 3_000,
    "topic.metadata.refresh.interval.ms": 200,
}
ARE_UP: Final = "are Kafka's nodes up, and is their address right?"
HINTS: Final = {
    KafkaError._MSG_TIMED_OUT: "are Kafka's nodes up, and min.insync.replicas of them in sync?",
    KafkaError._TRANSPORT: ARE_UP,
    KafkaError._ALL_BROKERS_DOWN: ARE_UP,
    KafkaError._TIMED_OUT: ARE_UP,
    KafkaError._AUTHENTICATION: "check the options `sasl.*` and `ssl.*`",
    KafkaError.SASL_AUTHENTICATION_FAILED: "check the options `sasl.*`",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "allow READ, WRITE, DESCRIBE and DESCRIBE_CONFIGS "
    "of the topic; for `txmq cluster create` CREATE, for retention DELETE",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "allow IDEMPOTENT_WRITE of the cluster",
    KafkaError.MSG_SIZE_TOO_LARGE: "`txmq cluster create` has the right max.message.bytes",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "`txmq cluster create` makes the topic",
}
NOTE_EVERY_S: Final = 60.0  # errors of one kind
log = structlog.get_logger()
Client = TypeVar("Client")


@dataclass(frozen=True, slots=True)
class KafkaAddress:
    """Kafka's nodes, as HOST:PORT with commas, and options of librdkafka for them."""

    servers: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)  # has passwords
    _noted_at: dict[int, float] = field(default_factory=dict, init=False, compare=False, repr=False)

    def client(self, kind: Callable[..., Client], settings: Mapping[str, object] = {}) -> Client:
        """Return a producer, a consumer or an admin client with these settings.

        Raises ConfigError for an option that is unknown, or that is not the operator's.
        """
        for name in self.options:
            if name != VERIFY and not name.startswith(MAY_BE_SET):
                raise ConfigError(
                    f"cluster.options.{name}",
                    "is no option of connections or logins",
                    hint=f"options begin with {', '.join(MAY_BE_SET)}, or are {VERIFY}",
                )
        own: dict[str, object] = {"bootstrap.servers": self.servers}
        # what fails an admin client says by its answers, and its thread outlives it
        own["error_cb"] = _ignore if kind is AdminClient else self.note
        try:
            return kind({**self.options, **COMMON, **settings, **own})
        except KafkaException as failed:
            raise ConfigError("cluster.options", failed.args[0].str()) from failed

    def note(self, error: KafkaError) -> None:
        """Log what is wrong. A client tries again by itself, many times a second."""
        now, code = monotonic(), error.code()
        if now - self._noted_at.get(code, -inf) >= NOTE_EVERY_S:
            self._noted_at[code] = now
            log.warning("kafka.trouble", error=error.str(), hint=HINTS.get(code, ""))


def _ignore(_error: KafkaError) -> None: ...


def unavailable(doing: str, error: KafkaError) -> LogUnavailable:
    """Return the error of a request to Kafka that failed."""
    return LogUnavailable(
        f"Kafka failed to {doing}: {error.str()}", hint=HINTS.get(error.code(), "")
    )
