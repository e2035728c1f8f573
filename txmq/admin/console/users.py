"""Pages of users, and of the viewer's own permissions."""

from __future__ import annotations

from txmq.admin.console.fields import QUOTA
from txmq.admin.console.listing import by_name
from txmq.admin.console.page import Page, PageRequest, Refused, View
from txmq.admin.console.words import in_words
from txmq.model.access import ALL_VERBS, KINDS, ROLES, VERBS


async def users(request: PageRequest) -> View:
    """List the users."""
    found = await by_name(request, "user.list", "users", "user")
    return View("users.html", {"found": found, "me": request.user, "roles": ROLES})


async def user(request: PageRequest) -> View:
    """Show a user's roles and grants."""
    [name] = request.names
    reply = await request.ask("user.list", name=name)
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
            "kinds": KINDS,
            "limits": {one.name: one.label for one in QUOTA},
            "now": {key: in_words(value, key) for key, value in (row["quota"] or {}).items()},
        },
    )


async def me(request: PageRequest) -> View:
    """Show who the viewer is, and what the viewer may do."""
    shown = await request.ask("user.me")
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
    Page("users", "Users", users, "Users", "u", needs="user.list"),
    Page("users/*", "User", user),
    Page("me", "My permissions", me, "My permissions", "m", live=False),
)
