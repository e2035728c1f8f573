"""Entry point of the command `txmq`.

It stands beside the package, because to import anything of `txmq` takes tens of
milliseconds, in which Ctrl-C would print a traceback of imports.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command; until it begins its work, Ctrl-C ends it without a word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from txmq.__main__ import main as run  # noqa: PLC0415  # not before

    run()
