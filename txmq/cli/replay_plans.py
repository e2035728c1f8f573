"""Replay plans at the broker: their letters, page by page, and waits for states."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from txmq.cli.database import open_database
from txmq.client.protocol.plans import PAGE
from txmq.crashpoints import crashpoint

if TYPE_CHECKING:
    from txmq.cli.command import CommandSession
    from txmq.cli.options import By
    from txmq.tx.postgres.inbox import AppliedRanges, Position

POLL_S = 0.05
AT_ONCE = {"rate": 0, "ramp_s": 0, "in_flight": 0, "stop_after": 0, "start": True}
LONGEST_PREFIX = 100  # characters of a group in the name of its plan, which is bounded


def replay_all(session: CommandSession, group: str, by: By) -> dict[str, Any]:
    """Replay all open letters of a group by a plan, and wait until the last one is put
    back. Return the letters, and those that were not put back, with the reason.
    """
    name = new_plan_name(group)
    session.client.call(
        "plan.create", name=name, group=group, select={}, settings=AT_ONCE, **by._asdict()
    )
    crashpoint("plan.after_create")
    ended = wait_while(session, name, _puts_back)
    done: list[Any] = []
    refused: list[Any] = []
    for letter in plan_letters(session, name):
        place = {field: letter[field] for field in ("topic", "partition", "offset")}
        if letter["outcome"] in ("skipped", "planned"):
            why = letter["why"] or f"the plan is {ended['state']}: {ended['why']}"
            refused.append(place | {"why": why})
        else:
            done.append([*place.values()])
    return {"plan": name, "done": done, "refused": refused}


def _puts_back(plan: dict[str, Any]) -> bool:
    if plan["state"] in ("building", "planned"):
        return True
    return plan["state"] in ("canary", "ramping") and plan["planned"] > 0


def new_plan_name(group: str) -> str:
    """Return a name for a plan of this group that no other plan has."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"{group[:LONGEST_PREFIX].replace('@', '-')}-{stamp}-{secrets.token_hex(2)}"


def wait_while(
    session: CommandSession, name: str, goes_on: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Return a plan once `goes_on` is false for it.

    The broker does the work: it goes on if the command ends meanwhile.
    """
    while goes_on(shown := session.client.call("plan.show", name=name)):
        time.sleep(POLL_S)
    return shown


def plan_letters(
    session: CommandSession, name: str, outcome: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the letters of a plan, page by page."""
    following: str | None = None
    while True:
        page = letter_page(session, name, outcome, following, PAGE)
        yield from page["letters"]
        following = page["next"]
        if following is None:
            return


def letter_page(
    session: CommandSession, name: str, outcome: str | None, after: str | None, limit: int
) -> dict[str, Any]:
    """Return a page of a plan's letters. A page may be short and not be the last."""
    return session.client.call(
        "plan.letters", name=name, outcome=outcome, cursor=after, limit=limit
    )


def count_applied(session: CommandSession, name: str, dsn: str) -> int:
    """Return how many letters that a plan has not put back an inbox has applied."""
    from txmq.tx.postgres.blocking import applied
    from txmq.tx.postgres.inbox import Position

    group = session.client.call("plan.show", name=name)["group"]
    log_id = session.client.call("broker.show")["log_id"]
    places = {
        (place["topic"], place["partition"]): place
        for place in session.client.call("group.show", group=group)["positions"]
    }
    known: dict[Position, AppliedRanges] = {}
    count = 0
    with open_database(dsn, "plan") as connection:
        for letter in plan_letters(session, name, "planned"):
            place = places.get((letter["topic"], letter["partition"]))
            if place is None:
                continue
            offset = letter["offset"]
            epoch = [epoch for start, epoch in place["epochs"] if start <= offset][-1]
            position = Position(group, log_id, place["topic_id"], letter["partition"], epoch)
            if position not in known:
                known[position] = applied(connection, position)
            count += known[position].covers(offset)
    return count
