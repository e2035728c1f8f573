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
