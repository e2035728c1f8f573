"""Settings of a broker: one TOML file, checked before anything is opened.

    [broker]
    data = "/var/lib/txmq"
    listen = "127.0.0.1:7650"
    flush = "sync"                       # or: flush = { every_ms = 10, messages = 1000 }

    [retention]                          # where a topic says nothing: txmq topic alter --set retention=7d
    hours = 168
    policy = "delete"                    # or "archive"

    [catalogue]                          # of keys and ids, for txmq message find
    mib = 16                             # made after so much of log; 0 = never

    [disk]
    refuse_free_mib = 256                # below that no messages are taken

    [[resolver]]
    name = "shop"
    dsn = "postgresql://txmq@db/shop"

    [[xa.database]]                      # where prepared branches are looked for
    name = "shop"
    dsn = "postgresql://txmq@db/shop"

    [[xa.broker]]                        # other brokers that decide them, or take part
    url = "txmq://broker-2:7650"

Nothing here is read by the rules in `core` when an event is applied: settings
steer decisions, the log holds outcomes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
)

from txmq.config.listen import is_loopback, listen_address
from txmq.config.storage import (
    Catalogues,
    DiskSpace,
    FlushEvery,
    Model,
    PositiveInt,
    Retention,
    Scrub,
)
from txmq.errors import ConfigError
from txmq.errors.validation import first_mistake
from txmq.model import limits
from txmq.model.message import is_name

MIB = 1 << 20
M = TypeVar("M", bound=BaseModel)


def _listens(text: str) -> str:
    listen_address(text)
    return text


def _listens_here(text: str) -> str:
    if not is_loopback(listen_address(text).host):
        raise ValueError(
            f"{text!r} can be reached from elsewhere, and nothing asks there who it is: use 127.0.0.1"
        )
    return text


def _named(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"{text!r} is no name: letters, digits and . _ - are possible")
    return text


Name = Annotated[str, AfterValidator(_named)]
Listen = Annotated[str, AfterValidator(_listens)]
ListenHere = Annotated[str, AfterValidator(_listens_here)]


# The tags choose which of the two a wrong value is measured by; "" keeps them out of
# the name of the setting.
Flush = Annotated[
    Annotated[Literal["sync"], Tag("")] | Annotated[FlushEvery, Tag(" ")],
    Discriminator(lambda value: "" if isinstance(value, str) else " "),
]


class Resolver(Model):
    """A database whose token rows decide half messages; only databases named here are
    ever asked.
    """

    name: Name
    dsn: str = Field(repr=False)  # may hold a password
    end_backend_after_s: PositiveInt | None = (
        None  # a backend in a transaction for so long is ended; None = never
    )


class Consumers(Model):
    """Defaults of consumer groups (RocketMQ's lease and session, FEATURES (c))."""

    lease_s: PositiveInt = 60
    session_s: PositiveInt = 10
    lost_connection_grace_s: float = Field(default=1.0, ge=0)


class Checks(Model):
    """When undecided transactions are asked about: first, then after `then_s`, growing
    to `longest_s`.

    RocketMQ's are 6 s and 30 s. In doubt after so many checks that found no answer, or
    at that age: whoever should answer may never have taken the question.
    """

    first_s: float = Field(default=6.0, gt=0)
    then_s: float = Field(default=30.0, gt=0)
    longest_s: float = Field(default=600.0, gt=0)
    in_doubt_after: PositiveInt = 15
    in_doubt_after_s: float = Field(default=1_800.0, gt=0)


class Alarms(Model):
    """When an operator is to be told (`txmq alarms`)."""

    undecided_s: float = Field(default=300.0, gt=0)  # the oldest undecided transaction is older
    open_s: float = Field(
        default=300.0, gt=0
    )  # parts of a transaction have been missing for longer
    held_mib: PositiveInt = 1_024  # of log are kept because of undecided transactions
    conflict_s: float = Field(
        default=3_600.0, gt=0
    )  # how long a contradiction or a refusal is told of
    resolver_s: float = Field(default=30.0, gt=0)  # a database could not be asked for longer
    fence_s: float = Field(
        default=86_400.0, gt=0
    )  # a key of an ordered group has been fenced for longer
    slow_s: float = Field(
        default=900.0, gt=0
    )  # a member has had messages for longer (RocketMQ's consume timeout)
    cleanup_s: float = Field(
        default=21_600.0, gt=0
    )  # token rows could not be cleaned up for longer


class Broker(Model):
    """The broker itself."""

    data: Path = Field(strict=False)
    name: Name = "broker-1"
    listen: Listen = "127.0.0.1:7650"
    http: ListenHere | None = (
        None  # the console and metrics; on this machine only, they know no users
    )
    flush: Flush = "sync"
    message_bytes: int = Field(
        default=limits.MESSAGE, ge=1, le=limits.MESSAGE
    )  # of a body; topics may take less
    segment_bytes: int = Field(default=1 << 30, ge=MIB)
    preallocate_bytes: int = Field(default=16 * MIB, ge=4_096)
    drain_s: float = Field(
        default=20.0, gt=0
    )  # how long to wait for the disk, such as a full one, at the end
    create_topics: bool = True
    partitions: int = Field(
        default=8, ge=1, le=4_096
    )  # of a topic created on first use (RocketMQ: 8)
    snapshot_bytes: int = Field(default=256 * MIB, ge=MIB)  # of log between two snapshots


class XaDatabase(Model):
    """A database whose prepared branches are recovered; the role owns them, or is a
    member of the roles that do.
    """

    name: Name
    dsn: str = Field(repr=False)  # may hold a password


class XaBroker(Model):
    """A broker that takes part in XA transactions, besides the one whose settings these
    are.
    """

    url: Annotated[str, Field(pattern=r"^txmq://[^/\s]+$")]


class Xa(Model):
    """Recovery of XA transactions: every so often, and not before a branch has stood
    for the safety interval.

    Narayana's are 120 s and 10 s; a branch here holds locks, and a coordinator decides
    within milliseconds.
    """

    every_s: float = Field(default=10.0, gt=0)
    safety_s: float = Field(default=10.0, gt=0)
    alarm_s: float = Field(
        default=60.0, gt=0
    )  # what has stood for so long is told of, again and again
    database: tuple[XaDatabase, ...] = Field(default=(), strict=False)
    broker: tuple[XaBroker, ...] = Field(default=(), strict=False)


class Relay(Model):
    """`txmq relay run`, a process of its own; the broker itself makes no use of it."""

    dsn: str = Field(repr=False)  # may hold a password
    broker: str = "txmq://127.0.0.1:7650"
    slot: str = "txmq_relay"
    timeout_s: float = Field(default=10.0, gt=0)  # of the broker's answers
    confirm_every_s: float = Field(default=1.0, gt=0)  # what a crash makes the relay read again
    look_every_s: float = Field(default=10.0, gt=0)
    alarm_mib: PositiveInt = 1_024  # of log that the slot keeps
    alarm_lag_s: float = Field(default=60.0, gt=0)


class Settings(Model):
    """The whole file."""

    broker: Broker
    consumers: Consumers = Consumers()
    checks: Checks = Checks()
    alarms: Alarms = Alarms()
    retention: Retention = Retention()
    disk: DiskSpace = DiskSpace()
    scrub: Scrub = Scrub()
    catalogue: Catalogues = Catalogues()
    resolver: tuple[Resolver, ...] = Field(default=(), strict=False)
    xa: Xa = Xa()
    relay: Relay | None = None


class Part(BaseModel):
    """The part of the file that another process than the broker reads; the rest is the
    broker's.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Relays(Part):
    """What a relay reads."""

    relay: Relay


class Resolvers(Part):
    """What a resolver reads."""

    resolver: tuple[Resolver, ...] = Field(strict=False, min_length=1)
    checks: Checks = Checks()


class XaRecovery(Part):
    """What a recoverer reads."""

    xa: Xa

    @field_validator("xa")
    @classmethod
    def _has_a_database(cls, xa: Xa) -> Xa:
        if not xa.database:
            raise ValueError("there is no [[xa.database]]")
        return xa


def load(path: Path | None, overrides: dict[str, object]) -> Settings:
    """Settings from a TOML file, if one is given, with `overrides` for [broker] on top
    (the command line's options).

    Raises ConfigError naming the setting, what is wrong with it and where it stands.
    """
    return _overridden(Settings, "broker", path, overrides)


def load_relay(path: Path | None, overrides: dict[str, object]) -> Relay:
    """The settings of a relay, as `load` has those of [broker]."""
    return _overridden(Relays, "relay", path, overrides).relay


def load_resolvers(path: Path) -> Resolvers:
    """What a resolver's own process needs of a TOML file. Raises ConfigError as `load`
    does.
    """
    return _checked(Resolvers, _read(path), path)


def load_xa(path: Path) -> Xa:
    """What a recoverer's own process needs of a TOML file. Raises ConfigError as `load`
    does.
    """
    return _checked(XaRecovery, _read(path), path).xa


def _overridden(model: type[M], name: str, path: Path | None, overrides: dict[str, object]) -> M:
    tree = _read(path) if path is not None else {}
    given = {option: value for option, value in overrides.items() if value is not None}
    if isinstance(section := tree.get(name, {}), dict):
        tree[name] = section | given
    return _checked(model, tree, path, {f"{name}.{option}" for option in given})


def _checked(
    model: type[M], tree: dict[str, Any], path: Path | None, given: Collection[str] = ()
) -> M:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        path_to, why = first_mistake(error, unit="setting")
        where = ".".join(part for part in path_to if part.strip())
        help_of = "relay run" if model is Relays else "broker"
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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            str(path), f"is not TOML: {error}", hint="see txmq/config/broker.py for an example"
        ) from None
