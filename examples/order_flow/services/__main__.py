"""Run one service until SIGTERM, or until it has no more work.

The environment names broker and database: TXMQ_BROKER, TXMQ_DSN.
"""

from __future__ import annotations

import argparse
import logging
import os
from importlib import import_module
from pathlib import Path

from examples.order_flow.journal import Journal
from examples.order_flow.services.context import ServiceContext

SERVICES = ("orders", "payment", "shipping", "analytics", "tracking")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.order_flow.services", description=__doc__
    )
    parser.add_argument("service", choices=SERVICES)
    parser.add_argument(
        "--data", required=True, type=Path, metavar="DIR", help="directory of the generated orders"
    )
    parser.add_argument(
        "--journal",
        required=True,
        type=Path,
        metavar="FILE",
        help="file for the counts of this process",
    )
    parser.add_argument(
        "--local",
        required=True,
        type=Path,
        metavar="DIR",
        help="directory for what this process keeps on local disk",
    )
    parser.add_argument("--instance", type=int, default=0)
    parser.add_argument("--instances", type=int, default=1)
    options = parser.parse_args()
    # includes the events of txmq
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    context = ServiceContext(
        broker=os.environ["TXMQ_BROKER"],
        dsn=os.environ["TXMQ_DSN"],
        data=options.data,
        journal=Journal(options.journal),
        local=options.local,
        instance=options.instance,
        instances=options.instances,
    )
    import_module(f"examples.order_flow.services.{options.service}").run(context)


if __name__ == "__main__":
    main()
