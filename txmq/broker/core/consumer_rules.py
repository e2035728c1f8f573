"""The rules of consumers, gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from txmq.broker.core.events import Booted, Place
    from txmq.broker.core.state import State

DECIDERS: dict[type, Any] = {}
APPLIERS: dict[type, Any] = {}


def apply_booted(state: State, event: Booted, place: Place) -> None:
    del state, event, place
