"""Letters of a plan as new messages, for volumes that a business processes by itself.

One job writes them: it is named by the plan's digest and the topic, so they are sent
once, however often it runs. A task has whole keys, and stores their letters as one
bundle, in the order of publication. It gets their places only: it reads the messages
itself, and Java has none of them. The driver's decision publishes one bundle of each
task (`job_bundles`).

A plan of the broker holds the letters meanwhile: nobody else replays or edits them.
What it holds and is not sent leaves it before the job is committed. Then it is ordered
to abandon the others, with the job's name as the reason: the broker goes through them
by itself. The broker's plan is named by the plan's digest and the topic, as the job is.
With a plan of another job, letters that this one has not sent would be abandoned, or
those that it has sent would go to another topic as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

import pyarrow as pa
from pyspark.sql import functions as f

from txmq.client.protocol.plans import ENDED
from txmq.crashpoints import crashpoint
from txmq.errors import ConfigError, TxmqError
from txmq_spark.plan.broker_plans import hand_over, wait_for
from txmq_spark.plan.directory import StoredPlan
from txmq_spark.plan.held_letters import OPERATOR, HeldSource, held_letters
from txmq_spark.plan.letter_shares import in_key_order, share_out
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.job_bundles import find_job, publish, store_bundle, task_client
from txmq_spark.source.logs import url_of
from txmq_spark.source.writing import job_name

if TYPE_CHECKING:
    from txmq.client.blocking.transaction.jobs import JobBundle

SETTINGS: Final = {"rate": 0}  # the plan is never started


class ResendResult(NamedTuple):
    """Numbers of letters: those that were sent and then `abandoned`, unless an earlier
    run has seen their end, and those that were `kept`.

    Kept are all others of the plan: an earlier run has seen them abandoned, or they
    were not sent. These are not open any more, another plan has them, messages of their
    keys wait behind them, or their messages are damaged.
    """

    topic: str
    abandoned: int
    kept: int


def resend(plan: StoredPlan, url: str, topic: str, *, wait: bool = True) -> ResendResult:
    """Send the letters of the plan to a topic, and have the broker abandon them; wait
    for that.

    Letters that later messages of their key wait behind are left: they have to be
    replayed in place. Raises ConfigError, RequestRejected, TransactionAborted.
    """
    url = url_of(url, plan.manifest.facts.log_id)
    handed = hand_over(url, plan, holding_name(plan, topic), SETTINGS, OPERATOR)
    with BrokerLink(url) as link:
        shown = {one.group: link.call("plan.show", name=one.name) for one in handed}
        for one in shown.values():
            _require_not_started(one)
        open_ones = {group: one for group, one in shown.items() if one["state"] not in ENDED}
        holding = {group: one["name"] for group, one in open_ones.items() if one["planned"]}
        # Letters that were sent are not read again: one that cannot be read since would
        # leave the broker's plan, and be open like one that was not sent.
        job = find_job(link, job_name(topic, resend_key(plan)))
        if holding and not job.committed:
            write_letters(plan, url, holding, topic, job.token)
        crashpoint("spark.letters_sent")
        reason = f"sent again to {topic} by {resend_key(plan)}"
        names = [one["name"] for one in open_ones.values()]
        for name in names:
            link.call("plan.abandon", name=name, operator=OPERATOR, reason=reason)
        over = (lambda now: now["state"] in ENDED) if wait else (lambda _now: True)
        after = [wait_for(link, name, over) for name in names]
    done = sum(one["ended"] + one["planned"] for one in after)
    return ResendResult(topic, done, sum(plan.manifest.replays.values()) - done)


def _require_not_started(shown: Mapping[str, Any]) -> None:
    """Raise ConfigError where somebody has started a plan: the broker puts its letters
    back, and they would be processed twice.
    """
    if shown["started_at"]:
        raise ConfigError(
            "plan",
            f"plan {shown['name']} was started: the broker replays the letters in their places",
            hint="let it end, or cancel it; then reconcile again",
        )


def write_letters(
    plan: StoredPlan, url: str, groups: Mapping[str, str], topic: str, job: UUID
) -> None:
    """Send the letters that the broker's plans hold as new messages, in one job that is
    carried out once; `groups` are the plans' names by group.

    Raises TransactionAborted where another run of the job rolled it back.
    """
    try:
        bundles = store_letters(plan, url, groups, topic, job)
        with task_client(url) as client:
            publish(client, job, bundles)
    except BaseException:
        # what is stored of it would be kept until the job's time is over
        with suppress(TxmqError), task_client(url) as client:
            client.job(job).abort()
        raise


def store_letters(
    plan: StoredPlan, url: str, groups: Mapping[str, str], topic: str, job: UUID
) -> list[UUID]:
    """Store the letters as bundles of a job, one for each task; return their tokens."""
    letters = plan.letters.where(f.col("group").isin(*groups))
    partitions = {name: len(ends) for name, ends in plan.manifest.facts.ends.items()}
    shares = share_out(letters, partitions)
    if not shares.tasks:
        return []
    sources = [HeldSource(groups[one.group], *one[1:3]) for one in shares.sources]

    def store(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with BrokerLink(url) as link, task_client(url) as client:

            def fill(bundle: JobBundle) -> int:
                messages = 0
                for rows in held_letters(link, sources, batches):
                    bundle.send_rows(topic, rows, rows.size)
                    messages += len(rows)
                return messages

            token, _messages = store_bundle(client, job, fill)
        yield pa.RecordBatch.from_pydict({"token": pa.array([token], pa.string())})

    # Of several attempts of a task, Spark returns the rows of one.
    stored = in_key_order(letters, shares).mapInArrow(store, "token string").collect()
    return [UUID(row["token"]) for row in stored if row["token"]]


def resend_key(plan: StoredPlan) -> str:
    """Return the idempotency key of the write that sends the plan's letters."""
    return f"resend {plan.manifest.digest}"


def holding_name(plan: StoredPlan, topic: str) -> str:
    """Return the name of the broker's plan that holds the letters meanwhile."""
    return f"resend-{sha256(f'{plan.manifest.digest} {topic}'.encode()).hexdigest()[:12]}"
