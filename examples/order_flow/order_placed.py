"""The message of the services."""

from __future__ import annotations

from datetime import date
from typing import Final, Self

from pydantic import BaseModel, ConfigDict

# The topic. Its key is the customer, which keeps the orders of a customer in order.
ORDER_PLACED: Final = "order-placed"


class OrderPlaced(BaseModel):
    """A committed order. `version` counts the orders of its customer, from 1."""

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
