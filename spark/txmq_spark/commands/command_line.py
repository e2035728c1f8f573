"""The command `txmq-spark` and its jobs.

The exit status is 0 for success, 1 for an error of txmq, and 2 for wrong usage. It is 3
where a plan waits for somebody: it is paused, cancelled, or not approved. A job that is
ended by Ctrl-C has 130, and one that SIGTERM has ended before its work was done, 143.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import structlog

from txmq.errors import TxmqError
from txmq.model.printable import escape_unprintable
from txmq.version import __version__
from txmq_spark.commands.plan_commands import (
    add_reconcile_options,
    add_replay_options,
    run_reconcile,
    run_replay,
)
from txmq_spark.commands.stream_commands import (
    add_land_options,
    add_watch_options,
    run_land,
    run_watch,
)
from txmq_spark.source.broker_urls import job_url

URL: Final = "txmq://127.0.0.1:7650"
INTERRUPTED: Final = 128 + signal.SIGINT  # exit status, as of a shell


class Job(NamedTuple):
    """A job of the command: its help, its options, and the function that runs it."""

    help: str
    add_options: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `txmq-spark JOB`."""
    options = command_parser().parse_args(arguments)
    # Results are on standard output; structlog's default would put the log there, too.
    structlog.configure(logger_factory=lambda *_names: structlog.PrintLogger(sys.stderr))

    # a job without an end of its own ends well by SIGTERM
    goes_on = getattr(options, "every", None) is not None

    def run() -> int:
        with _ended_by_signals(0 if goes_on else 128 + signal.SIGTERM):
            options.url = job_url(options.url)
            return JOBS[options.job].run(options)

    return _exit_status(run)


def command_parser() -> ArgumentParser:
    """Return the parser of `txmq-spark`, with all jobs and their options."""
    parser = ArgumentParser("txmq-spark", description="Jobs of txmq in Spark.")
    parser.add_argument("--version", action="version", version=f"txmq {__version__}")
    jobs = parser.add_subparsers(metavar="JOB", required=True, dest="job")
    for name, job in JOBS.items():
        below = jobs.add_parser(name, help=job.help, description=job.help)
        _add_broker_options(below)
        job.add_options(below)
    return parser


@contextmanager
def _ended_by_signals(status: int) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end the block in order, with its queries and the JVM.

    Not by KeyboardInterrupt: py4j prints the stack of each call that it interrupts.
    Errors on the way out come of the signal, which may have ended the JVM, too.
    """
    caught: list[int] = []

    def end(status: int) -> None:
        caught.append(status)
        sys.exit(status)

    statuses = {signal.SIGTERM: status}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a shell
        statuses[signal.SIGINT] = INTERRUPTED
    before = {
        number: signal.signal(number, lambda *_caught, status=ends: end(status))
        for number, ends in statuses.items()
    }
    try:
        yield
    except Exception:
        if not caught:
            raise
        sys.exit(caught[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_status(run: Callable[[], int]) -> int:
    try:
        return run()
    except TxmqError as error:
        # lines of errors are indented: none of them passes for one of ours
        lines = map(escape_unprintable, str(error).split("\n"))
        print("txmq: " + "\n    ".join(lines), file=sys.stderr)
        return 1
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            print("txmq: interrupted; the same command does the rest", file=sys.stderr)
        raise


def _add_broker_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--broker",
        dest="url",
        metavar="URL",
        default=os.environ.get("TXMQ_BROKER", URL),
        help="URL of the broker: txmq://HOST:PORT, txmqs:// for TLS, USER@HOST to log in, with "
        "?ca=FILE and password_file=FILE, which executors read, too (default: TXMQ_BROKER, or "
        "%(default)s)",
    )


JOBS: Final = {
    "reconcile": Job(
        "Classify the dead letters of a consumer group and plan a replay.",
        add_reconcile_options,
        run_reconcile,
    ),
    "replay": Job("Replay the letters of a plan, once.", add_replay_options, run_replay),
    "land": Job(
        "Write topics as Parquet files by date, each message once.", add_land_options, run_land
    ),
    "watch": Job(
        "Send alerts about dead letters to a topic: new errors, floods, old letters.",
        add_watch_options,
        run_watch,
    ),
}
