"""What a transaction does to consumers, besides its messages: acks and replays that take effect with the commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txmq.broker.core.events import Place
    from txmq.broker.core.state import Rejected, State


def check(state: State, actions: tuple[tuple[object, ...], ...]) -> Rejected | None:
    del state, actions
    return None


def pin(state: State, token: bytes, actions: tuple[tuple[object, ...], ...]) -> None:
    del state, token, actions


def settle(state: State, token: bytes, actions: tuple[tuple[object, ...], ...], place: Place, *, committed: bool) -> None:
    del state, token, actions, place, committed
