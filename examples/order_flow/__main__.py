"""Run the order flow from the input to the audit: `make demo`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from examples.order_flow.fleet import ROOT
from txmq.errors import TxmqError

FAILED = 1
INTERRUPTED = 130
SMALLEST, LARGEST = 0.001, 10.0


def scale_of(text: str) -> float:
    """Parse the argument of --scale."""
    scale = float(text)
    if not SMALLEST <= scale <= LARGEST:
        raise argparse.ArgumentTypeError(f"invalid scale {text}: use {SMALLEST} to {LARGEST}")
    return scale


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.order_flow", description=__doc__)
    parser.add_argument(
        "--scale",
        type=scale_of,
        default=0.01,
        help="scale of the TPC-H input: 0.01 is 15,000 orders (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the faults (default: %(default)s)"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep broker, console and PostgreSQL running at the end",
    )
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="three nodes of the broker over a Kafka; the leader is lost with its disk",
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="new directory for logs and reports"
    )
    options = parser.parse_args()
    if options.cluster and options.keep:
        parser.error("a cluster ends with the run: leave out --keep or --cluster")
    directory: Path = (
        options.directory
        or ROOT / "out" / "demo" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    )
    signal.signal(signal.SIGTERM, _end)
    from examples.order_flow.flow import run  # noqa: PLC0415  # the driver is not needed for --help

    try:
        passed = run(
            directory.absolute(),
            scale=options.scale,
            seed=options.seed,
            keep=options.keep,
            cluster=options.cluster,
        )
        return 0 if passed else FAILED
    except (TxmqError, TimeoutError, OSError) as error:
        print(f"order flow: {error}\nsee the logs in {directory}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"order flow: interrupted; see the logs in {directory}", file=sys.stderr)
        return INTERRUPTED


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(FAILED)  # the exit runs the blocks that end all processes


if __name__ == "__main__":
    sys.exit(main())
