"""The messages that a connection of Kombu's sends."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, Unpack, cast

from kombu.exceptions import OperationalError
from kombu.utils.json import dumps

import txmq
from txmq.client.blocking.after_fork import tell_after_fork
from txmq.client.protocol.sender.rows import Fields
from txmq.errors import TxmqError
from txmq.kombu.messages import due_at, lifetime
from txmq.model.measures import counted

if TYPE_CHECKING:
    from txmq.client.protocol.sender.promise import Promise

ROUTING_KEY: Final = "routing-key"
SAID_S: Final = 3_600.0  # for those who listen and are away for a moment


class Publishing:
    """The messages that a connection sends.

    Each is stored on return. With the option `confirm_publish=False` it is on its way,
    and the client sends it again by itself where a connection is lost. What fails in
    the end is told by a later call.
    """

    def __init__(self, client: txmq.Client, *, confirmed: bool) -> None:
        self._client, self.confirmed = client, confirmed
        self._on_its_way: deque[Promise[txmq.Receipt]] = deque()
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Leave to the parent what it has sent."""
        self._on_its_way = deque()

    def put(self, topic: str, message: dict[str, Any], longest: float | None) -> None:
        """Send a message to a queue, whose messages live for `longest` seconds."""
        self._send(topic, message, deliver_at=due_at(message), ttl=lifetime(message, longest))

    def say(self, topic: str, routing_key: str, message: dict[str, Any]) -> None:
        """Send a message to those who listen to an exchange."""
        headers = {ROUTING_KEY: routing_key}
        self._send(topic, message, headers=headers, ttl=lifetime(message, SAID_S))

    def _send(self, topic: str, message: dict[str, Any], **fields: Unpack[Fields]) -> None:
        """Send a message. Raises OperationalError where earlier ones are not stored:
        then this one is not sent.
        """
        body = dumps(message).encode()
        if self.confirmed:
            self._client.send(topic, body, **fields)
            return
        self.check()
        sent = self._client.send_async(topic, body, **fields)
        self._on_its_way.append(cast("Promise[txmq.Receipt]", sent))  # to ask costs nothing

    def check(self) -> None:
        """Raise OperationalError where messages are not stored."""
        failed: list[TxmqError] = []
        while self._on_its_way and self._on_its_way[0].resolved:
            try:
                self._on_its_way.popleft().result()
            except TxmqError as error:
                failed.append(error)
        if failed:
            count = counted(len(failed), "message")
            raise OperationalError(f"{count} sent before got no receipt: {failed[0]}") from failed[
                0
            ]
