"""Entry points of the commands `txmq` and `txmq-spark`.

They stand beside the packages, because to import anything of them takes tens of
milliseconds, and a second with Spark, in which Ctrl-C would print a traceback.
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run `txmq`, or say in one line which extra brings its packages.

    Until it begins its work, Ctrl-C ends it without a word.
    """
    _die_of_interrupts()
    from txmq.errors.extras import MissingExtra  # noqa: PLC0415  # not before

    try:
        from txmq.cli.app import main as run  # noqa: PLC0415  # the extra may be missing
    except MissingExtra as missing:
        sys.exit(f"txmq: {missing}")
    run()


def spark() -> None:
    """Run `txmq-spark`, or say in one line what it lacks."""
    _die_of_interrupts()
    from txmq.errors.base import TxmqError  # noqa: PLC0415  # not before

    try:
        from txmq_spark.commands.command_line import main as run  # noqa: PLC0415  # PySpark may be missing
    except TxmqError as error:
        sys.exit(f"txmq: {error}")
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run())


def _die_of_interrupts() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
