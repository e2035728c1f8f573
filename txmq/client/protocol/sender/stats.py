"""What sends without waiting count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """What a pipeline has done so far."""

    messages: int = 0  # stored
    frames: int = 0  # sent, repetitions not counted
    coalesced: int = 0  # messages that shared their frame with others
    resent: int = 0  # frames sent again
    refused: int = 0  # frames refused, those behind another refused one included
    connections: int = 0
    failed: int = 0  # messages without a receipt
    bundles: int = 0  # frames of several groups, or of several decisions
    requests: int = 0  # in them
