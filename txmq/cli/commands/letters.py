"""`txmq dlq`: list, count, edit, replay and abandon dead letters."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.commands.audit import brief_entries
from txmq.cli.commands.letter_edits import Letter, diff_lines, edit, version_of
from txmq.cli.commands.letter_files import export, import_
from txmq.cli.commands.letter_trials import try_
from txmq.cli.letter_selection import (
    ChosenLetters,
    Selected,
    Where,
    parse_selection,
)
from txmq.cli.options import By, ByForReason, Group, Limit, NextPage, Operator, Yes
from txmq.cli.output import FAILED, Output
from txmq.cli.parsers import parse_name
from txmq.cli.replay_plans import replay_all
from txmq.cli.rows import with_decoded_body, with_places
from txmq.client.protocol.calls import calls_by
from txmq.client.protocol.letter_changes import change_portions, portions_of
from txmq.client.protocol.life_events import what_is_known
from txmq.client.protocol.lives import deliveries_of_letter
from txmq.faces import run
from txmq.model.letter_filter import RETRIED, format_filter
from txmq.model.measures import counted
from txmq.model.tracebacks import last_line

app = typer.Typer(
    name="dlq", no_args_is_help=True, help="List, count, edit, replay and abandon dead letters."
)
selections = typer.Typer(
    name="select", no_args_is_help=True, help="Keep selections of dead letters by name."
)
app.add_typer(selections)
broker_command(
    app, "edit", example="txmq dlq edit billing orders/0/17 --editor --reason 'wrong currency'"
)(edit)
broker_command(app, "export", example="txmq dlq export billing --file billing.letters --mark")(
    export
)
broker_command(app, "import", example="txmq dlq import billing.letters --to repair")(import_)
broker_command(app, "try", example="txmq dlq try billing orders/0/17 --member billing-1")(try_)
COLUMNS = (
    "place",
    "key",
    "state",
    "attempts",
    "error_type",
    "error_text",
    "dead_at",
    "next_at",
    "held_by",
    "damaged",
    "body",
    "body_base64",
)
OPTIONAL = ("dead_at", "next_at", "held_by")  # columns that are shown where any row has a value
# in the table `fingerprints`, or too long for a terminal
ONLY_IN_JSON = ("by_fingerprint", "group", "replayed")

Body = Annotated[bool, typer.Option("--bodies", "--body", help="Include bodies of messages.")]
Version = Annotated[
    int | None, typer.Option(min=0, help="Version of the message, 0 = what was published.")
]
Diff = Annotated[bool, typer.Option("--diff", help="Show what was changed, bodies included.")]
SelectionName = Annotated[
    str, typer.Argument(metavar="NAME", parser=parse_name, help="Name of the selection.")
]


@broker_command(app, "list", example="txmq dlq list billing --where 'error:ValueError age>1h'")
def list_(
    session: CommandSession,
    group: Group,
    *,
    selected: Selected,
    after: NextPage = None,
    limit: Limit = 100,
    body: Body = False,
) -> None:
    """List dead letters of a group, in the order of their deaths."""
    chosen = selected.args(group)
    show_page(session.out, read_page(session, group, chosen, after, limit, body=body))


@broker_command(app, "show", example="txmq dlq show billing orders/0/17 --bodies")
def show(
    session: CommandSession,
    group: Group,
    letter: Letter,
    *,
    body: Body = False,
    version: Version = None,
    compare: Diff = False,
) -> None:
    """Show a dead letter, or a message that is retried: its last error, its attempts,
    its deliveries and its edits, when it is tried next and which consumer has it.

    Of the failures the first and the last eight are kept. Deliveries are read from the
    log: `deliveries_known` says how much of it.
    """
    place: dict[str, Any] = {"group": group, **letter._asdict()}
    chosen = {} if version is None else {"version": version}
    shown = session.client.call("dlq.show", **place, **chosen, bodies=body or compare)
    if compare:
        original = session.client.call("dlq.show", **place, version=0)
        number = shown["edits"] if version is None else version
        names = ("what was published", f"version {number}")
        shown["diff"] = diff_lines(version_of(original), version_of(shown), names)
    if not body:
        shown.pop("body", None)
    shown = with_decoded_body(shown)
    shown |= run(deliveries_of_letter(calls_by(session.client.call), **place))
    if not session.out.as_json:
        shown["deliveries_known"] = what_is_known(shown["deliveries_known"])
        shown["operations"] = brief_entries(shown.get("operations", ()))
        if shown.get("state") in RETRIED:
            shown["held_by"] = shown["held_by"] or "the broker"
        for attempt in shown.get("history", ()):
            attempt["error_text"] = last_line(attempt["error_text"])
    lines = [] if session.out.as_json else shown.pop("diff", [])
    session.out.show(shown)
    for line in lines:
        typer.echo(line)


@broker_command(app, "stats", example="txmq dlq stats billing --where topic:orders")
def stats(session: CommandSession, group: Group, *, selected: Selected) -> None:
    """Count the dead letters of a group by error, topic, key and age.

    The columns 1h to older are the ages of the letters. Times are exact to a quarter of
    an hour.
    """
    counted = session.client.call("dlq.stats", group=group, **selected.args(group))
    if not session.out.as_json:
        counted = {name: value for name, value in counted.items() if name not in ONLY_IN_JSON}
        counted["top_keys"] = [_named_key(row) for row in counted.get("top_keys", ())]
    session.out.show(counted)


def _named_key(row: dict[str, Any]) -> dict[str, Any]:
    """Return a key and its letters, or its hash where the key is not known."""
    key = f"hash {row['key_hash']}" if row["key"] is None else row["key"]
    return {"key": key, "letters": row["letters"]}


@broker_command(app, "note", example="txmq dlq note billing 5f0c9a1b 'mended in 4.2'")
def note(
    session: CommandSession,
    group: Group,
    fingerprint: Annotated[
        str, typer.Argument(metavar="FINGERPRINT", help="Fingerprint, as `dlq stats` shows it.")
    ],
    text: Annotated[str, typer.Argument(metavar="[TEXT]", help="The note.")] = "",
    *,
    delete: Annotated[bool, typer.Option("--delete", help="Remove the note.")] = False,
    operator: Operator,
) -> None:
    """Keep a note on the letters with a fingerprint. `dlq stats` shows it."""
    if delete == bool(text):
        raise typer.BadParameter("use either a text or --delete")
    session.show(
        "dlq.note", group=group, fingerprint=fingerprint, text=text, operator=operator, reason=""
    )


@broker_command(app, "replay", example="txmq dlq replay billing --where error:TimeoutError")
def replay(  # its options
    session: CommandSession, group: Group, chosen: ChosenLetters, *, by: By, yes: Yes = False
) -> None:
    """Deliver dead letters again, in the order of their keys.

    --all makes a plan of its own, which the broker carries out (`txmq plan`): as fast
    as it can, and without a stop rule.
    """
    letters = chosen.args(group)
    if not chosen.letter:
        confirm(session, "Replay", "letter", group, letters, yes=yes)
    if chosen.everything:
        _show_changes(session, replay_all(session, group, by))
        return
    change(session, "dlq.replay", letters, group=group, **by._asdict())


@broker_command(
    app, "abandon", example="txmq dlq abandon billing orders/0/17 --reason 'a test order'"
)
def abandon(  # its options
    session: CommandSession,
    group: Group,
    chosen: ChosenLetters,
    *,
    by: ByForReason,
    yes: Yes = False,
) -> None:
    """Close dead letters for good. Their messages will not be processed."""
    letters = chosen.args(group)
    if not chosen.letter:
        confirm(session, "Abandon", "letter", group, letters, yes=yes)
    change(session, "dlq.abandon", letters, group=group, **by._asdict())


@broker_command(
    app, "redrive", example="txmq dlq redrive billing --all --to repair --reason 'new service'"
)
def redrive(  # noqa: PLR0913  # its options
    session: CommandSession,
    group: Group,
    chosen: ChosenLetters,
    *,
    to: Annotated[
        str | None, typer.Option(parser=parse_name, metavar="TOPIC", help="Topic of the copies.")
    ] = None,
    to_group: Annotated[
        str | None,
        typer.Option(parser=parse_name, metavar="GROUP", help="Group that gets the messages."),
    ] = None,
    close: Annotated[
        bool, typer.Option("--abandon", help="Abandon the letters that were copied.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Copy letters again that have a copy there.")
    ] = False,
    by: ByForReason,
    yes: Yes = False,
) -> None:
    """Copy dead letters to another topic, or give them to another group, each once.

    Copies in a topic are new messages, with headers of their origin. A group gets the
    messages themselves. The letters stay, or are abandoned in the same record.
    """
    if (to is None) == (to_group is None):
        raise typer.BadParameter("use either --to TOPIC or --to-group GROUP")
    letters = chosen.args(group)
    if not chosen.letter:
        aim_name = to or f"group {to_group}"
        confirm(session, f"Copy to {aim_name}", "letter", group, letters, yes=yes)
    aim = {"to": to} if to_group is None else {"to_group": to_group}
    change(
        session, "dlq.redrive", letters, abandon=close, again=again, group=group, **aim,
        **by._asdict(),
    )  # fmt: skip


@broker_command(
    selections, "save", example="txmq dlq select save timeouts --where error:TimeoutError"
)
def save(session: CommandSession, name: SelectionName, *, where: Where = None, by: By) -> None:
    """Save a selection under a name, for all groups; replace an earlier one.

    Times like 2h are counted from now, and saved as points in time.
    """
    session.show("dlq.save", name=name, select=parse_selection(where), **by._asdict())


@broker_command(selections, "list", example="txmq dlq select list")
def list_selections(session: CommandSession) -> None:
    """List the saved selections, as filters for --where."""
    found = session.read_pages("dlq.saved", "selections")
    if not session.out.as_json:
        for saved in found["selections"]:
            saved["select"] = format_filter(saved["select"])
    session.out.show(found)


@broker_command(selections, "delete", example="txmq dlq select delete timeouts")
def delete(session: CommandSession, name: SelectionName, *, by: By) -> None:
    """Delete a saved selection."""
    session.show("dlq.save", name=name, select=None, **by._asdict())


def read_page(
    session: CommandSession,
    group: str,
    chosen: dict[str, Any],
    after: str | None,
    limit: int,
    *,
    body: bool = False,
) -> dict[str, Any]:
    """Read letters of a selection, call by call, from `next` of the page before on."""
    shown: dict[str, Any] = {"letters": [], "next": after, "scanned": 0}
    while True:
        more = {} if shown["next"] is None else {"cursor": shown["next"]}
        page = session.client.call(
            "dlq.list",
            group=group,
            **chosen,
            **more,
            limit=limit - len(shown["letters"]),
            bodies=body,
        )
        shown["letters"] += map(with_decoded_body, page["letters"])
        shown["next"] = page["next"]
        shown["scanned"] += page["scanned"]
        # pages of bodies end early, so that nothing grows without a limit
        done = page["letters"] if body else len(shown["letters"]) >= limit
        if done or shown["next"] is None:
            return shown


def show_page(out: Output, page: dict[str, Any], things: str = "letters") -> None:
    """Show a page of letters or other `things`, for people without tracebacks, which
    `dlq show` has.
    """
    if out.as_json:
        out.show(page)
        return
    for letter in page["letters"]:
        letter["error_text"] = last_line(letter["error_text"])
    rows = with_places(page["letters"])
    empty = {name for name in OPTIONAL if not any(row.get(name) for row in rows)}
    out.show({things: rows}, columns=[name for name in COLUMNS if name not in empty])
    if page["next"] is not None:
        out.print_note(f"there may be more: --after {page['next']}")


def confirm(
    session: CommandSession,
    what: str,
    thing: str,
    group: str,
    chosen: dict[str, Any],
    *,
    yes: bool,
) -> None:
    """Ask before a selection is changed, with the number of its letters or messages."""
    if yes or session.out.as_json:
        return
    found = session.client.call("dlq.stats", group=group, **chosen)
    more = "" if found["complete"] else "more than "
    number = counted(found["counted"], thing)
    session.out.confirm(f"{what} {more}{number} of group {group}?", yes=yes)


def change(
    session: CommandSession,
    call: str,
    chosen: dict[str, Any],
    **args: object,
) -> None:
    """Make a call that changes letters, or messages that are retried, and show the
    result.

    Of a selection those are changed that were there when the first call began. Exit
    status 1: the broker refused some of them.
    """
    letters = chosen.get("letters")
    portions = [chosen] if letters is None else portions_of(call, letters)
    changed = run(change_portions(calls_by(session.client.call), call, portions, **args))
    refused = [one._asdict() for one in changed.refused]
    _show_changes(session, {"done": changed.done, "refused": refused})


def _show_changes(session: CommandSession, found: dict[str, Any]) -> None:
    refused = found["refused"]
    shown = found
    if not session.out.as_json:
        shown = found | {"done": len(found["done"]), "refused": with_places(refused)}
        if not refused:
            del shown["refused"]
    session.out.show(shown)
    if refused:
        raise typer.Exit(FAILED)
