"""The stages of a transaction's life in its process."""

from __future__ import annotations

from enum import Enum
from uuid import UUID

from txmq.errors import ClientClosed, LocalProtocolError


class Stage(Enum):
    """A stage of a transaction's life, in the words of an error."""

    NEW = "has not begun"
    OPEN = "is open"
    STORED = "is stored"  # a half message whose local work goes on
    ENDING = "is ending"  # what is sent from here on would be lost
    OVER = "is over"


def wrong_stage(token: UUID, stage: Stage) -> ClientClosed | LocalProtocolError:
    """Return the error of a call for which the transaction is in the wrong stage."""
    if stage is Stage.OVER:
        return ClientClosed(
            f"Transaction {token} is over",
            hint="begin another one with client.transaction or client.enlist",
        )
    return LocalProtocolError(
        f"Transaction {token} {stage.value}", hint="use it inside its `with` block"
    )
