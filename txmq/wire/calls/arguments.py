"""Building blocks of the arguments of control calls."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, PrivateAttr, StringConstraints

from txmq.model import limits
from txmq.model.message import is_name
from txmq.wire.json import WireModel

Text = Annotated[str, StringConstraints(max_length=4_096)]
Reason = Annotated[str, StringConstraints(min_length=1, max_length=4_096)]
Limit = Annotated[int, Field(ge=1, le=10_000)]


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError(
            f"invalid name: use 1 to {limits.NAME} letters, digits and . _ -, not a dot first"
        )
    return text


def _token(text: str) -> str:
    if TOKEN.fullmatch(text) is None:
        raise ValueError("invalid token: use 32 hexadecimal digits, or a UUID")
    return text.replace("-", "").lower()


TOKEN = re.compile(r"[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
Token = Annotated[str, AfterValidator(_token)]
Name = Annotated[str, AfterValidator(_name)]


class Args(WireModel):
    """Arguments of a call.

    There are many kinds, and one process checks few: each builds its validator at its
    first use.
    """

    model_config = ConfigDict(defer_build=True)
    # the edge of the broker that made the call, "" = a client; for the audit topic
    _via: str = PrivateAttr("")

    @property
    def via(self) -> str:
        """Return the edge of the broker that made the call, "" = a client."""
        return self._via

    @property
    def judges_bodies(self) -> bool:
        """Return True if the outcome tells of bodies, even where it shows none."""
        return False

    def come_by(self, via: str) -> None:
        """Say which edge of the broker makes the call."""
        self._via = via


class NoArgs(Args):
    """Arguments of a call that takes none."""


class ClockConfirm(Args):
    """An operator's word that the clock of the broker's machine is right.

    `force`: though the clocks of databases say otherwise.
    """

    operator: Name
    reason: Reason
    force: bool = False


class StepDown(Args):
    """An operator's word that another node of the cluster is to lead.

    `force`: though none is known to follow.
    """

    operator: Name | None = None
    reason: Text = ""
    force: bool = False


def _addresses(text: str) -> str:
    found = [ADDRESS.fullmatch(part) for part in text.split(",")]
    if all(one is not None and 0 < int(one[1]) < 1 << 16 for one in found):
        return text
    raise ValueError("invalid addresses: use HOST:PORT, or several with commas")


ADDRESS = re.compile(
    r"(?:[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})"
)
Addresses = Annotated[str, StringConstraints(max_length=1_500), AfterValidator(_addresses)]


class LogAt(WireModel):
    """A log, and where clients find it."""

    log_id: Token
    addresses: Addresses


class ListedLogArgs(LogAt):
    """A log as it is listed."""

    keys_from: Annotated[int, Field(ge=0)]
    keys_to: Annotated[int, Field(ge=0)] = 0


class AddLogs(Args):
    """Logs that an operator adds to the list that the broker's log keeps."""

    logs: Annotated[tuple[LogAt, ...], Field(min_length=1, max_length=16)]
    together: bool = False
    moved: bool = False
    operator: Name | None = None
    reason: Text = ""


class ChangeLog(Args):
    """An operator's word that a listed log is to be drained, or removed."""

    log_id: Token
    operator: Name | None = None
    reason: Text = ""


class CopyLogs(Args):
    """The list that the first of its logs keeps, for another one of them."""

    version: Annotated[int, Field(ge=1)]
    logs: Annotated[tuple[ListedLogArgs, ...], Field(min_length=1, max_length=16)]
    operator: Name | None = None
    reason: Text = ""


class ListArgs(Args):
    """A page of a list by name: at most `limit` entries behind the name `after`.
    Without a limit it is the whole list, if that fits in a reply.
    """

    after: Text = ""
    limit: Limit | None = None


class SeriesArgs(Args):
    """Series of numbers by name, of the last hour or the last day."""

    names: Annotated[tuple[Text, ...], Field(max_length=100)] = ()
    span: Literal["hour", "day"] = "hour"


class StatsArgs(Args):
    """Statistics; `limit` topics and groups, the busiest first."""

    limit: Limit = 100
