"""Pages of lists by name."""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING, NamedTuple

from txmq.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from txmq.wire.calls.arguments import ListArgs

MAX_WHOLE = 50_000  # entries of a list without pages, of about 100 bytes each


class Page(NamedTuple):
    """The names of a page, and the `after` of the next one; None = this is the last."""

    names: Sequence[str]
    following: str | None


def page_of(known: Iterable[str], args: ListArgs, what: str) -> Page:
    """Return the page that a call asks for."""
    after, limit = args.after, args.limit
    wanted = (name for name in known if name > after) if after else known
    if limit is not None:
        some = nsmallest(limit + 1, wanted)  # no list of 100,000 is sorted for 50 names
        return Page(some[:limit], some[limit - 1] if len(some) > limit else None)
    names = sorted(wanted)
    if len(names) > MAX_WHOLE:
        raise BadRequest(
            f"there are {len(names)} {what}: too many for one reply",
            hint="ask for pages, with after and limit; a newer txmq does so by itself",
        )
    return Page(names, None)
