"""`txmq plan`: replay dead letters by plans, which the broker keeps and carries out."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.letter_selection import ChosenLetters
from txmq.cli.options import By, ByForReason, Group, Limit, NextPage, Yes
from txmq.cli.parsers import MessagePlace, parse_duration, parse_name, parse_place
from txmq.cli.plan_options import Canary, InFlight, Most, Rate, StopAfter, StopShare
from txmq.cli.replay_plans import (
    count_applied,
    letter_page,
    new_plan_name,
    plan_letters,
    wait_while,
)
from txmq.cli.rows import with_places
from txmq.client.protocol.plans import ENDED, OUTCOMES, add_calls

app = typer.Typer(
    name="plan",
    no_args_is_help=True,
    help="Replay dead letters by plans of the broker: at a rate, with an outcome for each letter.",
)
CHECKED = ("checked", "would_replay", "edited", "fenced", "out_of_order", "invalid")
COLUMNS = (
    "name", "group", "state", "letters", "processed", "died_again", "skipped", "eta_s", "why",
)  # fmt: skip
LETTER_COLUMNS = ("place", "outcome", "why", "number", "died_as")


def _outcome(text: str) -> str:
    if text not in OUTCOMES:
        raise typer.BadParameter(f"invalid outcome {text!r}: use {', '.join(OUTCOMES)}")
    return text


Plan = Annotated[str, typer.Argument(metavar="PLAN", parser=parse_name, help="Name of the plan.")]


@broker_command(
    app, "create", example="txmq plan create billing -w error:KeyError --name mend --canary 9"
)
def create(  # noqa: PLR0913  # its options
    session: CommandSession,
    group: Group,
    chosen: ChosenLetters,
    *,
    name: Annotated[
        str | None,
        typer.Option(parser=parse_name, metavar="PLAN", help="Name of the plan."),
    ] = None,
    rate: Rate = 100.0,
    ramp: Annotated[
        float,
        typer.Option(
            parser=parse_duration,
            metavar="DURATION",
            help="Time until the rate is reached, as 60s or 5m.",
        ),
    ] = "60s",  # type: ignore[assignment]  # parsed
    canary: Canary = 0,
    pause: Annotated[
        bool, typer.Option("--pause", help="Pause after the canary, until `plan resume`.")
    ] = False,
    stop_share: StopShare = 0.5,
    stop_after: StopAfter = 20,
    in_flight: InFlight = 1_000,
    second_approver: Annotated[
        bool, typer.Option("--second-approver", help="Wait for `plan approve` by somebody else.")
    ] = False,
    most: Most = 0,
    start: Annotated[
        bool, typer.Option("--start", help="Start the plan at once, or when it is approved.")
    ] = False,
    by: By,
) -> None:
    """Make a plan of dead letters, which are fixed from then on. `plan start` begins
    it.
    """
    letters = chosen.args(group)
    if pause and not canary:
        raise typer.BadParameter("--pause is behind a canary: use --canary N, too")
    settings = {
        "rate": rate, "ramp_s": ramp, "canary": canary, "pause": pause, "stop_share": stop_share,
        "stop_after": stop_after, "in_flight": in_flight, "second_approver": second_approver,
        "start": start, "most": most,
    }  # fmt: skip
    signed = by._asdict()
    name = name or new_plan_name(group)
    places = letters.pop("letters", None)
    session.client.call(
        "plan.create", name=name, group=group, settings=settings, **letters, **signed
    )
    refused: list[Any] = []
    for call, its_args in add_calls(name, places):
        more = signed if call == "plan.freeze" else {}
        refused += session.client.call(call, **its_args, **more).get("refused", ())
    shown = wait_while(session, name, lambda plan: plan["state"] == "building")
    session.out.show(shown | {"refused": refused} if refused else shown)


@broker_command(app, "list", example="txmq plan list --all")
def list_(
    session: CommandSession,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Also those that are done or cancelled.")
    ] = False,
) -> None:
    """List the plans that are not finished, or with --all those of the last 30 days."""
    found = session.read_pages("plan.list", "plans")
    plans = found["plans"]
    shown = plans if everything else [plan for plan in plans if plan["state"] not in ENDED]
    session.out.show(found | {"plans": shown}, columns=COLUMNS)
    if hidden := len(plans) - len(shown):
        session.out.print_note(f"finished plans that are not shown: {hidden} (use --all)")
    ended = [plan for plan in plans if plan["state"] in ENDED]
    if pending := sum(plan.get("cleanup_pending", False) for plan in ended):
        session.out.print_note(f"finished plans with a cleanup pending: {pending}")
    if delivered := sum(plan.get("delivered", 0) > 0 for plan in ended):
        session.out.print_note(f"cancelled plans with letters without an outcome: {delivered}")
    if deleting := found.get("deleting", 0):
        session.out.print_note(f"deleted plans that are still being removed: {deleting}")


@broker_command(app, "show", example="txmq plan show mend")
def show(session: CommandSession, plan: Plan) -> None:
    """Show a plan: its state, its letters by outcome, its rate and progress."""
    session.show("plan.show", name=plan)


@broker_command(app, "letters", example="txmq plan letters mend --outcome died_again")
def letters(
    session: CommandSession,
    plan: Plan,
    *,
    outcome: Annotated[
        str | None,
        typer.Option(parser=_outcome, metavar="OUTCOME", help=f"One of {', '.join(OUTCOMES)}."),
    ] = None,
    after: NextPage = None,
    limit: Limit = 100,
) -> None:
    """List letters of a plan, in the order of publication, with what became of each."""
    found: list[Any] = []
    following = after
    while True:
        page = letter_page(session, plan, outcome, following, limit - len(found))
        found += page["letters"]
        following = page["next"]
        if following is None or len(found) == limit:
            break
    if session.out.as_json:
        session.out.show({"letters": found, "next": following})
        return
    session.out.show({"letters": with_places(found)}, columns=LETTER_COLUMNS)
    if following is not None:
        session.out.print_note(f"there may be more: --after {following}")


@broker_command(app, "export", example="txmq plan export mend > mend.jsonl")
def export(session: CommandSession, plan: Plan) -> None:
    """Print each letter of a plan as a line of JSON, with what became of it."""
    for letter in plan_letters(session, plan):
        print(json.dumps(letter))


@broker_command(app, "check", example="txmq plan check mend --dsn postgresql://db/shop")
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
        found["applied"] = count_applied(session, plan, dsn)
    session.out.show(found)


@broker_command(app, "approve", example="txmq plan approve mend")
def approve(session: CommandSession, plan: Plan, *, by: By) -> None:
    """Approve a plan of somebody else."""
    session.show("plan.approve", name=plan, **by._asdict())


@broker_command(app, "start", example="txmq plan start mend")
def start_(session: CommandSession, plan: Plan, *, by: By) -> None:
    """Begin to put the letters of a plan back."""
    session.show("plan.start", name=plan, **by._asdict())


@broker_command(app, "pause", example="txmq plan pause mend")
def pause(session: CommandSession, plan: Plan, *, by: By) -> None:
    """Put no more letters of a plan back, until it is resumed."""
    session.show("plan.pause", name=plan, **by._asdict())


@broker_command(app, "resume", example="txmq plan resume mend")
def resume(session: CommandSession, plan: Plan, *, by: By) -> None:
    """Go on with a paused plan."""
    session.show("plan.resume", name=plan, **by._asdict())


@broker_command(app, "cancel", example="txmq plan cancel mend")
def cancel(session: CommandSession, plan: Plan, *, by: By, yes: Yes = False) -> None:
    """End a plan. What was put back stays put back."""
    session.out.confirm(f"Cancel plan {plan}?", yes=yes)
    session.show("plan.cancel", name=plan, **by._asdict())


@broker_command(app, "abandon", example="txmq plan abandon mend --reason 'orders of a test'")
def abandon(session: CommandSession, plan: Plan, *, by: ByForReason, yes: Yes = False) -> None:
    """Abandon all letters of a plan that was not started: no group will get them. The
    reason is stored with each letter.
    """
    session.out.confirm(f"Abandon the letters of plan {plan}?", yes=yes)
    session.show("plan.abandon", name=plan, **by._asdict())


@broker_command(app, "leave", example="txmq plan leave mend orders/0/17 --reason 'a test order'")
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
    by: ByForReason,
) -> None:
    """Take letters out of a plan that was not started: they stay dead letters. The plan
    shows the reason with each.
    """
    session.show("plan.leave", name=plan, letters=letter, **by._asdict())


@broker_command(app, "delete", example="txmq plan delete mend")
def delete(session: CommandSession, plan: Plan, *, by: By) -> None:
    """Forget a finished plan, and what became of its letters."""
    session.show("plan.delete", name=plan, **by._asdict())
