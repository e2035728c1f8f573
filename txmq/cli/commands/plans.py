"""`txmq plan`: replay dead letters by plans, which the broker keeps and carries out."""

from __future__ import annotations

import json
import secrets
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.database import open_database
from txmq.cli.letter_selection import Saved, Where, selection_args
from txmq.cli.options import Group, Operator, Reason, Yes
from txmq.cli.parsers import MessagePlace, parse_name, parse_place, parse_span
from txmq.cli.rows import with_places
from txmq.crashpoints import crashpoint
from txmq.tx.postgres.blocking import applied

app = typer.Typer(
    no_args_is_help=True,
    help="Replay dead letters by plans: frozen, at a rate, watched, with an outcome per letter.",
)
PER_CALL = 1_000  # the limit of the broker
POLL_S = 0.05
AT_ONCE = {"rate": 0, "ramp_s": 0, "in_flight": 0, "stop_after": 0, "start": True}
MAX_OFFSET = 1 << 63
FINISHED = ("done", "cancelled")
CHECKED = ("checked", "would_replay", "edited", "fenced", "out_of_order", "invalid")
OUTCOMES = ("planned", "delivered", "processed", "died_again", "skipped", "ended")
COLUMNS = (
    "name", "group", "state", "letters", "processed", "died_again", "skipped", "eta_s", "why",
)  # fmt: skip
LETTER_COLUMNS = ("place", "outcome", "why", "number", "died_as")


def _outcome(text: str) -> str:
    if text not in OUTCOMES:
        raise typer.BadParameter(f"invalid outcome {text!r}: use {', '.join(OUTCOMES)}")
    return text


Plan = Annotated[str, typer.Argument(metavar="PLAN", parser=parse_name, help="Name of the plan.")]
Places = Annotated[
    list[MessagePlace] | None,
    typer.Argument(
        parser=parse_place, metavar="TOPIC/PARTITION/OFFSET", help="Places of the dead letters."
    ),
]


@broker_command(app, "create")
def create(  # noqa: PLR0913  # its options
    session: CommandSession,
    group: Group,
    letter: Places = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="All open dead letters of the group.")
    ] = False,
    where: Where = None,
    select: Saved = None,
    name: Annotated[
        str | None,
        typer.Option(parser=parse_name, metavar="PLAN", help="Name of the plan."),
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0, help="Letters per second; 0 = as fast as the broker can.")
    ] = 100.0,
    ramp: Annotated[
        float,
        typer.Option(
            parser=parse_span, metavar="SPAN", help="Time until the rate is reached, as 60s."
        ),
    ] = "60s",  # type: ignore[assignment]  # parsed
    canary: Annotated[
        int, typer.Option(min=0, help="So many letters are put back and watched first.")
    ] = 0,
    hold: Annotated[
        bool, typer.Option("--hold", help="Wait for `plan resume` behind the canary.")
    ] = False,
    stop_share: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Pause if more than this share fails again with one fingerprint."
        ),
    ] = 0.5,
    stop_after: Annotated[
        int, typer.Option(min=0, max=100, help="Outcomes that are judged; 0 = never pause.")
    ] = 20,
    in_flight: Annotated[
        int, typer.Option(min=0, help="Most letters without an outcome; 0 = any number.")
    ] = 1_000,
    second_approver: Annotated[
        bool, typer.Option("--second-approver", help="Somebody else has to approve it first.")
    ] = False,
    most: Annotated[int, typer.Option(min=0, help="Most letters; 0 = any number.")] = 0,
    start: Annotated[bool, typer.Option("--start", help="Start it as soon as it may.")] = False,
    operator: Operator,
    reason: Reason = "",
) -> None:
    """Make a plan of dead letters, and freeze it. It begins with `plan start`."""
    ways = bool(letter) + everything + (bool(where) or select is not None)
    if ways != 1:
        raise typer.BadParameter(
            "select the letters: use either TOPIC/PARTITION/OFFSET, --all, --where or --select"
        )
    if hold and not canary:
        raise typer.BadParameter("--hold waits behind a canary: use --canary N, too")
    settings = {
        "rate": rate, "ramp_s": ramp, "canary": canary, "hold": hold, "stop_share": stop_share,
        "stop_after": stop_after, "in_flight": in_flight, "second_approver": second_approver,
        "start": start, "most": most,
    }  # fmt: skip
    chosen = {} if letter else selection_args(where, select)
    by = {"operator": operator, "reason": reason}
    name = name or new_name(group)
    session.client.call("plan.create", name=name, group=group, settings=settings, **chosen, **by)
    refused: list[Any] = []
    places = letter or []
    for at in range(0, len(places), PER_CALL):
        reply = session.client.call("plan.add", name=name, letters=places[at : at + PER_CALL])
        refused += reply["refused"]
    if letter:
        session.client.call("plan.freeze", name=name, **by)
    shown = wait_while(session, name, lambda plan: plan["state"] == "building")
    session.out.show(shown | {"refused": refused} if refused else shown)


@broker_command(app, "list")
def list_(
    session: CommandSession,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Also those that are done or cancelled.")
    ] = False,
) -> None:
    """List the plans that are not finished, or with --all those of the last 30 days."""
    found = session.every("plan.list", "plans")
    plans = found["plans"]
    shown = plans if everything else [plan for plan in plans if plan["state"] not in FINISHED]
    session.out.show(found | {"plans": shown}, columns=COLUMNS)
    if len(shown) < len(plans) and not session.out.as_json:
        hidden = len(plans) - len(shown)
        print(f"{hidden} finished plans are not shown: use --all", file=sys.stderr)


@broker_command(app, "show")
def show(session: CommandSession, plan: Plan) -> None:
    """Show a plan: its state, its letters by outcome, its rate and progress."""
    session.show("plan.show", name=plan)


@broker_command(app, "letters")
def letters(
    session: CommandSession,
    plan: Plan,
    *,
    outcome: Annotated[
        str | None,
        typer.Option(parser=_outcome, metavar="OUTCOME", help=f"One of {', '.join(OUTCOMES)}."),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(metavar="NEXT", help="Start here: `next` of the previous page."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of letters.")] = 100,
) -> None:
    """List letters of a plan, in the order of publication, with what became of each."""
    found: list[Any] = []
    following = after
    while True:
        page = _page(session, plan, outcome, following, limit - len(found))
        found += page["letters"]
        following = page["next"]
        if following is None or len(found) == limit:
            break
    if session.out.as_json:
        session.out.show({"letters": found, "next": following})
        return
    session.out.show({"letters": with_places(found)}, columns=LETTER_COLUMNS)
    if following is not None:
        print(f"there may be more: --after {following}")


@broker_command(app, "export")
def export(session: CommandSession, plan: Plan) -> None:
    """Print each letter of a plan as a line of JSON, with what became of it."""
    for one in each_letter(session, plan):
        print(json.dumps(one))


@broker_command(app, "check")
def check(
    session: CommandSession,
    plan: Plan,
    *,
    dsn: Annotated[
        str | None,
        typer.Option(
            envvar="TXMQ_DSN",
            metavar="DSN",
            help="Database with the group's inbox: count what it has applied already.",
        ),
    ] = None,
) -> None:
    """Tell what a plan would do now, without doing it: a dry run."""
    found: dict[str, Any] = {"plan": plan} | dict.fromkeys(CHECKED, 0)
    reasons, mistakes = Counter[str](), Counter[str]()
    more: dict[str, Any] = {}
    while True:
        page = session.client.call("plan.check", name=plan, **more)
        for name in CHECKED:
            found[name] += page.get(name, 0)
        reasons.update(page["would_skip"])
        mistakes.update(page.get("schema_mistakes", {}))
        if page["next"] is None:
            break
        more = {"cursor": page["next"]}
    found |= {"would_skip": dict(reasons), "schema_mistakes": dict(mistakes)}
    if dsn is not None:
        found["applied"] = _applied(session, plan, dsn)
    session.out.show(found)


@broker_command(app, "approve")
def approve(
    session: CommandSession, plan: Plan, *, operator: Operator, reason: Reason = ""
) -> None:
    """Approve a plan of somebody else."""
    session.show("plan.approve", name=plan, operator=operator, reason=reason)


@broker_command(app, "start")
def start_(session: CommandSession, plan: Plan, *, operator: Operator, reason: Reason = "") -> None:
    """Begin to put the letters of a plan back."""
    session.show("plan.start", name=plan, operator=operator, reason=reason)


@broker_command(app, "pause")
def pause(session: CommandSession, plan: Plan, *, operator: Operator, reason: Reason = "") -> None:
    """Put no more letters of a plan back, until it is resumed."""
    session.show("plan.pause", name=plan, operator=operator, reason=reason)


@broker_command(app, "resume")
def resume(session: CommandSession, plan: Plan, *, operator: Operator, reason: Reason = "") -> None:
    """Go on with a paused plan."""
    session.show("plan.resume", name=plan, operator=operator, reason=reason)


@broker_command(app, "cancel")
def cancel(
    session: CommandSession,
    plan: Plan,
    *,
    operator: Operator,
    reason: Reason = "",
    yes: Yes = False,
) -> None:
    """End a plan. What was put back stays put back."""
    session.out.confirm(f"Cancel plan {plan}?", yes=yes)
    session.show("plan.cancel", name=plan, operator=operator, reason=reason)


@broker_command(app, "abandon")
def abandon(
    session: CommandSession,
    plan: Plan,
    *,
    operator: Operator,
    reason: Annotated[str, typer.Option("--reason", help="Stored with each letter.")],
    yes: Yes = False,
) -> None:
    """Abandon all letters of a plan that was not started: no group will get them."""
    session.out.confirm(f"Abandon the letters of plan {plan}?", yes=yes)
    session.show("plan.abandon", name=plan, operator=operator, reason=reason)


@broker_command(app, "leave")
def leave(
    session: CommandSession,
    plan: Plan,
    letter: Annotated[
        list[MessagePlace],
        typer.Argument(
            parser=parse_place, metavar="TOPIC/PARTITION/OFFSET", help="Places of the dead letters."
        ),
    ],
    *,
    operator: Operator,
    reason: Annotated[str, typer.Option("--reason", help="Shown with each letter of the plan.")],
) -> None:
    """Take letters out of a plan that was not started: they stay dead letters."""
    session.show("plan.leave", name=plan, letters=letter, operator=operator, reason=reason)


@broker_command(app, "delete")
def delete(session: CommandSession, plan: Plan, *, operator: Operator, reason: Reason = "") -> None:
    """Forget a finished plan, and what became of its letters."""
    session.show("plan.delete", name=plan, operator=operator, reason=reason)


def replay_all(session: CommandSession, group: str, operator: str, reason: str) -> dict[str, Any]:
    """Replay all open letters of a group by a plan, and follow it until the last one
    is put back. Return the letters, and those that were not, with the reason.
    """
    name = new_name(group)
    session.client.call(
        "plan.create", name=name, group=group, select={}, settings=AT_ONCE, operator=operator,
        reason=reason,
    )  # fmt: skip
    crashpoint("plan.after_create")
    ended = wait_while(session, name, _puts_back)
    done: list[Any] = []
    refused: list[Any] = []
    for one in each_letter(session, name):
        place = [one["topic"], one["partition"], one["offset"]]
        if one["outcome"] in ("skipped", "planned"):
            why = one["why"] or f"the plan is {ended['state']}: {ended['why']}"
            fields = ("topic", "partition", "offset")
            refused.append(dict(zip(fields, place, strict=True)) | {"why": why})
        else:
            done.append(place)
    return {"plan": name, "done": done, "refused": refused}


def _puts_back(plan: dict[str, Any]) -> bool:
    if plan["state"] in ("building", "planned"):
        return True
    return plan["state"] in ("canary", "ramping") and plan["planned"] > 0


def new_name(group: str) -> str:
    """Return a name for a plan of this group that nobody else has."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"{group[:100].replace('@', '-')}-{stamp}-{secrets.token_hex(2)}"


def each_letter(
    session: CommandSession, plan: str, outcome: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the letters of a plan, page by page."""
    following: str | None = None
    while True:
        page = _page(session, plan, outcome, following, PER_CALL)
        yield from page["letters"]
        following = page["next"]
        if following is None:
            return


def wait_while(
    session: CommandSession, name: str, goes_on: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Return a plan once this does not hold any more. The broker does the work: a
    command that ends meanwhile leaves it to that.
    """
    while goes_on(shown := _plan(session, name)):
        time.sleep(POLL_S)
    return shown


def _page(
    session: CommandSession, plan: str, outcome: str | None, after: str | None, limit: int
) -> dict[str, Any]:
    return session.client.call(
        "plan.letters", name=plan, outcome=outcome, cursor=after, limit=limit
    )


def _plan(session: CommandSession, name: str) -> dict[str, Any]:
    return session.client.call("plan.show", name=name)


def _applied(session: CommandSession, plan: str, dsn: str) -> int:
    """Return how many letters that are not put back yet an inbox has applied."""
    from txmq.tx.postgres.inbox import Position

    group = _plan(session, plan)["group"]
    log_id = session.client.call("broker.show")["log_id"]
    places = {
        (place["topic"], place["partition"]): place
        for place in session.client.call("group.show", group=group)["positions"]
    }
    known: dict[Position, Sequence[tuple[int, int]]] = {}
    count = 0
    with open_database(dsn, "plan") as connection:
        for one in each_letter(session, plan, "planned"):
            place = places.get((one["topic"], one["partition"]))
            if place is None:
                continue
            offset = one["offset"]
            epoch = [epoch for start, epoch in place["epochs"] if start <= offset][-1]
            position = Position(group, log_id, place["topic_id"], one["partition"], epoch)
            if position not in known:
                known[position] = applied(connection, position).ranges
            ranges = known[position]
            at = bisect_right(ranges, (offset, MAX_OFFSET)) - 1
            count += at >= 0 and ranges[at][0] <= offset < ranges[at][1]
    return count
