"""`txmq xa`: prepared branches in databases and at brokers, and their recovery."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli.command import CommandSession, broker_command, local_command
from txmq.cli.options import DEFAULT_BROKER, ByForReason, Limit, Operator, Token
from txmq.cli.output import FAILED, Output
from txmq.cli.parsers import parse_moment, parse_name, parse_token
from txmq.cli.stop import stop_on_signals
from txmq.cli.xa_report import age_alarms, json_rows, table_rows
from txmq.model.decider import decided_by

if TYPE_CHECKING:
    from threading import Event

    from txmq.recover.findings import PassReport
    from txmq.recover.recoverer import XaRecoverer

app = typer.Typer(
    name="xa", no_args_is_help=True, help="List, recover and compare branches of XA transactions."
)
COLUMNS = ("token", "state", "decider", "service", "messages", "stored_at", "heuristics")


class BranchKind(StrEnum):
    """Decider of a branch: the log of a broker, or a foreign transaction manager."""

    HOME = "home"
    FOREIGN = "foreign"


Config = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="Settings as TOML: sections xa, xa.database and xa.broker are used.",
    ),
]
Brokers = Annotated[
    list[str] | None,
    typer.Option(
        "--broker",
        envvar="TXMQ_BROKER",
        metavar="URL",
        help="URL of another broker, besides those in the settings; can be repeated.",
        show_default=f"{DEFAULT_BROKER}, if the settings name none",
    ),
]
FORCED_GID = typer.Option(metavar="GID", help="End this branch of txmq by hand; needs --reason.")


@broker_command(app, "list", example="txmq xa list --kind home")
def list_(
    session: CommandSession,
    *,
    kind: Annotated[
        BranchKind | None, typer.Option(help="Only branches of this kind of decider.")
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(metavar="SERVICE", parser=parse_name, help="Only branches of this service."),
    ] = None,
    heuristic: Annotated[
        bool,
        typer.Option("--heuristic", help="Only branches that were decided by hand, or are mixed."),
    ] = False,
    after: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", parser=parse_token, help="Only branches after this token."),
    ] = None,
    limit: Limit = 100,
) -> None:
    """List undecided branches of a broker, and heuristic outcomes, the oldest first."""
    chosen = {"kind": None if kind is None else kind.value, "owner": owner, "heuristic": heuristic}
    reply = session.client.call("xa.list", after=after, limit=limit, **chosen)
    if not session.out.as_json:
        for one in reply["transactions"]:
            one["decider"] = decided_by(one.get("decider") or ())
    session.out.show(reply, columns=COLUMNS)


@broker_command(
    app, "forget", example="txmq xa forget 019a0000000070008000000000000001 --reason 'by hand'"
)
def forget(session: CommandSession, token: Token, *, by: ByForReason) -> None:
    """Remove a heuristic or mixed outcome from the list, once it is dealt with."""
    session.client.call("xa.forget", token=token, **by._asdict())
    session.out.show({"token": token, "forgotten": True})


@local_command(app, "recover", example="txmq xa recover --config xa.toml --watch")
def recover(
    out: Output,
    *,
    config: Config,
    broker: Brokers = None,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until SIGTERM.")] = False,
) -> None:
    """End prepared branches as their home brokers decided. Exit status 1: something
    needs an operator.
    """
    recoverer = _open_recoverer(out, config, broker)
    stop = stop_on_signals()
    try:
        if watch:
            names = [database.name for database in recoverer.databases]
            out.print_line({"ready": names}, f"ready {' '.join(names)}")
            recoverer.run(stop)
            return
        report = _two_passes(recoverer, stop)
    finally:
        recoverer.close()
    _show(out, report)


@local_command(app, "verify", example="txmq xa verify --config xa.toml --since 2d")
def verify(
    out: Output,
    *,
    config: Config,
    broker: Brokers = None,
    since: Annotated[
        int,
        typer.Option(
            parser=parse_moment,
            metavar="TIME|AGO",
            help="Start, as 2026-07-01T12:00:00Z, or so long ago, as 2d; at most a week ago.",
        ),
    ],
) -> None:
    """Compare committed transactions with the databases, to find branches that were
    rolled back by hand.

    Exit status 1: there are some. The journals of their home brokers list them (txmq xa
    list --heuristic).
    """
    from txmq.client.protocol.transaction.tokens import first_token_at

    recoverer = _open_recoverer(out, config, broker)
    try:
        report = recoverer.verify(first_token_at(since))
    finally:
        recoverer.close()
    _show(out, report)


@local_command(app, "doctor", example="txmq xa doctor --config xa.toml --fix")
def doctor(
    out: Output,
    *,
    config: Config,
    broker: Brokers = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="End the branches as the logs decided.")
    ] = False,
    force_commit: Annotated[str | None, FORCED_GID] = None,
    force_rollback: Annotated[str | None, FORCED_GID] = None,
    reason: Annotated[
        str,
        typer.Option(help="Reason to end a branch by hand, recorded in the journal of a broker."),
    ] = "",
    operator: Operator,
) -> None:
    """Compare databases and brokers: prepared branches, their locks, and what to do
    about them.

    Exit status 1: something needs an operator, or is older than `xa.alarm_s`.
    """
    from txmq.model.message import COMMIT, ROLLBACK
    from txmq.recover.operator_decision import OperatorDecision, force_branch

    forced = [
        (gid, how)
        for gid, how in ((force_commit, COMMIT), (force_rollback, ROLLBACK))
        if gid is not None
    ]
    if len(forced) + fix > 1:
        raise typer.BadParameter(
            "too many options: use one of --fix, --force-commit and --force-rollback"
        )
    if forced and not reason.strip():
        raise typer.BadParameter("the reason to end a branch by hand is missing: add --reason TEXT")
    recoverer = _open_recoverer(out, config, broker, trust_clocks=True)
    try:
        if forced:
            out.show(
                force_branch(recoverer, OperatorDecision(*forced[0], operator, reason))._asdict()
            )
            return
        report = recoverer.run_pass() if fix else recoverer.inspect()
    finally:
        recoverer.close()
    _show(out, report, recoverer.settings.alarm_s)


def _open_recoverer(
    out: Output, config: Path, brokers: list[str] | None, *, trust_clocks: bool = False
) -> XaRecoverer:
    from txmq.cli import logs
    from txmq.config.broker import load_xa
    from txmq.recover.recoverer import XaRecoverer

    settings = load_xa(config)
    logs.configure(as_json=out.as_json)
    urls = brokers or ([] if settings.broker else [DEFAULT_BROKER])
    return XaRecoverer(settings, urls, trust_clocks=trust_clocks)


def _two_passes(recoverer: XaRecoverer, stop: Event) -> PassReport:
    """Run a second pass after the safety interval, if something was undecided."""
    first = recoverer.run_pass()
    if not first.waiting or stop.wait(recoverer.settings.safety_s):
        return first
    done = [one for one in first.findings if one.done]
    second = recoverer.run_pass()
    return second._replace(findings=(*done, *second.findings))


def _show(out: Output, report: PassReport, alarm_s: float | None = None) -> None:
    alarms = age_alarms(report, alarm_s)
    troubles = [{"where": where, "why": why} for where, why in report.troubles]
    rows = json_rows(report) if out.as_json else table_rows(report)
    shown: dict[str, object] = {"branches": rows}
    shown |= {"alarms": alarms} if alarms or out.as_json else {}
    shown |= {"troubles": troubles} if troubles or out.as_json else {}
    out.show(shown)
    if alarms or report.needs_operator:
        raise typer.Exit(FAILED)
