"""Settings of a broker: one TOML file, checked before anything is opened.

    [broker]
    data = "/var/lib/txmq"
    listen = "127.0.0.1:7650"
    flush = "sync"              # or: flush = { every_ms = 10, messages = 1000 }

    [tls]                       # of listen and http; clients use txmqs://
    cert = "/etc/txmq/broker.pem"
    key = "/etc/txmq/broker.key"

    [retention]                 # default; txmq topic alter --set retention=7d
    hours = 168
    policy = "delete"           # or "archive"

    [catalogue]                 # of keys and ids, for txmq message find
    mib = 16                    # built after so much of log; 0 = never

    [disk]
    refuse_free_mib = 256       # refuse messages when less is free

    [[resolver]]
    name = "shop"
    dsn = "postgresql://txmq@db/shop"

    [[xa.database]]             # databases with prepared branches to recover
    name = "shop"
    dsn = "postgresql://txmq@db/shop"

    [[xa.broker]]               # other brokers that take part
    url = "txmq://broker-2:7650"

The rules in `txmq.core` read no settings when they apply an event: settings steer
decisions, the log holds outcomes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from txmq.config.dsn import valid_dsn
from txmq.config.listen import is_one_address, listen_address
from txmq.config.mistakes import first_setting
from txmq.errors import ConfigError
from txmq.model import limits
from txmq.model.message import is_name
from txmq.model.units import MIB

M = TypeVar("M", bound=BaseModel)


HIDDEN = "(hidden)"  # in the place of a setting that may hold a secret
PositiveInt = Annotated[int, Field(gt=0)]


class StrictModel(BaseModel):
    """Base of settings: strict, frozen, and a misspelt setting is an error."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class FlushEvery(StrictModel):
    """Asynchronous flush: the broker answers plain sends before they are on disk.

    A power cut loses at most this much. MetaQ's default was 1,000 messages or 10 s.
    """

    every_ms: PositiveInt = 10
    messages: PositiveInt = 1_000


class RetentionSettings(StrictModel):
    """Retention of topics without a setting of their own; 0 = no limit.

    MetaQ's default is 168 h. Segments without a needed message are deleted, or moved to
    `archive` where a topic's policy says so.
    """

    hours: float = Field(default=168.0, ge=0, le=876_000)
    bytes: int = Field(default=0, ge=0)  # of one topic, all of its partitions together
    # of dead letters; RocketMQ's go with the others, 72 h
    letters_hours: float = Field(default=0.0, ge=0, le=876_000)
    policy: Literal["delete", "archive"] = "delete"
    # None = archive/ in the data directory
    archive: Path | None = Field(default=None, strict=False)
    every_s: float = Field(default=60.0, gt=0)


class ScrubSettings(StrictModel):
    """Background reads of the whole log, in search of rot; 0 hours = never.

    Each step is followed by a pause at least twenty times as long, whatever the rate.
    """

    mib_per_s: float = Field(default=8.0, gt=0)
    every_hours: float = Field(default=168.0, ge=0)


class CatalogueSettings(StrictModel):
    """Catalogues of keys and message ids, built by a process beside the broker.

    One is built after `mib` of log, or of less after `every_s`. With 0 MiB none is
    built, and a search for a key reads all messages of the topic.
    """

    mib: float = Field(default=16.0, ge=0)
    every_s: float = Field(default=30.0, gt=0)


class DiskSettings(StrictModel):
    """Limits of free space on the data directory's disk, in MiB.

    Below `warn_free_mib` there is an alarm, below `refuse_free_mib` sends are refused,
    from `resume_free_mib` on they are accepted again. RocketMQ's limits are 85 % and
    95 % of the disk. These are absolute, because the space that a broker needs to go on
    does not grow with the disk. The ballast is a file of `ballast_mib`, written once
    the log has a second segment. It is deleted when other programs have filled the
    disk, so that acks, decisions and retention go on.
    """

    warn_free_mib: int = Field(default=1_024, ge=0)
    refuse_free_mib: int = Field(default=256, ge=0)
    resume_free_mib: int = Field(default=384, ge=0)
    ballast_mib: int = Field(default=64, ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.refuse_free_mib <= self.resume_free_mib <= self.warn_free_mib:
            raise ValueError(
                "refuse_free_mib, resume_free_mib and warn_free_mib must rise, or be equal"
            )
        return self


def _valid_address(text: str) -> str:
    listen_address(text)
    return text


def _valid_name(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"invalid name {text!r}: use letters, digits, '.', '_' and '-'")
    return text


Name = Annotated[str, AfterValidator(_valid_name)]
Listen = Annotated[str, AfterValidator(_valid_address)]
Dsn = Annotated[str, AfterValidator(valid_dsn)]
MailAddress = Annotated[str, Field(pattern=r"^[^\s@<>,;]+@[^\s@<>,;]+$")]


# The tags choose the type that a wrong value is checked against. Blank tags stay out of
# the setting's name in errors.
Flush = Annotated[
    Annotated[Literal["sync"], Tag("")] | Annotated[FlushEvery, Tag(" ")],
    Discriminator(lambda value: "" if isinstance(value, str) else " "),
]


class ResolverSettings(StrictModel):
    """A database whose token rows decide half messages; the broker asks no others."""

    name: Name
    dsn: Dsn = Field(repr=False)  # may hold a password
    # end a backend that has been in a transaction for longer; None = never
    end_backend_after_s: PositiveInt | None = None


class TlsSettings(StrictModel):
    """TLS of the broker's port and of its HTTP. The files are read again when they
    change.

    `client_ca`: the authority of certificates that clients may log in with, as the user
    that `user_from` names: the common name, or the first DNS name.
    """

    cert: Path = Field(strict=False)  # with the chain of its authority behind it
    key: Path = Field(strict=False, repr=False)
    client_ca: Path | None = Field(default=None, strict=False)
    require_client_cert: bool = False
    user_from: Literal["CN", "DNS"] = "CN"
    min_version: Literal["1.2", "1.3"] = "1.3"

    @model_validator(mode="after")
    def _has_an_authority(self) -> Self:
        if self.require_client_cert and self.client_ca is None:
            raise ValueError("require_client_cert needs client_ca")
        return self


class ConsumerDefaults(StrictModel):
    """Settings of consumers.

    `lease_s` and `session_s` are those of a new group whose first member names none. A
    group keeps its settings. `lost_connection_grace_s` is the time that a member
    outlives its connection.
    """

    lease_s: int = Field(default=60, ge=1, le=43_200)
    session_s: int = Field(default=30, ge=1, le=3_600)
    lost_connection_grace_s: float = Field(default=1.0, ge=0)


class CheckbackSettings(StrictModel):
    """Schedule of check-backs: after `first_s`, then `then_s`, growing to `longest_s`.

    RocketMQ's are 6 s and 30 s. A transaction is in doubt after `in_doubt_after` checks
    without an answer, or at the age of `in_doubt_after_s`.
    """

    first_s: float = Field(default=6.0, gt=0)
    then_s: float = Field(default=30.0, gt=0)
    longest_s: float = Field(default=600.0, gt=0)
    in_doubt_after: PositiveInt = 15
    in_doubt_after_s: float = Field(default=1_800.0, gt=0)


class ReceiverSettings(StrictModel):
    """A receiver of alarms. It gets those that are at least so severe, at once, again
    every `repeat_s`, and once more when they end.
    """

    name: Name
    severity: Literal["critical", "warning"] = "warning"
    repeat_s: float = Field(default=14_400.0, ge=10)


class WebhookSettings(ReceiverSettings):
    """An address that alarms are sent to by HTTP, in the form that it reads.

    `key` is PagerDuty's routing key; others get it as a bearer token.
    """

    # a URL may be a secret by itself, as Slack's are
    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$", repr=False)]
    form: Literal["json", "slack", "pagerduty", "alertmanager"] = "json"
    key: str | None = Field(default=None, min_length=1, repr=False)

    @model_validator(mode="after")
    def _has_a_routing_key(self) -> Self:
        if self.form == "pagerduty" and self.key is None:
            raise ValueError("form pagerduty needs key, the routing key of its integration")
        return self


class MailSettings(ReceiverSettings):
    """Addresses that alarms are mailed to, by an SMTP server."""

    host: str = Field(min_length=1)
    port: int = Field(default=587, ge=1, le=65_535)
    encryption: Literal["starttls", "tls", "none"] = "starttls"
    user: str | None = None
    password: str | None = Field(default=None, repr=False)
    sender: MailAddress
    to: tuple[MailAddress, ...] = Field(strict=False, min_length=1)

    @model_validator(mode="after")
    def _hides_its_password(self) -> Self:
        if self.password is not None and self.encryption == "none":
            raise ValueError("a password needs encryption, starttls or tls")
        return self


class AlarmSettings(StrictModel):
    """Limits of the conditions that `txmq alarms` reports, and who is told."""

    undecided_s: float = Field(default=300.0, gt=0)  # the oldest undecided transaction is older
    # parts of a transaction have been missing for longer
    open_s: float = Field(default=300.0, gt=0)
    held_mib: PositiveInt = 1_024  # of log are kept because of undecided transactions
    # after a contradiction or a refusal, the alarm stays for so long
    conflict_s: float = Field(default=3_600.0, gt=0)
    resolver_s: float = Field(default=30.0, gt=0)  # a database could not be asked for longer
    # a key of an ordered group has been fenced for longer
    fence_s: float = Field(default=600.0, gt=0)
    # a group has had messages and no member for longer
    no_member_s: float = Field(default=300.0, gt=0)
    # a consumer's local store has messages, and has had no owner for longer
    store_owner_s: float = Field(default=300.0, gt=0)
    # a message has been failing in a consumer's local store for longer
    store_s: float = Field(default=86_400.0, gt=0)
    # a member has had messages for longer (RocketMQ's consume timeout)
    slow_s: float = Field(default=900.0, gt=0)
    # token rows could not be cleaned up for longer
    cleanup_s: float = Field(default=21_600.0, gt=0)
    # the newest backup of the log is older; None = 36 h, once there is one; 0 = never
    backup_s: float | None = Field(default=None, ge=0)
    certificate_s: float = Field(default=1_209_600.0, gt=0)  # a certificate of [tls] ends sooner
    webhook: tuple[WebhookSettings, ...] = Field(default=(), strict=False)
    mail: tuple[MailSettings, ...] = Field(default=(), strict=False)

    @property
    def receivers(self) -> tuple[WebhookSettings | MailSettings, ...]:
        return (*self.webhook, *self.mail)

    @model_validator(mode="after")
    def _has_distinct_receivers(self) -> Self:
        names = [one.name for one in self.receivers]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two receivers have the name {twice!r}")
        return self


class BrokerSettings(StrictModel):
    """Section [broker]: addresses, data directory and the log."""

    data: Path = Field(strict=False)
    name: Name = "broker-1"
    listen: Listen = "127.0.0.1:7650"
    # others than this machine may connect though there are no users, or no TLS
    trusted_network: bool = False
    http: Listen | None = None  # console and metrics
    http_hosts: tuple[Name, ...] = Field(default=(), strict=False)  # by which browsers may name it
    otel: bool = False  # spans of what the broker does, to the provider of its process
    flush: Flush = "sync"
    # largest body; topics may have a lower limit
    message_bytes: int = Field(default=limits.MESSAGE, ge=1, le=limits.MESSAGE)
    segment_bytes: int = Field(default=1 << 30, ge=MIB)
    # of zeros: a write adds a 16th at most, and a full disk must have room for all
    # before it counts as free again
    preallocate_bytes: int = Field(default=16 * MIB, ge=4_096)
    # longest wait for the disk at shutdown
    drain_s: float = Field(default=20.0, gt=0)
    # by the first send or consumer; else a misspelt name is refused
    create_topics: bool = False
    # of a topic created so (RocketMQ: 8)
    partitions: int = Field(default=8, ge=1, le=4_096)
    snapshot_bytes: int = Field(default=256 * MIB, ge=MIB)  # of log between two snapshots


class ClusterSettings(StrictModel):
    """Section [cluster]: the log is in a partition of Kafka, and other nodes share it.

    Followers claim the log once it was silent for `silence_s` to 1.6 times that. A
    leader answers from its state for `lease_s` behind its last write. Clients and other
    nodes are told to find the node at `advertise`.
    """

    kafka: Annotated[str, Field(min_length=1)]  # HOST:PORT, several with commas
    topic: Name = "txmq"
    advertise: Listen | None = None  # None = where it listens
    # the authority of the other nodes' certificates; None = those of the system
    ca: Path | None = Field(default=None, strict=False)
    # of librdkafka: connections and logins
    options: dict[str, str] = Field(default={}, repr=False)
    # settings of the topic that may be as they are, though it may lose what it has
    accept: tuple[str, ...] = Field(default=(), strict=False)
    silence_s: float = Field(default=1.5, gt=0)
    lease_s: float = Field(default=1.0, gt=0)


class LimitSettings(StrictModel):
    """Limits of what clients may use up.

    Beyond `unflushed_mib` on their way to the disk sends wait, and on a slow disk
    sooner. With 0 a peer may have three quarters of all connections.
    """

    unflushed_mib: int = Field(default=64, ge=1, le=1_024)
    connections_per_peer: int = Field(default=0, ge=0)  # by host


class XaDatabaseSettings(StrictModel):
    """A database whose prepared branches are recovered.

    The role owns them, or is a member of the roles that do.
    """

    name: Name
    dsn: Dsn = Field(repr=False)  # may hold a password


class XaBrokerSettings(StrictModel):
    """Another broker that takes part in XA transactions."""

    # may hold a password
    url: Annotated[str, Field(pattern=r"^txmqs?://[^\s]+$", repr=False)]


class XaSettings(StrictModel):
    """Recovery of XA transactions, every `every_s`.

    A branch is left alone until it has been prepared for `safety_s`. Narayana's values
    are 120 s and 10 s; here a branch holds locks, and a coordinator decides within
    milliseconds.
    """

    every_s: float = Field(default=10.0, gt=0)
    safety_s: float = Field(default=10.0, gt=0)
    # alarm about branches that have been prepared for longer
    alarm_s: float = Field(default=60.0, gt=0)
    database: tuple[XaDatabaseSettings, ...] = Field(default=(), strict=False)
    broker: tuple[XaBrokerSettings, ...] = Field(default=(), strict=False)


class RelaySettings(StrictModel):
    """Settings of `txmq relay run`, a process of its own."""

    dsn: Dsn = Field(repr=False)  # may hold a password
    broker: str = Field(default="txmq://127.0.0.1:7650", repr=False)  # may hold a password
    slot: str = "txmq_relay"
    timeout_s: float = Field(default=10.0, gt=0)  # of the broker's answers
    confirm_every_s: float = Field(default=1.0, gt=0)  # after a crash, so much is read again
    look_every_s: float = Field(default=10.0, gt=0)
    alarm_mib: PositiveInt = 1_024  # of log that the slot keeps
    alarm_lag_s: float = Field(default=60.0, gt=0)


class SettingsFile(StrictModel):
    """The whole settings file."""

    broker: BrokerSettings
    cluster: ClusterSettings | None = None
    tls: TlsSettings | None = None
    consumers: ConsumerDefaults = ConsumerDefaults()
    checks: CheckbackSettings = CheckbackSettings()
    alarms: AlarmSettings = AlarmSettings()
    retention: RetentionSettings = RetentionSettings()
    disk: DiskSettings = DiskSettings()
    limits: LimitSettings = LimitSettings()
    scrub: ScrubSettings = ScrubSettings()
    catalogue: CatalogueSettings = CatalogueSettings()
    resolver: tuple[ResolverSettings, ...] = Field(default=(), strict=False)
    xa: XaSettings = XaSettings()
    relay: RelaySettings | None = None

    @model_validator(mode="after")
    def _cluster_waits(self) -> Self:
        if self.cluster is not None and self.broker.flush != "sync":
            raise ValueError("a node of a cluster answers once the others have it: flush = sync")
        return self

    @model_validator(mode="after")
    def _cluster_is_found(self) -> Self:
        if self.cluster is None:
            return self
        told = self.cluster.advertise or self.broker.listen
        if not is_one_address(listen_address(told)):
            raise ValueError(
                f"clients cannot be told {told}: set cluster.advertise to the HOST:PORT"
                " at which they find this node"
            )
        return self


class PartialFile(BaseModel):
    """The sections that a process beside the broker reads; it ignores the others."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class RelayFile(PartialFile):
    """The section that a relay reads."""

    relay: RelaySettings


class ClusterFile(PartialFile):
    """The section that tells of the cluster's log."""

    cluster: ClusterSettings


class ResolverFile(PartialFile):
    """The sections that a resolver process reads."""

    resolver: tuple[ResolverSettings, ...] = Field(strict=False, min_length=1)
    checks: CheckbackSettings = CheckbackSettings()


class XaFile(PartialFile):
    """The sections that XA recovery reads."""

    xa: XaSettings

    @field_validator("xa")
    @classmethod
    def _has_a_database(cls, xa: XaSettings) -> XaSettings:
        if not xa.database:
            raise ValueError("no [[xa.database]] is configured")
        return xa


def public_settings(settings: BaseModel) -> dict[str, Any]:
    """Return settings as JSON values, by section. What may hold a secret is only said
    to be there.
    """
    shown: dict[str, Any] = {}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if not field.repr and value is not None:
            shown[name] = HIDDEN
        elif isinstance(value, BaseModel):
            shown[name] = public_settings(value)
        elif isinstance(value, tuple):
            shown[name] = [
                public_settings(one) if isinstance(one, BaseModel) else one for one in value
            ]
        else:
            shown[name] = str(value) if isinstance(value, Path) else value
    return shown


def load_broker(
    path: Path | None, overrides: dict[str, object], *, advertise: str | None = None
) -> SettingsFile:
    """Return the settings in a TOML file, with `overrides` of [broker] on top, and
    `advertise` of [cluster].

    They are options of the command line. Raises ConfigError with the setting, the
    mistake and the file.
    """
    cluster = {} if advertise is None else {"cluster": {"advertise": advertise}}
    return _overridden(SettingsFile, path, {"broker": overrides, **cluster})


def load_relay(path: Path | None, overrides: dict[str, object]) -> RelaySettings:
    """Return the settings of a relay, as `load_broker` does those of [broker]."""
    return _overridden(RelayFile, path, {"relay": overrides}).relay


def load_cluster(path: Path) -> ClusterSettings:
    """Return the settings of the cluster's log; ConfigError as `load_broker`."""
    return _checked(ClusterFile, _read(path), path).cluster


def load_resolvers(path: Path) -> ResolverFile:
    """Return the settings of a resolver process; ConfigError as `load_broker`."""
    return _checked(ResolverFile, _read(path), path)


def load_xa(path: Path) -> XaSettings:
    """Return the settings of XA recovery; ConfigError as `load_broker`."""
    return _checked(XaFile, _read(path), path).xa


def _overridden(
    model: type[M], path: Path | None, overrides: Mapping[str, Mapping[str, object]]
) -> M:
    tree, names = _read(path) if path is not None else {}, set[str]()
    for name, options in overrides.items():
        given = {option: value for option, value in options.items() if value is not None}
        if isinstance(section := tree.get(name, {}), dict):
            tree[name] = section | given
        names |= {f"{name}.{option}" for option in given}
    return _checked(model, tree, path, names)


def _checked(
    model: type[M], tree: dict[str, Any], path: Path | None, given: Collection[str] = ()
) -> M:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        path_to, why = first_setting(error, model)
        where = ".".join(path_to)
        help_of = "relay run" if model is RelayFile else "broker"
        hint = (
            f"in {path}"
            if path is not None and where not in given
            else f"see txmq {help_of} --help"
        )
        raise ConfigError(where, why, hint=hint) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            str(path), f"cannot be read: {error.strerror}", hint="give the path of a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            str(path), f"is not TOML: {error}", hint="packaging/txmq.toml is an example"
        ) from None
