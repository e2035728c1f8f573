"""`txmq xa`: prepared branches in databases and at brokers, their recovery, and an
operator's hand on them.
"""

from __future__ import annotations

import signal
from enum import StrEnum
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli.command import Session, local, remote
from txmq.cli.options import DEFAULT_BROKER, Operator, Reason, Token, name_of, time_of, token_of
from txmq.cli.output import FAILED, Output

if TYPE_CHECKING:
    from txmq.recover.findings import Report
    from txmq.recover.recoverer import XaRecoverer

app = typer.Typer(no_args_is_help=True, help="XA transactions: what is prepared, and its recovery.")
COLUMNS = ("token", "state", "decider", "service", "messages", "stored_at", "heuristics")


class Kind(StrEnum):
    """Who decides: another broker's log or the broker's own, or a transaction manager
    of somebody else's.
    """

    HOME = "home"
    FOREIGN = "foreign"


Config = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="Settings, as TOML: [xa], its [[xa.database]] and [[xa.broker]] are used.",
    ),
]
Brokers = Annotated[
    list[str] | None,
    typer.Option(
        "--broker",
        envvar="TXMQ_BROKER",
        metavar="URL",
        help="A broker besides those in the settings; may be given several times.",
        show_default=f"{DEFAULT_BROKER}, if the settings name none",
    ),
]
Gid = typer.Option(metavar="GID", help="End this branch of ours by hand; --reason is needed.")


@remote(app, "list")
def list_(
    session: Session,
    *,
    kind: Annotated[Kind | None, typer.Option(help="Only those decided there.")] = None,
    owner: Annotated[
        str | None, typer.Option(metavar="SERVICE", parser=name_of, help="Only this service's.")
    ] = None,
    heuristic: Annotated[
        bool, typer.Option("--heuristic", help="Only what was decided by hand, or is mixed.")
    ] = False,
    after: Annotated[
        str | None, typer.Option(metavar="TOKEN", parser=token_of, help="Only those after it.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")] = 100,
) -> None:
    """List the branches of a broker that are undecided, or to be dealt with, the oldest
    first.
    """
    chosen = {"kind": None if kind is None else kind.value, "owner": owner, "heuristic": heuristic}
    session.show("xa.list", columns=COLUMNS, after=after, limit=limit, **chosen)


@remote(app, "forget")
def forget(session: Session, token: Token, *, reason: Reason, operator: Operator) -> None:
    """Say that a heuristic or mixed outcome has been dealt with; it is listed no
    more.
    """
    session.client.call("xa.forget", token=token, operator=operator, reason=reason)
    session.out.show({"token": token, "forgotten": True})


@local(app, "recover")
def recover(
    out: Output,
    *,
    config: Config,
    broker: Brokers = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until SIGTERM.")] = False,
) -> None:
    """Finish what is prepared as its home brokers decided. Exit status 1: something
    needs an operator.
    """
    recoverer = _recoverer(out, config, broker)
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    try:
        if watch:
            names = [database.name for database in recoverer.databases]
            out.line({"ready": names}, f"ready {' '.join(names)}")
            recoverer.run(stop)
            return
        report = _two_passes(recoverer, stop)
    finally:
        recoverer.close()
    _show(out, report)


@local(app, "verify")
def verify(
    out: Output,
    *,
    config: Config,
    broker: Brokers = None,
    since: Annotated[
        int,
        typer.Option(
            parser=time_of,
            metavar="TIME",
            help="Since when, as 2026-07-01T12:00:00Z; at most a week.",
        ),
    ],
) -> None:
    """Compare what was committed with the databases: branches that somebody rolled back
    by hand, unseen till now.

    Exit status 1: there are some; they are in the journals of their home brokers (txmq
    xa list --heuristic).
    """
    from txmq.client.protocol.transaction.tokens import first_token

    recoverer = _recoverer(out, config, broker)
    try:
        report = recoverer.verify(first_token(since))
    finally:
        recoverer.close()
    _show(out, report)


@local(app, "doctor")
def doctor(
    out: Output,
    *,
    config: Config,
    broker: Brokers = None,
    fix: Annotated[bool, typer.Option("--fix", help="Do what the logs decide.")] = False,
    force_commit: Annotated[str | None, Gid] = None,
    force_rollback: Annotated[str | None, Gid] = None,
    reason: Annotated[
        str, typer.Option(help="Why, for a branch ended by hand; kept in a broker's journal.")
    ] = "",
    operator: Operator,
) -> None:
    """Compare databases and brokers: what is prepared, what it holds up, what is to be
    done and why.

    Exit status 1: something needs an operator, or has stood for longer than
    `xa.alarm_s`.
    """
    from txmq.model.message import COMMIT, ROLLBACK
    from txmq.recover.by_hand import ByHand, force

    forced = [
        (gid, how)
        for gid, how in ((force_commit, COMMIT), (force_rollback, ROLLBACK))
        if gid is not None
    ]
    if len(forced) + fix > 1:
        raise typer.BadParameter("--fix, --force-commit and --force-rollback exclude one another")
    if forced and not reason.strip():
        raise typer.BadParameter("ending a branch by hand needs --reason")
    recoverer = _recoverer(out, config, broker, trust_clocks=True)
    try:
        if forced:
            out.show(force(recoverer, ByHand(*forced[0], operator, reason))._asdict())
            return
        report = recoverer.go() if fix else recoverer.look()
    finally:
        recoverer.close()
    _show(out, report, recoverer.settings.alarm_s)


def _recoverer(
    out: Output, config: Path, brokers: list[str] | None, *, trust_clocks: bool = False
) -> XaRecoverer:
    from txmq.cli import logs
    from txmq.config.broker import load_xa
    from txmq.recover.recoverer import XaRecoverer

    settings = load_xa(config)
    logs.configure(as_json=out.as_json)
    urls = brokers or ([] if settings.broker else [DEFAULT_BROKER])
    return XaRecoverer(settings, urls, trust_clocks=trust_clocks)


def _two_passes(recoverer: XaRecoverer, stop: Event) -> Report:
    """The second one, where something was undecided, after the safety interval."""
    first = recoverer.go()
    if not first.waiting or stop.wait(recoverer.settings.safety_s):
        return first
    done = [one for one in first.findings if one.done]
    second = recoverer.go()
    return second._replace(findings=(*done, *second.findings))


def _show(out: Output, report: Report, alarm_s: float | None = None) -> None:
    from txmq.cli.commands.xa_rows import alarms, details, lines

    told = alarms(report, alarm_s)
    troubles = [{"where": where, "why": why} for where, why in report.troubles]
    rows = details(report) if out.as_json else lines(report)
    shown: dict[str, object] = {"branches": rows}
    shown |= {"alarms": told} if told or out.as_json else {}
    shown |= {"troubles": troubles} if troubles or out.as_json else {}
    out.show(shown)
    if told or report.needs_hand:
        raise typer.Exit(FAILED)
