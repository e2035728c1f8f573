"""Pages of users, and of the reader's own permissions."""

from __future__ import annotations

from txmq.admin.console.listing import by_name
from txmq.admin.console.page import Page, Reader, Refused, View
from txmq.model.access import ALL_VERBS, KINDS, ROLES, VERBS

# fields of a quota, as people read them
LIMITS = {
    "bytes_per_s": "Bytes per second",
    "requests_per_s": "Requests per second",
    "topics": "Topics that the user has made",
    "undecided": "Undecided transactions",
    "connections": "Connections",
}


async def users(reader: Reader) -> View:
    """List the users."""
    found = await by_name(reader, "user.list", "users", "user")
    return View("users.html", {"found": found, "me": reader.user})


async def user(reader: Reader) -> View:
    """Show a user's roles and grants."""
    [name] = reader.names
    reply = await reader.ask("user.list", name=name)
    row = next(iter(reply["users"]), None)
    if row is None:
        raise Refused("UnknownUser", f"there is no user {name!r}", "txmq user list")
    grants = [(text, *text.rpartition(" ")[::2]) for text in row["grants"]]
    return View(
        "user.html",
        {
            "row": row,
            "grants": grants,
            "roles": ROLES,
            "verbs": (*ALL_VERBS, *ROLES),
            "limits": LIMITS,
        },
    )


async def me(reader: Reader) -> View:
    """Show who the reader is, and what the reader may do."""
    shown = await reader.ask("user.me")
    has = set(shown["permissions"])
    table = [
        (
            kind,
            [(verb, f"{verb} {kind}" in has or f"{verb} {kind}:*" in has) for verb in VERBS[kind]],
        )
        for kind in KINDS
    ]
    return View("me.html", {"shown": shown, "table": table})


PAGES = (
    Page("users", "Users", users, "Users", "u"),
    Page("users/*", "User", user),
    Page("me", "My permissions", me, "My permissions", "m", live=False),
)
