"""Runs one service until SIGTERM, or until it has nothing left to do.

Broker and database are in the environment: TXMQ_BROKER, TXMQ_DSN.
"""

from __future__ import annotations

import argparse
import logging
import os
from importlib import import_module
from pathlib import Path

from examples.order_flow.journal import Journal
from examples.order_flow.services.setting import Setting

SERVICES = ("orders", "payment", "shipping", "analytics")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.order_flow.services", description=__doc__
    )
    parser.add_argument("service", choices=SERVICES)
    parser.add_argument(
        "--data", required=True, type=Path, metavar="DIR", help="where the generated orders are"
    )
    parser.add_argument(
        "--journal", required=True, type=Path, metavar="FILE", help="where it notes what it does"
    )
    parser.add_argument("--instance", type=int, default=0)
    parser.add_argument("--instances", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )  # txmq's events, too
    setting = Setting(
        broker=os.environ["TXMQ_BROKER"],
        dsn=os.environ["TXMQ_DSN"],
        data=options.data,
        journal=Journal(options.journal),
        instance=options.instance,
        instances=options.instances,
    )
    import_module(f"examples.order_flow.services.{options.service}").run(setting)


if __name__ == "__main__":
    main()
