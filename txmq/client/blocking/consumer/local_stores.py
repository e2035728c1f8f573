"""The local stores of a member at the disk, in a thread of their own, for all faces.

The member's state machine makes jobs (`LocalRecovery`); this thread does them one after
the other and posts their results back to where the state machine lives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from uuid import UUID

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.operations import MAX_DELAY_S
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.client.protocol.consumer.store_jobs import JobResult, StoreJob, StoreName, Taken
from txmq.crashpoints import crashpoint
from txmq.errors import DiskFull, ForeignStore, StoreError, StoreFull, TxmqError
from txmq.model.retry import FailureReport
from txmq.model.units import SECOND
from txmq.recover.local import (
    Change,
    LocalStore,
    State,
    StoredMessage,
    StoreLimits,
    StoreOwner,
)
from txmq.recover.local.folder import move_aside
from txmq.recover.local.handed_out import HandedOut

TICK_S = 0.1  # between two looks at the clock, for due messages and timeouts
MOST_SKIPPED = 64  # due messages that are read and passed over at once
KEPT_FAILURE = FailureReport()  # in a change: the failure that is stored stays
log = get_logger()


class StoreThread:
    """A thread that does jobs, in their order.

    `post` is called in the thread with each result, and with None now and then.
    """

    def __init__(self, stores: LocalStores, post: Callable[[JobResult | None], None]) -> None:
        self._stores, self._post = stores, post
        self._jobs: SimpleQueue[StoreJob | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="txmq-local-store", daemon=True)
        self._thread.start()

    def submit(self, job: StoreJob) -> None:
        """Have a job done."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Do what was submitted, close the stores and end."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=TICK_S)
                except Empty:
                    self._stores.settle()
                    self._post(None)
                    continue
                if job is None:
                    return
                self._post(self._stores.perform(job))
        finally:
            self._stores.close()


class LocalStores:
    """The open stores of one member, one for each topic. For one thread."""

    def __init__(
        self,
        settings: ConsumerSettings,
        log_id: Callable[[], UUID | None],
        now: Callable[[], int],
    ) -> None:
        self._settings, self._log_id, self._now = settings, log_id, now
        self._stores: dict[str, LocalStore] = {}
        self._handed: dict[str, HandedOut] = {}

    def close(self) -> None:
        """Close all stores. What is in them stays."""
        for topic in list(self._stores):
            self._close(topic)

    def _close(self, topic: str) -> None:
        for opened in (self._handed.pop(topic, None), self._stores.pop(topic, None)):
            if opened is not None:
                with suppress(TxmqError, OSError):
                    opened.close()

    def settle(self) -> None:
        """Bring to disk what may wait for other work, where there is none.

        A list of the directory, a copy and the next process then see it.
        """
        for store in self._stores.values():
            with suppress(StoreError):  # the next job raises it
                store.settle()

    def perform(self, job: StoreJob) -> JobResult:
        """Do a job. Errors are in the result."""
        result = JobResult(job)
        try:
            if job.open_as is not None:
                self._open(job.open_as, result)
            store = self._stores[job.topic]
            self._write(store, result)
            result.store_id = store.id
            try:
                self._quarantine(store, job)
                self._read(store, result)
            except DiskFull as error:  # nothing is read or told before it is on disk
                result.full, result.stuck = error, True
            result.stats, result.next_due = store.stats(), store.next_due()
        except TxmqError as error:
            result.error = error
        except Exception as error:  # it ends the consumer, not only this thread
            log.exception("local_store.failed", topic=job.topic)
            result.error = StoreError(
                f"the local store of topic {job.topic!r} has failed: {error!r}",
                hint="what it has stays on disk; start the consumer again",
            )
        return result

    def _open(self, name: StoreName, result: JobResult) -> None:
        log_id = self._log_id()
        directory = self._settings.local_store
        assert directory is not None, "only consumers with a store make jobs"
        assert log_id is not None, "it was connected"
        self._close(name.topic)
        settings = self._settings
        owner = StoreOwner(*name, log_id, settings.ordered)
        limits = StoreLimits(settings.local_store_bytes, settings.local_store_messages)
        try:
            store, report = LocalStore.open(directory, owner, limits, now=self._now)
        except ForeignStore:
            moved_to = move_aside(directory, owner)
            if moved_to is None:
                raise
            log.warning(
                "local_store.topic_replaced",
                topic=owner.topic,
                moved_to=moved_to,
                hint="its messages were of a topic that was deleted: see txmq recover export",
            )
            store, report = LocalStore.open(directory, owner, limits, now=self._now)
        self._serve(name.topic, store, HandedOut(store.path))
        result.report = report
        for finding in report.findings():
            log.error("local_store.damaged", group=name.group, finding=finding)
        policy = result.job.policy
        longest = int(max(policy.delays_us) * (1 + policy.jitter))
        with suppress(DiskFull):
            bounded = store.bound_waits(longest, MAX_DELAY_S * SECOND)
            if bounded:
                log.warning("local_store.waits_bounded", topic=name.topic, messages=bounded)

    def _serve(self, topic: str, store: LocalStore, marks: HandedOut) -> None:
        """Begin with an open store: take back the attempts that no handler had begun
        when the process before died.
        """
        self._stores[topic], self._handed[topic] = store, marks
        changes = []
        for place, attempt in marks.not_begun:
            entry = store.entry(place)
            if entry is not None and (entry.state, entry.attempt) == (State.STORED, attempt):
                changes.append(Change(place, State.STORED, attempt - 1, self._now(), KEPT_FAILURE))
        if changes:
            with suppress(DiskFull):
                store.record(changes)

    def _write(self, store: LocalStore, result: JobResult) -> None:
        job = result.job
        unwritten = self._put(store, result)
        changes = [change for change in job.changes if change.place not in unwritten]
        changes += self._ordered_changes(store, result)
        try:
            if changes:
                crashpoint("consumer.before_outcome")
                store.record(changes)
                crashpoint("consumer.after_outcome")
        except DiskFull as error:  # the store keeps them in memory, and writes them later
            result.full = error
        with suppress(DiskFull):  # written later; until then a restart may tell them again
            store.told(job.told)
        with suppress(DiskFull):
            store.forget(job.forget)
        handed = self._handed[job.topic]
        for place in (*(change.place for change in changes), *job.forget):
            handed.end(place)

    def _quarantine(self, store: LocalStore, job: StoreJob) -> None:
        if job.unknown:
            count = store.quarantine(job.unknown, "the broker does not know them")
            log.warning("local_store.quarantined", topic=job.topic, messages=count)

    def _put(self, store: LocalStore, result: JobResult) -> set[object]:
        """Put messages. Return the places of those that do not fit."""
        puts = result.job.puts
        if not puts:
            return set()
        # A message that comes once more is another delivery: it supersedes the first.
        known = [put.message.place for put in puts if store.entry(put.message.place)]
        crashpoint("consumer.before_store")
        try:
            if known:
                store.forget(known)
            store.put(puts)
        except (StoreFull, DiskFull) as error:
            result.full = error
            return {put.message.place for put in puts}
        crashpoint("consumer.after_store")
        return set()

    def _ordered_changes(self, store: LocalStore, result: JobResult) -> list[Change]:
        """Return the changes that operators have ordered."""
        job, changes = result.job, []
        for place in job.hasten:
            entry = store.entry(place)
            if entry is None:  # lost here: the broker delivers its copy
                result.missing.append(place)
            elif entry.state is State.STORED:
                changes.append(Change(place, State.STORED, entry.attempt, job.now, KEPT_FAILURE))
        for place in job.return_to_broker:
            entry = store.entry(place)
            if entry is None:
                result.missing.append(place)
            elif entry.state is State.STORED:
                changes.append(Change(place, State.RETURNED, entry.attempt, 0, KEPT_FAILURE))
        return changes

    def _read(self, store: LocalStore, result: JobResult) -> None:
        job = result.job
        if job.take:
            self._take(store, result)
        if job.untold:
            result.entries = store.untold(job.untold)
        elif job.again:
            result.entries = store.entries(job.again_after, job.again)

    def _take(self, store: LocalStore, result: JobResult) -> None:
        """Hand out due messages. Their attempts are counted before they begin, so that
        a message that kills its process counts, too.
        """
        job, counted = result.job, list[Change]()
        handed = self._handed[job.topic]
        for message in store.due(
            job.now, job.take + min(len(job.skip) + len(job.skip_keys), MOST_SKIPPED)
        ):
            skipped = message.place in job.skip or message.key in job.skip_keys
            if skipped or len(result.taken) >= job.take:
                store.release(message.place)
                continue
            change = self._count(message, job)
            counted.append(change)
            if change.state is State.STORED:
                mark = handed.hand_out(message.place, change.attempt)
                result.taken.append(Taken(message, change.attempt, mark.begin))
            else:
                result.exhausted = True
        if not counted:
            return
        crashpoint("consumer.before_attempt")
        try:
            store.record(counted)
        except DiskFull as error:  # they are due again later
            result.full, result.taken = error, []
        crashpoint("consumer.after_attempt")

    def _count(self, message: StoredMessage, job: StoreJob) -> Change:
        """Return the change that counts the next attempt; the last one has failed with
        its process if there is no other.
        """
        place, attempt, policy = message.place, message.attempt, job.policy
        if attempt > policy.retries:
            return Change(place, State.DEAD, attempt, 0, KEPT_FAILURE)
        # The due time is for the case that this process dies.
        due = job.now + (policy.delay(attempt + 1) or policy.delays_us[-1])
        return Change(place, State.STORED, attempt + 1, due, KEPT_FAILURE)
