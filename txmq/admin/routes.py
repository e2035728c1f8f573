"""Which path of `/api/v1/` is which control call. Calls that are not here cannot be
made over HTTP: these only read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from txmq.errors import RemoteProtocolError

if TYPE_CHECKING:
    from txmq.admin.http import Query

PREFIX = "/api/v1/"
NAME = "*"
MOST_ROWS = 500  # of one answer: each dead letter is read from the log, on the broker's own thread


class Route(NamedTuple):
    """A call; `argument` is what a name in the path stands for, `parameters` read those
    of the query, `fixed` are always the same.
    """

    call: str
    argument: str = ""
    parameters: Mapping[str, Callable[[str], Any]] = {}
    fixed: Mapping[str, object] = {}


class Asked(NamedTuple):
    """A call with its arguments, still unchecked."""

    call: str
    args: dict[str, object]


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"{text[:64]!r} is no number")
    return int(text)


def _limit(text: str) -> int:
    limit = _number(text)
    if limit > MOST_ROWS:
        raise ValueError(f"at most {MOST_ROWS} at once")
    return limit


ROUTES: dict[tuple[str, ...], Route] = {
    ("broker",): Route("broker.show"),
    ("alarms",): Route("broker.alarms"),
    ("topics",): Route("topic.list"),
    ("topics", NAME): Route("topic.show", "name"),
    ("groups",): Route("group.list"),
    ("groups", NAME): Route("group.show", "group"),
    ("transactions",): Route("tx.list", "", {"state": str, "limit": _limit}),
    ("transactions", NAME): Route(
        "tx.show", "token", {"after": _number, "limit": _limit}, {"detail": True}
    ),
    ("letters", NAME): Route("dlq.list", "group", {"after": _number, "limit": _limit}),
    ("letters", NAME, "stats"): Route("dlq.stats", "group"),
}


def call_of(path: str, query: Query) -> Asked | None:
    """The call that a path stands for, None = none. Raises RemoteProtocolError for
    parameters that are not its.
    """
    parts = path.removeprefix(PREFIX).split("/")
    for pattern, route in ROUTES.items():
        if len(pattern) == len(parts) and all(
            p in (NAME, part) for p, part in zip(pattern, parts, strict=True)
        ):
            name = {route.argument: unquote(parts[1])} if route.argument else {}
            return Asked(route.call, {**route.fixed, **name, **_arguments(route, query)})
    return None


def _arguments(route: Route, query: Query) -> dict[str, object]:
    arguments: dict[str, object] = {}
    for raw, values in query.items():
        name = raw.decode("latin-1")
        read = route.parameters.get(name)
        if read is None or len(values) != 1:
            known = ", ".join(route.parameters) or "none"
            raise RemoteProtocolError(
                f"no parameter {name[:64]!r} here, or twice", hint=f"there are: {known}"
            )
        try:
            arguments[name] = read(values[0].decode())
        except ValueError as error:
            raise RemoteProtocolError(f"parameter {name}: {error}") from error
    return arguments
