"""Books parcels for paid orders: asyncio, and a slow API of somebody else's.

    python -m examples.services.carrier       # CARRIER is the address of the API

That the order is shipped and that its message is done with are one decision. What the
API does is not part of it: the API knows the order's id, and books each order once.
Where it asks for a pause, the order comes again after it; where it fails, after longer
and longer delays; an address that it refuses is a dead letter, for people to mend.
What is sent has the order's correlation, so `txmq trace` follows it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from http import HTTPStatus

import aiohttp

import txmq.aio

AT_ONCE = 20  # parcels: the API is slow, not busy


class AddressRefused(Exception):
    """An error that a retry does not mend."""


# What cannot be reached costs no attempt.
RETRY = txmq.RetryPolicy.exponential(
    initial=1,
    jitter=0.2,
    dead=[f"{__name__}.AddressRefused"],
    postpone=["aiohttp.client_exceptions.ClientConnectionError"],
)


async def main() -> None:
    logging.basicConfig(level=logging.INFO)  # shows what `book` raises
    async with (
        txmq.aio.connect(os.environ["TXMQ_BROKER"], service="carrier") as client,
        aiohttp.ClientSession(os.environ["CARRIER"]) as api,
        await client.consumer("carrier", ["paid"], retry=RETRY) as consumer,
    ):

        async def book(message: txmq.DeliveredMessage) -> None:
            order = json.loads(message.body)
            parcel = {"order": order["id"], "address": order["address"]}
            async with api.post("/parcels", json=parcel) as answer:
                if pause := answer.headers.get("Retry-After"):
                    consumer.postpone(message, float(pause))
                    return
                if answer.status == HTTPStatus.UNPROCESSABLE_ENTITY:
                    raise AddressRefused(await answer.text())
                answer.raise_for_status()
                booked = await answer.read()
            async with client.transaction() as tx:
                tx.ack(message)
                tx.send("shipped", booked, key=message.key)

        consumer.stop_on_signals()
        await consumer.run(book, workers=AT_ONCE)


if __name__ == "__main__":
    asyncio.run(main())
