"""`python -m txmq` runs the command `txmq`."""

from __future__ import annotations

import signal
import sys

from txmq.errors.extras import MissingExtra


def main() -> None:
    """Run the command, or say in one line which extra brings its packages."""
    # Ctrl-C ends it without a traceback of imports: the command has begun nothing
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from txmq.cli.app import main as run  # noqa: PLC0415  # the extra may be missing
    except MissingExtra as missing:
        sys.exit(f"txmq: {missing}")
    run()


if __name__ == "__main__":
    main()
