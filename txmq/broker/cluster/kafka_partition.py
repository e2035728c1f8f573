"""The partition of a shared log in Kafka, or in an engine that speaks its protocol.

librdkafka works in threads of its own. Two threads here wait for what it has, and bring
it to the reactor: each report at once, records several at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeAlias

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from txmq.broker.cluster.kafka_client import KafkaAddress, unavailable
from txmq.store.shared.partition import CaughtUp, Deliver, Lost, Reported

if TYPE_CHECKING:
    from txmq.broker.reactor.interfaces import CallsFromThreads

# The one partition of the topic.
NUMBER: Final = 0
# One record in flight and one in a batch: none overtakes another, none waits for one.
# Idempotence: one that is sent again counts once while its producer lives.
SAFE_WRITES: Final = {
    "acks": "all",
    "batch.num.messages": 1,
    "enable.idempotence": True,
    "linger.ms": 0,
    "max.in.flight.requests.per.connection": 1,
    "request.timeout.ms": 3_000,
}
# No group: the log of a node has its position. A reader whose offset is away gets an
# error, and no other offset. Kafka gathers records for it: an answer for each of them
# would cost a leader and Kafka more than to write it.
WHOLE_READS: Final = {
    "auto.offset.reset": "error",
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "fetch.error.backoff.ms": 20,
    "fetch.min.bytes": 512 << 10,
    "fetch.queue.backoff.ms": 20,
    "fetch.wait.max.ms": 50,
    "group.id": "txmq",  # unused, and asked for
    "isolation.level": "read_uncommitted",
    "queued.max.messages.kbytes": 8 << 10,
}
# What was read is away, or another record is there.
LOST: Final = (KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION)
# A thread sees so late that it has to end.
POLL_S: Final = 0.1
FORGET_S: Final = 30.0
# A log that has a leader is never silent so long. A consumer was seen to stand still
# for good after moves of the partition's leader (librdkafka 2.16.0, in its mock).
REOPEN_S: Final = 10.0
# Records that the reactor takes at a time, of up to 1 MiB each.
AT_ONCE: Final = 16

Call: TypeAlias = Callable[[Sequence[Callable[[], None]]], None]


class KafkaPartition:
    """A `Partition`: partition 0 of a topic."""

    def __init__(
        self,
        reactor: CallsFromThreads,
        kafka: KafkaAddress,
        topic: str,
        *,
        report_within_s: float = 30.0,
    ) -> None:
        """`report_within_s`: so long a record is tried before it has failed."""
        self._reactor, self._kafka, self._topic = reactor, kafka, topic
        self._writes = {"message.timeout.ms": int(report_within_s * 1_000)}
        self._appender: _Appender | None = None
        self._reader: _Reader | None = None
        self._closed = False

    def produce(self, data: bytes, reported: Reported) -> None:
        # A follower needs no producer, and one that has failed is not used again:
        # it would go on with what came after the record that it dropped.
        if self._appender is None or self._appender.is_stopped:
            producer = self._kafka.client(Producer, {**SAFE_WRITES, **self._writes})
            self._appender = _Appender(producer, self._topic, self._call)
        self._appender.produce(data, reported)

    def read_from(self, offset: int, deliver: Deliver, caught_up: CaughtUp, lost: Lost) -> None:
        place = TopicPartition(self._topic, NUMBER, offset)
        told = (deliver, caught_up, lost)
        self._reader = _Reader(self._kafka, place, told, self._call)

    def forget_before(self, offset: int) -> None:
        Thread(target=self._forget, args=(offset,), name="txmq-kafka-forgets", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        for thread in self._threads():
            thread.stop()

    @property
    def is_over(self) -> bool:
        """Whether the threads have ended, after `close`. They may wait for Kafka."""
        return not any(thread.is_alive() for thread in self._threads())

    def _threads(self) -> list[_Worker]:
        return [thread for thread in (self._appender, self._reader) if thread is not None]

    def _forget(self, offset: int) -> None:
        admin, place = self._kafka.client(AdminClient), TopicPartition(self._topic, NUMBER, offset)
        [done] = admin.delete_records([place], request_timeout=FORGET_S).values()
        try:
            done.result()
        except KafkaException as failed:  # the next call removes these records as well
            self._kafka.note(failed.args[0])

    def _call(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make calls in the reactor's thread, up to the one that closes this."""
        self._reactor.callFromThread(self._call_while_open, calls)

    def _call_while_open(self, calls: Sequence[Callable[[], None]]) -> None:
        for call in calls:
            if self._closed:
                return
            call()


class _Worker(Thread):
    """A thread that waits for a client of Kafka, and ends soon after `stop`."""

    def __init__(self, name: str, call: Call) -> None:
        super().__init__(name=f"txmq-kafka-{name}", daemon=True)
        self._call = call
        self._over = Event()

    @property
    def is_stopped(self) -> bool:
        return self._over.is_set()

    def stop(self) -> None:
        self._over.set()


class _Appender(_Worker):
    """A producer, and the thread that takes its delivery reports."""

    def __init__(self, producer: Producer, topic: str, call: Call) -> None:
        super().__init__("reports", call)
        self._producer, self._topic = producer, topic
        self.start()

    def produce(self, data: bytes, reported: Reported) -> None:
        done = partial(self._note, reported)
        try:
            self._producer.produce(self._topic, data, partition=NUMBER, on_delivery=done)
        except KafkaException as failed:
            self._call([partial(self._report, reported, failed.args[0], None)])

    def run(self) -> None:
        while not self.is_stopped:
            self._producer.poll(POLL_S)
        self._producer.purge()
        self._producer.poll(0)
        del self._producer  # which waits for its threads: here, not in the reactor

    def _note(self, reported: Reported, error: KafkaError | None, message: Message) -> None:
        offset = None if error else message.offset()
        self._call([partial(self._report, reported, error, offset)])

    def _report(self, reported: Reported, error: KafkaError | None, offset: int | None) -> None:
        if error is None:
            reported(None, offset)
        else:
            self.stop()
            reported(unavailable("take a record", error), None)


class _Reader(_Worker):
    """A consumer, and the thread that takes its records."""

    def __init__(
        self,
        kafka: KafkaAddress,
        place: TopicPartition,
        told: tuple[Deliver, CaughtUp, Lost],
        call: Call,
    ) -> None:
        super().__init__("records", call)
        self._kafka, self._next = kafka, place
        self._end = -1  # that was told of last
        self._consumer = kafka.client(Consumer, WHOLE_READS)
        self._deliver, self._caught_up, self._lost = told
        self._taken = Event()
        self.start()

    def run(self) -> None:
        self._consumer.assign([self._next])
        heard_at = monotonic()
        while not self.is_stopped:
            # `consume` alone would wait until it has as many as it may return.
            if (first := self._consumer.poll(POLL_S)) is not None:
                self._bring([first, *self._consumer.consume(AT_ONCE - 1, timeout=0)])
                heard_at = monotonic()
            elif monotonic() - heard_at > REOPEN_S:
                self._reopen()
                heard_at = monotonic()
        self._consumer.close()

    def _reopen(self) -> None:
        """Go on with a new consumer. To close one that stands still may take long."""
        Thread(target=self._consumer.close, name="txmq-kafka-closes", daemon=True).start()
        self._consumer = self._kafka.client(Consumer, WHOLE_READS)
        self._consumer.assign([self._next])

    def _bring(self, messages: list[Message]) -> None:
        """Have the reactor take messages before there are more."""
        calls: list[Callable[[], None]] = []
        for message in messages:
            error = message.error()
            if error is None:
                calls.append(self._told(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                calls += self._told_of_end(message.offset() or 0)
            else:
                calls += self._after(error)
                break
        # Of the end itself Kafka tells only while nobody writes.
        _first, end = self._consumer.get_watermark_offsets(self._next, cached=True)
        if end == self._next.offset:
            calls += self._told_of_end(end)
        self._taken.clear()
        self._call([*calls, self._taken.set])
        while not self.is_stopped and not self._taken.wait(POLL_S):
            pass

    def _told_of_end(self, end: int) -> Iterator[Callable[[], None]]:
        """Yield the call that tells of the end, once for each."""
        if end != self._end:
            self._end = end
            yield partial(self._caught_up, end)

    def _told(self, message: Message) -> Callable[[], None]:
        """Return the call that tells of a record."""
        offset = message.offset() or 0
        # With the epoch of its leader, an offset tells whether the log was cut since.
        self._next = TopicPartition(
            self._next.topic, NUMBER, offset + 1, leader_epoch=message.leader_epoch()
        )
        return partial(self._deliver, offset, message.value() or b"")

    def _after(self, error: KafkaError) -> Iterator[Callable[[], None]]:
        """Yield the call that tells of what was lost; after other errors, go on."""
        if error.code() in LOST:
            yield from self._told_of_loss()
            return
        self._kafka.note(error)
        self._over.wait(POLL_S)
        # The consumer would skip a record that it cannot read.
        self._consumer.assign([self._next])

    def _told_of_loss(self) -> Iterator[Callable[[], None]]:
        """Yield the call with the first offset that is there, and read nothing more."""
        while not self.is_stopped:
            with suppress(KafkaException):
                first, _next = self._consumer.get_watermark_offsets(self._next, timeout=1.0)
                self.stop()
                yield partial(self._lost, first)
