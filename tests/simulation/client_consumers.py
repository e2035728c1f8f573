"""Members of an ordered group that are the client's own: its state machine, its local
queue, and its way to repeat what was not answered.

Handlers take their time, so that brokers restart and connections break between a
delivery, the handler's ack or nack, and the answer.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from twisted.internet.defer import Deferred

from tests.simulation.actors import TOPIC, Actor, Changes
from tests.simulation.invariants import check_delivery
from tests.simulation.network import RequestLost
from tests.simulation.world import SimulatedWorld
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.member import Member
from txmq.client.protocol.consumer.operations import Operations
from txmq.client.protocol.consumer.requests import Request
from txmq.client.protocol.consumer.settings import consumer_settings
from txmq.errors import NotLeased, RequestRejected
from txmq.model.retry import RetryPolicy

SHARE = 0.4  # of the seeds have them
GROUP = "r"
MEMBERS = ("r0", "r1")
HANDLERS = 2  # of each member
HANDLER_S = 0.03  # on average, of every second message
QUICK_S = 0.004  # of the others: their acks are still on their way when a broker dies
STEP_S = 0.003
# In all seeds, with messages in hand over whole restarts and acks on their way beside
# them: keys lose their order here first.
SLOW: Final[dict[str, Any]] = {"SHARE": 1.0, "HANDLERS": 4, "HANDLER_S": 0.1, "QUICK_S": 0.002}


class ClientConsumer(Actor):
    """A member with handlers that may fail, and one connection after the other."""

    group, topic = GROUP, TOPIC

    def __init__(self, world: SimulatedWorld, name: str) -> None:
        super().__init__(world, name)
        self._changes = Changes(world.clock, self.rng, STEP_S)
        world.consumer_groups[self.group] = self.topic
        self._start_process()

    def _start_process(self) -> None:
        retry = RetryPolicy((0.02, 0.04), retries=2)
        settings = consumer_settings(
            self.group,
            [self.topic],
            mode="ordered",
            member=self.name,
            retry=retry,
            lease=1.0,
            session=1.0,
            selector=self._selector(),
        )
        self.member = Member(settings, self.new_id().hex())
        self._operations = Operations(self.member)

    def _selector(self) -> str | None:
        return None

    async def run(self) -> None:
        for _ in range(HANDLERS):
            Deferred.fromCoroutine(self._handle_all()).addErrback(self.world.failed)
        while not self.world.over:
            await self.connection.connect()
            self.member.connected(self._now())
            while self.connection.transport is not None and not self.world.over:
                if self.member.failure is not None:
                    raise self.member.failure
                if self.member.needs_reconnect:
                    self.connection.drop()
                    break
                for request in self.member.requests(self._now()):
                    Deferred.fromCoroutine(self._send(request)).addErrback(self.world.failed)
                await self._changes.wait(self.member.wake_at())
            self.member.disconnected(self._now())
            self._disconnected()

    def _disconnected(self) -> None:
        """Go on with the same process."""

    def _now(self) -> float:
        return self.world.clock.seconds()

    async def _send(self, request: Request) -> None:
        try:
            payload = await self.connection.request(
                request.opcode, request.payload, request.timeout_s
            )
        except RequestLost:
            pass
        except RequestRejected as error:
            self.world.history.counts["nacks refused"] += isinstance(error, NotLeased)
            request.refused(error, self._now())
        else:
            request.reply(payload, self._now())
        self._changes.note()

    async def _handle_all(self) -> None:
        while not self.world.over:
            message = self._operations.receive(self._now())
            if message is None:
                await self._changes.wait()
            else:
                await self._handle(message)
                self._changes.note()

    async def _handle(self, message: DeliveredMessage) -> None:
        history, body = self.world.history, message.body.decode()
        if self.world.broker is not None:  # it may have died since
            check_delivery(self.world, message.partition, message.offset, body)
        await self.connection.pause(HANDLER_S if message.offset % 2 else QUICK_S)
        if self.fails(GROUP, body):
            with suppress(NotLeased):
                self._operations.nack(message, None, "failed")
            return
        key, version, _rest = body.split("|")
        if int(version):
            history.record_processed(f"{GROUP}:{key}", int(version))
        history.record_in_order(GROUP, key, message.partition, message.offset)
        history.handled[f"{GROUP}:{body}"] += 1
        self._operations.ack(message, self._now())
