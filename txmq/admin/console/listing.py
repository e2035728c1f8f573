"""Pages of lists by name, searched for names that have a text in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from txmq.admin.console.page import PageRequest

SCANNED = 500  # rows of one call, where names are sought
MAX_CALLS = 10  # for one page


class Rows(NamedTuple):
    """Rows of a page, and the `after` of the next one. `looked` counts the rows that
    were looked through.
    """

    rows: list[dict[str, Any]]
    following: str | None
    looked: int


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
