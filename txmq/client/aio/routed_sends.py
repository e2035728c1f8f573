"""Sends of a client of several brokers, each by its route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from txmq.client.aio.client import Client
from txmq.client.aio.core import AioCore
from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.sender.routing import (
    Routing,
    RowsByRoute,
    SendRoute,
    can_fail_over,
    merge_receipts,
    select_rows,
)
from txmq.client.protocol.settings import ClientSettings
from txmq.errors import TxmqError
from txmq.model.message import Message, Receipt

T = TypeVar("T")
Columns = tuple[Sequence[bytes], Sequence[str | None] | None, Sequence[str | None] | None]
Send = Callable[[Client, int | None], Awaitable[T]]  # at a broker, to a partition


class RoutedSends:
    """The part of a cluster that chooses brokers, and sends to them."""

    clients: tuple[Client, ...]
    _cores: Sequence[AioCore]
    _routing: Routing

    def _route_by(
        self,
        urls: Sequence[str],
        settings: ClientSettings,
        partition_map: Mapping[str, Sequence[int]] | None,
    ) -> None:
        self._settings = settings
        self._routing = Routing(urls, settings, _look_up_before, partition_map)

    async def _look_up(self, topics: Iterable[str]) -> None:
        """Ask brokers for their partitions of topics."""
        for topic in topics:
            await self._routing.look_up(topic, lambda broker, name: self._cores[broker].topic(name))

    async def _look_up_for(
        self, topic: str, keys: Iterable[str | None], partition: int | None
    ) -> None:
        if any(self._routing.map.needs_lookup(topic, key, partition) for key in keys):
            await self._look_up([topic])

    async def _route(self, topic: str, key: str | None, partition: int | None) -> SendRoute:
        await self._look_up_for(topic, [key], partition)
        return self._routing.required_route(topic, key, partition) or self._any_routes()[0]

    def _any_routes(self) -> list[SendRoute]:
        """Return all brokers in turn, those last that are away or to be avoided."""
        turn = self._routing.brokers_in_turn(self._cores[0].seconds())
        return [
            SendRoute(broker, None)
            for broker in sorted(turn, key=lambda broker: self._cores[broker].is_disconnected)
        ]

    async def _send_one(
        self, topic: str, key: str | None, partition: int | None, send: Send[T]
    ) -> T:
        await self._look_up_for(topic, [key], partition)
        return await self._send(self._routing.required_route(topic, key, partition), send)

    async def _send(self, required: SendRoute | None, send: Send[T]) -> T:
        """Send by the required route, or to the first broker that stores it.

        Each broker has its part of the time-out to be connected in. A connected broker
        may take longer to answer. Raises the last refusal, and at once an error whose
        outcome is unknown.
        """
        routes = [required] if required else self._any_routes()
        refusal: TxmqError | None = None
        for broker, number in routes:
            try:
                await self._cores[broker].wait_connected(self._settings.timeout / len(routes))
                return await send(self.clients[broker], number)
            except TxmqError as error:
                self._routing.avoid(broker, error, self._cores[broker].seconds())
                if not can_fail_over(error):
                    raise
                refusal = error
        assert refusal is not None, "there is at least one broker"
        raise refusal

    async def _send_listed(
        self, topic: str, messages: Sequence[Message], partition: int | None
    ) -> list[Receipt]:
        keys = [message.key for message in messages]
        routes = await self._rows_by_route(topic, keys, partition)
        send_rows: Callable[..., Awaitable[list[Receipt]]] = partial(_send_batch, topic, messages)
        return merge_receipts(
            await self._send_by_route(routes, lambda rows: partial(send_rows, rows))
        )

    async def _send_columns(
        self, topic: str, columns: Columns, partition: int | None
    ) -> list[StoredBatch]:
        keys = columns[1] or [None] * len(columns[0])
        routes = await self._rows_by_route(topic, keys, partition)
        send_rows: Callable[..., Awaitable[list[StoredBatch]]] = partial(_send_many, topic, columns)
        parts = await self._send_by_route(routes, lambda rows: partial(send_rows, rows))
        return [batch for _rows, batches in parts for batch in batches]

    async def _rows_by_route(
        self, topic: str, keys: Sequence[str | None], partition: int | None
    ) -> RowsByRoute:
        await self._look_up_for(topic, keys, partition)
        return self._routing.rows_by_route(topic, keys, partition)

    async def _send_by_route(
        self, routes: RowsByRoute, send_rows: Callable[[Sequence[int]], Send[T]]
    ) -> list[tuple[Sequence[int], T]]:
        """Return the rows of each route with the answer of their broker."""
        done: list[tuple[Sequence[int], T]] = []
        try:
            for required, rows in routes.items():
                done.append((rows, await self._send(required, send_rows(rows))))
        except TxmqError as error:
            if done:  # sent again as a whole, these would be stored twice
                error.outcome = "unknown"
            raise
        return done


def _look_up_before(topic: str) -> NoReturn:
    raise AssertionError(f"topic {topic} was not looked up")


def _send_batch(
    topic: str,
    messages: Sequence[Message],
    rows: Sequence[int],
    client: Client,
    partition: int | None,
) -> Awaitable[list[Receipt]]:
    return client.send_batch(topic, [messages[row] for row in rows], partition=partition)


def _send_many(
    topic: str,
    columns: Sequence[Any],
    rows: Sequence[int],
    client: Client,
    partition: int | None,
) -> Awaitable[list[StoredBatch]]:
    bodies, keys, tags = select_rows(rows, columns)
    assert bodies is not None, "bodies are no optional column"
    return client.send_many(topic, bodies, keys, tags, partition=partition)
