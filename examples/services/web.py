"""Takes orders over HTTP: FastAPI and asyncpg.

    uvicorn examples.services.web:app

The order's row and its message are one decision, which is made before the answer: after
201 both exist. While the broker is away, the client gets 503 with Retry-After. It asks
again, as after an answer that was lost: an order that is there is not placed twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import asyncpg
from fastapi import Depends, FastAPI
from pydantic import BaseModel

from txmq.starlette import Messaging, Work

INSERT = "INSERT INTO orders VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING RETURNING id"


logging.basicConfig(level=logging.INFO)  # shows why a request has 503


class Order(BaseModel):
    """An order, as clients place it and as others hear of it."""

    id: str
    customer: str
    cents: int
    address: str


messaging = Messaging(
    os.environ["TXMQ_BROKER"],
    service="web",
    connect=lambda: app.state.pool.acquire(),  # noqa: PLW0108  # the pool comes later
)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with asyncpg.create_pool(os.environ["DSN"]) as app.state.pool, messaging.lifespan():
        yield


app: FastAPI = FastAPI(lifespan=lifespan, exception_handlers=messaging.exception_handlers)
Begun = Annotated[Work, Depends(messaging.transaction, scope="function")]


@app.post("/orders", status_code=201)
async def place(order: Order, work: Begun) -> None:
    fields = (order.id, order.customer, order.cents, order.address)
    if await work.connection.fetchval(INSERT, *fields):
        body = order.model_dump_json().encode()
        work.tx.send("orders", body, key=order.customer, headers={"correlation": order.id})
