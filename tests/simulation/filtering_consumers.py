"""A member of an ordered group whose program is deployed again and again, each time
with another selector. What the group has accepted it must get all the same.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial

from tests.simulation.actors import PLAIN_KEYS
from tests.simulation.client_consumers import HANDLER_S, ClientConsumer
from tests.simulation.history import InvariantBroken
from tests.simulation.invariants import check_delivery
from tests.simulation.world import SimulatedWorld
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.requests import Request
from txmq.errors import NotLeased
from txmq.wire.data_requests import Opcode

SHARE = 0.15  # of the seeds have one
GROUP = "f"
SOME = "some of t"  # in place of the topic: the group need not process all of it


class FilteringConsumer(ClientConsumer):
    """A member that leaves one key out, another one after each lost connection."""

    group = GROUP

    def __init__(self, world: SimulatedWorld, name: str) -> None:
        self._unwanted = ""  # key
        self._nacked = set[tuple[int, int]]()  # partition and offset, perhaps in vain
        self._accepted = set[tuple[int, int]]()  # those that the broker has confirmed
        super().__init__(world, name)
        world.consumer_groups[GROUP] = SOME

    def _selector(self) -> str:
        self._unwanted = self.rng.choice(PLAIN_KEYS)
        return f"$key <> '{self._unwanted}'"

    def _disconnected(self) -> None:
        if not self.world.over:
            self._start_process()

    async def _send(self, request: Request) -> None:
        await super()._send(request._replace(reply=partial(self._answered, request)))

    def _answered(self, request: Request, payload: bytes, now: float) -> None:
        call = json.loads(request.payload) if request.opcode == Opcode.CALL else {}
        if call.get("call") == "consumer.nack":
            self._accepted.add((call["args"]["partition"], call["args"]["offset"]))
        request.reply(payload, now)

    async def _handle(self, message: DeliveredMessage) -> None:
        process, body = self._operations, message.body.decode()
        place, key = (message.partition, message.offset), body.split("|")[0]
        if self.world.broker is not None:  # it may have died since
            check_delivery(self.world, *place, body)
        if key == self._unwanted:
            self.world.history.counts["accepted unwanted"] += 1
            if place not in self._nacked:
                raise InvariantBroken(f"{body} is not wanted, and was never accepted")
        await self.connection.pause(HANDLER_S)
        if process is not self._operations:  # a deploy has ended its process
            return
        if self.fails(GROUP, body):
            self._nacked.add(place)
            with suppress(NotLeased):
                process.nack(message, None, "failed")
            return
        self.world.history.handled[f"{GROUP}:{body}"] += 1
        process.ack(message, self._now())

    def check(self) -> None:
        """Check at the end that no accepted message was filtered away, and that every
        message was processed that no selector has left out.
        """
        handled = self.world.history.handled
        for place, body in self.world.history.bodies_at.items():
            wanted = place in self._accepted or body.split("|")[0] not in PLAIN_KEYS
            if wanted and not handled[f"{GROUP}:{body}"]:
                raise InvariantBroken(f"{body} was accepted, and never processed")
