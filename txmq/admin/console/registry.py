"""The table of pages. A path leads to the first page whose pattern fits."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote

from txmq.admin.addresses import ANY_NAME, fits
from txmq.admin.console import (
    audit,
    cluster,
    groups,
    letters,
    overview,
    plans,
    settings,
    topics,
    trace,
    transactions,
    users,
)
from txmq.admin.console.page import Page

PAGES: tuple[Page, ...] = (
    *overview.PAGES,
    *topics.PAGES,
    *groups.PAGES,
    *transactions.PAGES,
    *letters.PAGES,
    *plans.PAGES,
    *trace.PAGES,
    *audit.PAGES,
    *cluster.PAGES,
    *users.PAGES,
    *settings.PAGES,
)
NAVIGATION = tuple(page for page in PAGES if page.nav)
MAX_NAME = 512


class Found(NamedTuple):
    """A page, and the names in its path."""

    page: Page
    names: tuple[str, ...]


def find(path: str) -> Found | None:
    """Return the page at a path, which has no slash in front; None = there is none."""
    parts = path.split("/")
    for page in PAGES:
        pattern = page.path.split("/")
        if fits(pattern, parts):
            try:
                names = tuple(
                    unquote(part, errors="strict")
                    for one, part in zip(pattern, parts, strict=True)
                    if one == ANY_NAME
                )
            except UnicodeDecodeError:
                return None
            return Found(page, names) if all(0 < len(one) <= MAX_NAME for one in names) else None
    return None
