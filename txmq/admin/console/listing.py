"""Searches of pages: for names that have a text in them, and for contents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.admin.console.page import Refused
from txmq.errors import LocalProtocolError
from txmq.model.content import body_criterion, parse_header
from txmq.model.units import MILLISECOND

if TYPE_CHECKING:
    from txmq.admin.console.page import PageRequest

SCANNED = 500  # rows of one call, where names are sought
MAX_CALLS = 10  # for one page
MAX_SCANS = 8  # calls for one page of a search that finds few
SCAN = 250 * MILLISECOND  # after which a page has what was found, and goes on behind it


class Rows(NamedTuple):
    """Rows of a page, and the `after` of the next one. `looked` counts the rows that
    were looked through.
    """

    rows: list[dict[str, Any]]
    following: str | None
    looked: int


def content_criteria(request: PageRequest) -> dict[str, Any]:
    """Return the criteria `body` and `header` of messages that a form has. Raises
    Refused.
    """
    body, header = (request.text(name) or None for name in ("body", "header"))
    try:
        if body is not None:
            body_criterion(body)
        return {"body": body, "header": None if header is None else parse_header(header)}
    except LocalProtocolError as error:
        raise Refused("BadRequest", error.message, error.hint, 400) from None


async def by_name(request: PageRequest, call: str, field: str, name: str, **args: object) -> Rows:
    """Return a page of the list that `call` gives in `field`, by the query's `q`.

    A text that is rare in a long list may need further pages: a page looks through at
    most `SCANNED` * `MAX_CALLS` rows.
    """
    sought, after = request.text("q").lower(), request.text("after")
    limit, found, looked = request.limit, list[dict[str, Any]](), 0
    for _ in range(MAX_CALLS):
        most = SCANNED if sought else limit
        reply = await request.ask(call, after=after, limit=most, **args)
        for row in reply[field]:
            looked += 1
            if sought in row[name].lower():
                found.append(row)
                if len(found) == limit:
                    last = row is reply[field][-1] and reply["next"] is None
                    return Rows(found, None if last else row[name], looked)
        after = reply["next"] or ""
        if not after:
            return Rows(found, None, looked)
    return Rows(found, after, looked)
