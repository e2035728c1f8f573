"""`txmq retry`: messages that have another attempt, at the broker or at a consumer."""

from __future__ import annotations

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.commands.letter_edits import edit
from txmq.cli.commands.letters import change, confirm, read_page, show, show_page
from txmq.cli.letter_selection import (
    ChosenRetries,
    RetriedWhere,
    parse_selection,
)
from txmq.cli.options import By, ByForReason, Group, Limit, NextPage, Yes
from txmq.model.letter_filter import retried

app = typer.Typer(
    name="retry",
    no_args_is_help=True,
    help="List, hasten, bury, skip and edit messages that wait for another attempt.",
)
broker_command(app, "show", example="txmq retry show billing orders/0/17 --body")(show)
broker_command(app, "edit", example="txmq retry edit billing orders/0/17 --editor --reason typo")(
    edit
)


@broker_command(app, "list", example="txmq retry list billing --where 'error:TimeoutError age>1h'")
def list_(
    session: CommandSession,
    group: Group,
    *,
    where: RetriedWhere = None,
    after: NextPage = None,
    limit: Limit = 100,
) -> None:
    """List messages that are retried: when each has its next attempt, its last error,
    and which consumer has it.

    The oldest failure stands first. What no consumer has waits at the broker.
    """
    select = {"select": retried(parse_selection(where, group))}
    show_page(session.out, read_page(session, group, select, after, limit), "messages")


@broker_command(app, "now", example="txmq retry now billing --where error:TimeoutError")
def now(  # its options
    session: CommandSession, group: Group, chosen: ChosenRetries, *, by: By, yes: Yes = False
) -> None:
    """Deliver messages at once that wait for their next attempt. A consumer that has
    one in its local store hears of it within seconds.
    """
    _change(session, "retry.now", "Retry", group, chosen, by, yes=yes)


@broker_command(app, "bury", example="txmq retry bury billing orders/0/17 --reason 'bug 4711'")
def bury(  # its options
    session: CommandSession,
    group: Group,
    chosen: ChosenRetries,
    *,
    by: ByForReason,
    yes: Yes = False,
) -> None:
    """Make messages dead letters before their last attempt. Replay or abandon them
    later: txmq dlq.
    """
    _change(session, "retry.bury", "Bury", group, chosen, by, yes=yes)


@broker_command(app, "skip", example="txmq retry skip billing orders/0/17 --reason 'a test order'")
def skip(  # its options
    session: CommandSession,
    group: Group,
    chosen: ChosenRetries,
    *,
    by: ByForReason,
    yes: Yes = False,
) -> None:
    """Close messages for good without another attempt; their keys go on. They become
    abandoned dead letters.
    """
    _change(session, "retry.skip", "Skip", group, chosen, by, yes=yes)


def _change(
    session: CommandSession,
    call: str,
    what: str,
    group: str,
    chosen: ChosenRetries,
    by: By | ByForReason,
    *,
    yes: bool,
) -> None:
    """Change messages that are named or selected, and show the result."""
    messages = chosen.args(group)
    if not chosen.message:
        confirm(session, what, "message", group, messages, yes=yes)
    change(session, call, messages, group=group, **by._asdict())
