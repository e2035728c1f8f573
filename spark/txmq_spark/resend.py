"""Letters of a plan as new messages, for volumes that a business processes by itself.

One job writes them: it is named by the plan's digest and the topic, so they are sent
once, however often it runs. A task has whole keys, and sends the letters of a key in
the order of publication.

A plan of the broker holds the letters meanwhile: nobody else replays or edits them.
What it holds and is not sent leaves it before the job is committed. Then it is ordered
to abandon the others, with the job's name as the reason: the broker goes through them
by itself. The name of the broker's plan is that of the job: with another one, letters
that the job has not sent would be abandoned, or those that it has sent would be sent to
another topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from txmq.crashpoints import crashpoint
from txmq.errors import ConfigError
from txmq_spark.arrow_messages import HEADER_CELLS
from txmq_spark.broker_link import BrokerLink
from txmq_spark.broker_plans import hand_over, wait_for
from txmq_spark.held_letters import OPERATOR, WAITS, held_letters
from txmq_spark.letter_evidence import chain_column
from txmq_spark.plan_directory import StoredPlan
from txmq_spark.writing import is_committed

SETTINGS: Final = {"rate": 0}  # the plan is never started
KEY: Final = ["group", "topic", "key"]
ENDED: Final = ("done", "cancelled")


class ResendResult(NamedTuple):
    """Numbers of letters: `abandoned` once they were sent, if an earlier run has not
    seen the end of that; `kept` are all others of the plan. These were abandoned
    before, or were not sent: they are open no more, another plan has them, messages of
    their keys wait behind them, or their messages are damaged.
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
    handed = hand_over(url, plan, holding_name(plan, topic), SETTINGS, OPERATOR)
    with BrokerLink(url) as link:
        shown = {one.group: link.call("plan.show", name=one.name) for one in handed}
        for one in shown.values():
            _require_not_started(one)
        open_ones = {group: one for group, one in shown.items() if one["state"] not in ENDED}
        holding = {group: one["name"] for group, one in open_ones.items() if one["planned"]}
        # Letters that were sent are not read again: one that cannot be read since would
        # leave the broker's plan, and be open like one that was not sent.
        if holding and not is_committed(link, topic, job_name(plan)):
            write_letters(_sendable(plan, url, holding), url, topic, job_name(plan))
        crashpoint("spark.letters_sent")
        reason = f"sent again to {topic} by {job_name(plan)}"
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
    """Return the letters that the broker's plans hold, with their messages, in the
    order of their keys.
    """
    waiting = (
        plan.letters.where("parked > 0").select(*KEY).distinct().withColumn(WAITS, f.lit(True))
    )
    places = (
        plan.letters.where("replay")
        .where(f.col("group").isin(*groups))
        .join(f.broadcast(waiting), KEY, "left")
        .withColumn(WAITS, f.coalesce(WAITS, f.lit(False)))
    )
    return in_key_order(held_letters(places, url, groups))
