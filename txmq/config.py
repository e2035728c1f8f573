"""Settings of a broker: one TOML file, checked before anything is opened.

    [broker]
    data = "/var/lib/txmq"
    listen = "127.0.0.1:7650"
    flush = "sync"                       # or: flush = { every_ms = 10, messages = 1000 }

    [[resolver]]
    name = "shop"
    dsn = "postgresql://txmq@db/shop"

Nothing here is read by the rules in `broker/core` when an event is applied: settings steer decisions, the log holds outcomes.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from txmq.errors import ConfigError

MIB = 1 << 20
PositiveInt = Annotated[int, Field(gt=0)]


class Model(BaseModel):
    """Strict, frozen, and nothing unknown: a misspelt setting is an error, not a default."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class FlushEvery(Model):
    """Asynchronous flush: plain sends are answered before they are on disk; at most this much can be lost with the power.

    MetaQ's default was 1,000 messages or 10 s.
    """

    every_ms: PositiveInt = 10
    messages: PositiveInt = 1_000


class Resolver(Model):
    """A database whose token rows decide half messages; only databases named here are ever asked."""

    name: str
    dsn: str
    end_backend_after_s: PositiveInt | None = None  # end a backend that keeps a transaction open for so long; None = never


class Consumers(Model):
    """Defaults of consumer groups (RocketMQ's lease and session, FEATURES (c))."""

    lease_s: PositiveInt = 60
    session_s: PositiveInt = 10
    lost_connection_grace_s: float = Field(default=1.0, ge=0)


class Checks(Model):
    """When undecided transactions are asked about: first, then after `then_s`, growing to `longest_s` (RocketMQ: 6 s, 30 s)."""

    first_s: float = Field(default=6.0, gt=0)
    then_s: float = Field(default=30.0, gt=0)
    longest_s: float = Field(default=600.0, gt=0)
    in_doubt_after: PositiveInt = 15


class Broker(Model):
    """The broker itself."""

    data: Path = Field(strict=False)
    name: str = "broker-1"
    listen: str = "127.0.0.1:7650"
    http: str | None = None
    flush: Literal["sync"] | FlushEvery = "sync"
    segment_bytes: int = Field(default=1 << 30, ge=MIB)
    preallocate_bytes: int = Field(default=16 * MIB, ge=4_096)
    create_topics: bool = True
    partitions: int = Field(default=8, ge=1, le=4_096)  # of a topic created on first use (RocketMQ: 8)
    snapshot_bytes: int = Field(default=256 * MIB, ge=MIB)  # of log between two snapshots
    index_ms: PositiveInt = 1_000  # how far the tables on disk may lag behind the log
    index_rows: PositiveInt = 50_000


class Settings(Model):
    """The whole file."""

    broker: Broker
    consumers: Consumers = Consumers()
    checks: Checks = Checks()
    resolver: tuple[Resolver, ...] = Field(default=(), strict=False)


def load(path: Path | None, overrides: dict[str, object]) -> Settings:
    """Settings from a TOML file, if one is given, with `overrides` for [broker] on top (the command line's options).

    Raises ConfigError naming the setting, what is wrong with it and where it stands.
    """
    tree = _read(path) if path is not None else {}
    given = {name: value for name, value in overrides.items() if value is not None}
    tree["broker"] = {**tree.get("broker", {}), **given}
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        hint = f"in {path}" if path is not None else "see txmq broker --help"
        raise ConfigError(where, first["msg"], hint=hint) from None


def _read(path: Path) -> dict[str, dict[str, object]]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}", hint="give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not TOML: {error}", hint="see txmq/config.py for an example") from None
