"""What the services tell one another."""

from __future__ import annotations

from datetime import date
from typing import Final, Self

from pydantic import BaseModel, ConfigDict

ORDER_PLACED: Final = (
    "order-placed"  # the topic; its key is the customer, so that a customer's orders stay in order
)


class OrderPlaced(BaseModel):
    """An order is in the books. `version` counts its customer's orders, from 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    order_id: int
    customer_id: int
    version: int
    total_cents: int
    ordered_on: date
    carrier: str

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, body: bytes) -> Self:
        return cls.model_validate_json(body)
