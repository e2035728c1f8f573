"""The calls of a consumer that wait for nothing, the same in all faces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from txmq.client.protocol.consumer.fetched import ReceivedBatch
from txmq.client.protocol.consumer.member_set import DrivenMember, MemberSet
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.client.protocol.consumer.stats import ConsumerStats
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import ReceivedMessage
from txmq.model.topic_partition import PartitionName

M = TypeVar("M", bound=DrivenMember)


class ConsumerCalls(Generic[M]):
    """A consumer of one broker or of several, as users hold it.

    Messages go to the member that they were delivered to.
    """

    settings: ConsumerSettings
    _members: MemberSet[M]

    @property
    def closed(self) -> bool:
        """True once the consumer delivers nothing more."""
        return self._members.closed

    @property
    def stats(self) -> ConsumerStats:
        """Counters since the consumer was made."""
        return self._members.stats

    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None:
        """Ack these messages, without waiting.

        Messages that are settled already are skipped.
        """
        self._members.ack_many(messages)

    def nack(
        self,
        message: ReceivedMessage,
        delay: Duration | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """Nack a failed message: it is delivered again after `delay` seconds, or by the
        policy of the group.

        `error` is stored with it. In an ordered group later messages of its key wait
        for it. Raises NotLeased where the message is settled already.
        """
        member = self._members.single or self._members.member_of(message)
        member.nack(message, seconds_of(delay, "delay"), error)

    def nack_batch(
        self,
        batch: ReceivedBatch,
        delay: Duration | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """Nack all messages of the batch that are not settled yet."""
        self._members.member_of(batch).nack_many(
            batch.messages(), seconds_of(delay, "delay"), error
        )

    def nack_many(
        self,
        messages: Iterable[ReceivedMessage],
        delay: Duration | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """Nack these messages, in this order.

        Messages that are settled already are skipped.
        """
        self._members.nack_many(messages, seconds_of(delay, "delay"), error)

    def dead_letter(self, message: ReceivedMessage, reason: str) -> None:
        """Move the message to the dead letters at once.

        Raises NotLeased where the message is settled already.
        """
        self._members.member_of(message).nack(message, None, reason, dead=True)

    def postpone(self, message: ReceivedMessage, delay: Duration | None = None) -> None:
        """Have the message delivered again after `delay` seconds; this delivery does
        not count as an attempt.

        None: after the first delay of the group's policy. In an ordered group later
        messages of its key wait for it. Raises NotLeased where the message is settled
        already.
        """
        self._members.member_of(message).postpone(message, seconds_of(delay, "delay"))

    def extend(self, message: ReceivedMessage, duration: Duration | None = None) -> None:
        """Give the message's handler more time: `duration` from now on, or
        `consume_timeout` once more.

        Raises NotLeased where the message is settled already, so that its handler may
        stop.
        """
        self._members.member_of(message).extend(message, seconds_of(duration, "duration"))

    def give_back(self, messages: Iterable[ReceivedMessage]) -> None:
        """Return messages to the group as if they had not been delivered.

        In an ordered group only after a nack of an earlier message of their key, or
        before `close`: otherwise later messages could overtake them.
        """
        self._members.give_back(messages)

    def pause(self, *topics: str) -> None:
        """Deliver nothing of these topics, or of any where none is named, until
        `resume`.

        The member keeps its partitions. What waits locally goes back to the group as if
        it had not been delivered: no attempt is counted, no lease runs out. Outstanding
        messages may be settled. The pause holds for this consumer alone, through
        rebalances and lost connections. To pause a whole group use `txmq group pause`.
        Raises LocalProtocolError for a topic that the consumer does not read.
        """
        for member in self._members.members:
            member.pause(topics, paused=True)

    def resume(self, *topics: str) -> None:
        """Deliver these topics again after `pause(*topics)`, all topics after
        `pause()`.

        Each call undoes its own counterpart: after `pause()` and `resume()`, topics
        that were paused by name still are.
        """
        for member in self._members.members:
            member.pause(topics, paused=False)

    @property
    def paused(self) -> frozenset[str]:
        """The paused topics; after `pause()` all that the consumer reads."""
        return self._members.paused


class SingleConsumer(ConsumerCalls[M]):
    """A consumer of one broker."""

    @property
    def group(self) -> str:
        """The name of the group at the broker: for a broadcast member its own,
        `group@member`.
        """
        return self._members.members[0].member.group

    @property
    def member(self) -> str:
        """The name of the member, given or made by the broker."""
        return self._members.members[0].member.name

    @property
    def epoch(self) -> int:
        """The number of resets of the group that reprocess messages. The inbox records
        messages by it.
        """
        return self._members.members[0].member.epoch

    @property
    def assignment(self) -> frozenset[PartitionName]:
        """The partitions assigned to this member, as (topic, number), as the broker
        last reported them.
        """
        return self._members.members[0].member.assignment
