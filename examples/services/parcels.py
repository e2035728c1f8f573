"""A stand-in for the API of a carrier, which books each order once.

    python -m examples.services.parcels

It is at http://127.0.0.1:8080, and refuses an empty address.
"""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

booked: dict[str, str] = {}  # numbers of parcels, by order


async def book(request: web.Request) -> web.Response:
    parcel = await request.json()
    if not parcel["address"]:
        return web.Response(status=HTTPStatus.UNPROCESSABLE_ENTITY, text="no address")
    number = booked.setdefault(parcel["order"], f"P-{len(booked) + 1}")
    return web.json_response({"order": parcel["order"], "parcel": number})


def application() -> web.Application:
    made = web.Application()
    made.router.add_post("/parcels", book)
    return made


if __name__ == "__main__":
    web.run_app(application(), host="127.0.0.1", port=8080)
