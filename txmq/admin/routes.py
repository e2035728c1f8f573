"""Routes from paths below `/api/v1/` to control calls.

HTTP clients can make only the calls in this table, and all of them only read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from txmq.admin.addresses import ANY_NAME, fits, is_whole_number
from txmq.errors import RemoteProtocolError

if TYPE_CHECKING:
    from txmq.admin.http_values import Query

PREFIX = "/api/v1/"
MAX_ROWS = 500  # per reply: the broker's thread reads each dead letter from the log


class ApiRoute(NamedTuple):
    """A call and the sources of its arguments.

    `argument` is the one that the path names, `parameters` parse those of the query,
    and `fixed` never change. The parameters in `selection` become the argument
    `select`.
    """

    call: str
    argument: str = ""
    parameters: Mapping[str, Callable[[str], Any]] = {}
    fixed: Mapping[str, object] = {}
    selection: Mapping[str, Callable[[str], Any]] = {}


class ApiCall(NamedTuple):
    """A call with its arguments, which are not validated yet."""

    call: str
    args: dict[str, object]


def _number(text: str) -> int:
    if not is_whole_number(text):
        raise ValueError(f"invalid number {text[:64]!r}: use decimal digits")
    return int(text)


def _limit(text: str) -> int:
    limit = _number(text)
    if limit > MAX_ROWS:
        raise ValueError(f"invalid limit {limit}: use at most {MAX_ROWS}")
    return limit


PAGE: dict[str, Callable[[str], Any]] = {"after": str, "limit": _limit}
SELECTION: dict[str, Callable[[str], Any]] = {
    "states": lambda text: text.split(","),
    **dict.fromkeys(("topic", "key", "error_type", "fingerprint", "text"), str),
    **dict.fromkeys(("died_from", "died_before", "min_attempts", "max_attempts"), _number),
}
AUDIT: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("operator", "call", "about", "topic"), str),
    **dict.fromkeys(("start", "end", "after"), _number),
    "limit": _limit,
}
ROUTES: dict[tuple[str, ...], ApiRoute] = {
    ("broker",): ApiRoute("broker.show"),
    ("series",): ApiRoute(
        "broker.series", "", {"names": lambda text: text.split(","), "span": str}
    ),
    ("alarms",): ApiRoute("broker.alarms"),
    ("topics",): ApiRoute("topic.list", "", PAGE, {"limit": MAX_ROWS}),
    ("topics", ANY_NAME): ApiRoute("topic.show", "name"),
    ("groups",): ApiRoute("group.list", "", PAGE, {"limit": MAX_ROWS}),
    ("groups", ANY_NAME): ApiRoute("group.show", "group"),
    ("transactions",): ApiRoute("tx.list", "", {"state": str, "limit": _limit}),
    ("transactions", ANY_NAME): ApiRoute(
        "tx.show", "token", {"after": _number, "limit": _limit}, {"detail": True}
    ),
    ("stores",): ApiRoute("recover.list", "", PAGE),
    ("plans",): ApiRoute("plan.list", "", PAGE, {"limit": MAX_ROWS}),
    ("plans", ANY_NAME): ApiRoute("plan.show", "name"),
    ("plans", ANY_NAME, "letters"): ApiRoute(
        "plan.letters", "name", {"outcome": str, "cursor": str, "limit": _limit}, {"limit": 100}
    ),
    ("audit",): ApiRoute("audit.list", "", AUDIT, {"newest": True, "limit": 100}),
    ("policies",): ApiRoute("policy.list", "", PAGE, {"limit": MAX_ROWS}),
    ("letters", ANY_NAME): ApiRoute(
        "dlq.list", "group", {"cursor": str, "limit": _limit}, {"limit": 100}, SELECTION
    ),
    ("letters", ANY_NAME, "stats"): ApiRoute("dlq.stats", "group", selection=SELECTION),
}


def call_of(path: str, query: Query) -> ApiCall | None:
    """Return the call for a path, None where there is none.

    Raises RemoteProtocolError for invalid parameters.
    """
    parts = path.removeprefix(PREFIX).split("/")
    for pattern, route in ROUTES.items():
        if fits(pattern, parts):
            name = {route.argument: unquote(parts[1])} if route.argument else {}
            return ApiCall(route.call, {**route.fixed, **name, **_arguments(route, query)})
    return None


def one_of_each(query: Query, names: Collection[str]) -> dict[str, str]:
    """Return the parameters of a path without a call; raises RemoteProtocolError."""
    found = _arguments(ApiRoute("", "", dict.fromkeys(names, str)), query)
    return {name: str(value) for name, value in found.items()}


def _arguments(route: ApiRoute, query: Query) -> dict[str, object]:
    arguments: dict[str, object] = {}
    selection: dict[str, object] = {}
    for raw, values in query.items():
        name = raw.decode("latin-1")
        parse = route.parameters.get(name) or route.selection.get(name)
        if parse is None or len(values) != 1:
            names = ", ".join((*route.parameters, *route.selection)) or "none"
            raise RemoteProtocolError(
                f"unknown or repeated parameter {name[:64]!r}", hint=f"valid parameters: {names}"
            )
        try:
            value = parse(values[0].decode())
        except ValueError as error:
            raise RemoteProtocolError(
                f"parameter {name}: {error}", hint="correct the parameter"
            ) from error
        (arguments if name in route.parameters else selection)[name] = value
    return arguments | ({"select": selection} if route.selection else {})
