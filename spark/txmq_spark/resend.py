"""Letters of a plan as new messages, for volumes that a business processes by itself.

One job writes them: it is named by the plan's digest and the topic, so they are sent
once, however often it runs. A task has whole keys, and sends the letters of a key in
the order of publication.

A plan of the broker holds the letters meanwhile: nobody else replays or edits them.
Once the job is committed, they are abandoned, with its name as the reason. The name of
the broker's plan is that of the job: with another one, letters that the job has not
sent would be abandoned, or those that it has sent would be sent to another topic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from txmq_spark.arrow_messages import HEADER_CELLS
from txmq_spark.broker_link import BrokerLink
from txmq_spark.broker_plans import PAGE, hand_over, pages, state_of
from txmq_spark.held_letters import held_letters
from txmq_spark.letter_evidence import LETTER, chain_column
from txmq_spark.plan_directory import StoredPlan

SETTINGS: Final = {"rate": 0}  # the plan is never started
OPERATOR: Final = "txmq-spark"
SENT: Final = "its letters were sent as new messages"
ENDED: Final = ("done", "cancelled")


class ResendResult(NamedTuple):
    """Numbers of letters: `abandoned` by this run once they were sent; `kept` are all
    others of the plan. These were abandoned by an earlier run, or were not sent: they
    are open no more, another plan has them, messages of their keys wait behind them, or
    their messages are damaged.
    """

    topic: str
    abandoned: int
    kept: int


def resend(plan: StoredPlan, url: str, topic: str) -> ResendResult:
    """Send the letters of the plan to a topic, and abandon them.

    Letters that later messages of their key wait behind are left: they have to be
    replayed in place. Raises ConfigError, RequestRejected, TransactionAborted.
    """
    handed = hand_over(url, plan, holding_name(plan, topic), SETTINGS, OPERATOR)
    groups = {one.group: one.name for one in handed}
    if not groups:
        return ResendResult(topic, 0, 0)
    letters = _sendable(plan, url, groups)
    write_letters(in_key_order(letters), url, topic, job_name(plan))
    done = _abandon(letters.select(*LETTER), url, f"sent again to {topic} by {job_name(plan)}")
    with BrokerLink(url) as link:
        for one in groups.values():
            if state_of(link, one) not in ENDED:
                link.call("plan.cancel", name=one, operator=OPERATOR, reason=SENT)
    return ResendResult(topic, done, sum(plan.manifest.replays.values()) - done)


def write_letters(letters: DataFrame, url: str, topic: str, job: str) -> None:
    """Send letters as new messages, in one job that is carried out once."""
    messages = letters.select("body", "key", "tag", HEADER_CELLS)
    writer = messages.write.format("txmq").option("url", url).option("topic", topic)
    writer.option("idempotency_key", job).mode("append").save()


def job_name(plan: StoredPlan) -> str:
    """Return the name of the job that sends the plan's letters to a topic."""
    return f"resend {plan.manifest.digest}"


def holding_name(plan: StoredPlan, topic: str) -> str:
    """Return the name of the broker's plan that holds the letters meanwhile."""
    return f"resend-{sha256(f'{plan.manifest.digest} {topic}'.encode()).hexdigest()[:12]}"


def in_key_order(letters: DataFrame) -> DataFrame:
    """Return letters so that each key is in one task, in the order of publication."""
    spread = letters.repartition("group", "topic", chain_column())
    return spread.sortWithinPartitions("stored_at", "partition", "offset")


def _sendable(plan: StoredPlan, url: str, groups: Mapping[str, str]) -> DataFrame:
    """Return the letters that the broker's plans hold, with their messages."""
    waiting = plan.letters.where("parked > 0").select("group", "topic", "key").distinct()
    chosen = (
        plan.letters.where("replay")
        .join(waiting, ["group", "topic", "key"], "left_anti")
        .where(f.col("group").isin(*groups))
    )
    count = sum(plan.manifest.replays.values())
    return held_letters(chosen, url, groups, count)


def _abandon(letters: DataFrame, url: str, reason: str) -> int:
    def abandon(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with BrokerLink(url) as link:
            for batch in batches:
                done = sum(_abandoned(link, page, reason) for page in pages(batch.to_pylist()))
                yield pa.RecordBatch.from_pydict({"done": pa.array([done], pa.int64())})

    total: Any = letters.mapInArrow(abandon, "done bigint").agg(f.sum("done")).first()
    return int(total[0] or 0)


def _abandoned(link: BrokerLink, page: list[dict[str, Any]], reason: str) -> int:
    assert len(page) <= PAGE, "it is a page"
    places = [(row["topic"], row["partition"], row["offset"]) for row in page]
    reply = link.call(
        "dlq.abandon", group=page[0]["group"], letters=places, operator=OPERATOR, reason=reason
    )
    return len(places) - len(reply["refused"])
