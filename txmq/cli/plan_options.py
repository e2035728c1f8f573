"""Options of replay plans, for `txmq plan create` and for the plans of policies."""

from __future__ import annotations

from typing import Annotated

import typer

Rate = Annotated[
    float, typer.Option(min=0, help="Letters per second; 0 = as fast as the broker can.")
]
Canary = Annotated[
    int,
    typer.Option(
        min=0, help="Number of letters that are put back first, until each has an outcome."
    ),
]
StopShare = Annotated[
    float,
    typer.Option(
        min=0,
        max=1,
        help="Pause if more than this share of the last outcomes failed with one fingerprint.",
    ),
]
StopAfter = Annotated[
    int,
    typer.Option(min=0, max=100, help="Number of last outcomes for --stop-share; 0 = never pause."),
]
InFlight = Annotated[
    int, typer.Option(min=0, help="Maximum number of letters without an outcome; 0 = no limit.")
]
Most = Annotated[
    int, typer.Option(min=0, help="Maximum number of letters of a plan; 0 = no limit.")
]
