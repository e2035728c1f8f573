"""`txmq broker`: a broker in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from txmq import config as settings
from txmq.cli.command import local
from txmq.cli.output import Output

Data = Annotated[Path | None, typer.Option(metavar="DIR", help="The directory of its data; made if need be.")]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="Settings, as TOML; options here go before them.")]
Listen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Where to listen; port 0: any free one.", show_default="127.0.0.1:7650"),
]


def add_to(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    local(app, "broker")(broker)


def broker(out: Output, *, data: Data = None, config: Config = None, listen: Listen = None) -> None:
    """Run a broker until SIGTERM, which drains it. Prints `ready txmq://HOST:PORT` once it serves."""
    chosen = settings.load(config, {"data": data, "listen": listen})
    from txmq.broker.service import run
    from txmq.cli import logs

    logs.configure(as_json=out.as_json)
    logs.bridge_twisted()
    run(chosen, ready=lambda url: print(f"ready {url}", flush=True))
