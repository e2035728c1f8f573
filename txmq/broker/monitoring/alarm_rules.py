"""Rules of alarms that the broker checks itself: names, severities, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.broker.monitoring import alarm_conditions as conditions
from txmq.broker.monitoring import group_conditions
from txmq.broker.monitoring.group_conditions import each_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.monitoring.alarm_conditions import Conditions, Raised


class AlarmRule(NamedTuple):
    """A condition: `check` returns the alarm's text while it holds, else "", or one for
    each group that has it.
    """

    name: str
    severity: str
    check: Callable[[Conditions], str | Raised | list[Raised]]
    action: str


ALARM_RULES = (
    AlarmRule(
        "log.restored",
        "critical",
        conditions.log_restored,
        "txmq log lost says what inboxes know and the log lacks; once that is dealt with: "
        "txmq log lost --accept",
    ),
    AlarmRule(
        "log.backup_old",
        "warning",
        conditions.log_backup_old,
        "txmq log backup BACKUP on the broker's machine; systemctl status txmq-backup says why "
        "the daily one fails",
    ),
    AlarmRule(
        "certificate.ends",
        "warning",
        conditions.certificate_ends,
        "renew the file: the broker takes the new one by itself, and open connections stay",
    ),
    AlarmRule(
        "clock.jumped",
        "critical",
        conditions.clock_jumped,
        "set the clock of the broker's machine right; if it is right: txmq clock --confirm",
    ),
    AlarmRule(
        "clock.doubted",
        "warning",
        conditions.clock_doubted,
        "if the broker was down for so long, it goes on by itself, or at once: txmq clock "
        "--confirm; if the clock is wrong, set it right",
    ),
    AlarmRule(
        "clock.differs",
        "warning",
        conditions.clock_differs,
        "txmq clock; set the clocks of broker and databases right",
    ),
    AlarmRule(
        "broker.fault",
        "critical",
        conditions.broker_fault,
        "the broker's log has the traceback: report it; requests and timers go on",
    ),
    AlarmRule(
        "index.rebuilt",
        "warning",
        conditions.index_rebuilt,
        "nothing is lost: the log has it all; where the index was damaged, look after the disk",
    ),
    AlarmRule(
        "broker.silent",
        "critical",
        conditions.broker_silent,
        "its disk hangs: mend it, or start the broker elsewhere",
    ),
    AlarmRule(
        "disk.full",
        "critical",
        conditions.disk_full,
        "free space on the broker's disk: the broker goes on by itself",
    ),
    AlarmRule(
        "disk.behind",
        "warning",
        conditions.disk_behind,
        "producers send more than the disk takes: txmq limits says how much waits; give "
        "it a faster disk, or users a quota",
    ),
    AlarmRule(
        "disk.low",
        "warning",
        conditions.disk_low,
        "free space on the broker's disk, or keep messages for less long",
    ),
    AlarmRule(
        "log.damaged",
        "critical",
        conditions.log_damaged,
        "stop the broker and restore the segment from a backup; its messages are not delivered "
        "meanwhile",
    ),
    AlarmRule(
        "disk.trouble",
        "critical",
        conditions.disk_trouble,
        "mend the disk, or free space on it: the broker retries by itself",
    ),
    AlarmRule(
        "retention.passed_group",
        "critical",
        conditions.retention_passed_group,
        "txmq group show GROUP: passed; keep messages for longer",
    ),
    AlarmRule(
        "retention.held",
        "warning",
        conditions.retention_held,
        "txmq tx list: mend what decides the oldest; segments go by themselves",
    ),
    AlarmRule(
        "transaction.in_doubt",
        "critical",
        conditions.transaction_in_doubt,
        "txmq tx list --state in-doubt says why no check-back found the outcome; decide by "
        "txmq tx commit or rollback only where the decider is lost",
    ),
    AlarmRule(
        "transaction.oldest_undecided",
        "warning",
        conditions.transaction_oldest_undecided,
        "txmq tx show TOKEN names its decider and the decider's last answer",
    ),
    AlarmRule(
        "transaction.open",
        "warning",
        conditions.transaction_open,
        "if its producer is gone for good: txmq tx rollback TOKEN",
    ),
    AlarmRule(
        "transaction.conflict",
        "warning",
        conditions.transaction_conflict,
        "txmq tx list --state conflicts; compare the rows with the messages by token",
    ),
    AlarmRule(
        "transaction.unverified",
        "warning",
        conditions.transaction_unverified,
        "mend the database: it is asked when it is back, and a contradiction is a conflict; "
        "if it is lost for good, decide so once more with --force",
    ),
    AlarmRule(
        "heuristic.mixed",
        "critical",
        conditions.heuristic_mixed,
        "txmq xa list --heuristic; put it right, then txmq xa forget",
    ),
    AlarmRule(
        "resolver.unreachable",
        "critical",
        conditions.resolver_unreachable,
        "mend the database or the DSN of its [[resolver]] section",
    ),
    AlarmRule(
        "resolver.blocked",
        "warning",
        conditions.resolver_blocked,
        "end the session that the text names: it holds locks in front of the resolver",
    ),
    AlarmRule(
        "resolver.refused",
        "critical",
        conditions.resolver_refused,
        "nothing is decided or published there: find out which of the copies is the original; "
        "txmq schema brokers DSN shows who works on a database",
    ),
    AlarmRule(
        "resolver.missing",
        "warning",
        conditions.resolver_missing,
        "name the database under [[resolver]] in the broker's settings",
    ),
    AlarmRule(
        "fence.full",
        "critical",
        conditions.fence_full,
        "txmq group show GROUP names the key; replay or abandon its letter, or txmq group alter "
        "--max-parked",
    ),
    AlarmRule(
        "group.guarded",
        "critical",
        each_group(group_conditions.guarded),
        "mend what the handlers need: the group goes on once a message succeeds; if all that "
        "failed is in a lost local store: txmq recover adopt GROUP STORE; or txmq group resume "
        "GROUP",
    ),
    AlarmRule(
        "group.no_member",
        "critical",
        each_group(group_conditions.no_member),
        "start its consumers; if they shall not run: txmq group pause GROUP; if nobody needs the "
        "group: txmq group delete GROUP",
    ),
    AlarmRule(
        "store.no_owner",
        "critical",
        each_group(group_conditions.lost_store),
        "start the consumer again with its disk; if that is lost: txmq recover adopt GROUP STORE",
    ),
    AlarmRule(
        "store.old",
        "warning",
        each_group(group_conditions.old_store),
        "txmq recover show GROUP STORE says why it fails; then txmq retry now, edit or skip",
    ),
    AlarmRule(
        "group.slow",
        "warning",
        conditions.group_slow,
        "txmq group show GROUP says what stands still; its handlers hang, or prefetch more than "
        "they can process",
    ),
    AlarmRule(
        "group.filters_differ",
        "warning",
        conditions.group_filters_differ,
        "give all members of the group the same tags and selector: what one of them passes over "
        "is settled for all; while a new version is deployed, wait for its end",
    ),
    AlarmRule(
        "group.letters",
        "warning",
        each_group(group_conditions.letters),
        "txmq dlq stats GROUP counts them, txmq group show GROUP names the keys; mend, then "
        "replay, or abandon them",
    ),
    AlarmRule(
        "fence.old",
        "warning",
        each_group(group_conditions.old_fence),
        "txmq group show GROUP names the keys; mend, then replay or abandon their letters; what "
        "is still retried: txmq retry now GROUP, or skip it",
    ),
    AlarmRule(
        "cluster.no_follower",
        "critical",
        conditions.cluster_no_follower,
        "txmq cluster nodes; start a node, if need be with an empty data directory",
    ),
    AlarmRule(
        "cluster.node_silent",
        "warning",
        conditions.cluster_node_silent,
        "look at its process and its log; start it again, or elsewhere with an empty directory",
    ),
    AlarmRule(
        "cluster.node_behind",
        "warning",
        conditions.cluster_node_behind,
        "look for other work on its machine and disk: it would take over late",
    ),
    AlarmRule(
        "alarms.undelivered",
        "warning",
        conditions.alarms_undelivered,
        "mend what its text names, then: txmq alarms test",
    ),
    AlarmRule(
        "plan.paused",
        "warning",
        conditions.plan_paused,
        "txmq plan show PLAN; mend the cause, then txmq plan resume or cancel",
    ),
    AlarmRule(
        "plan.waiting",
        "warning",
        conditions.plan_waiting,
        "txmq plan show says what for: somebody else than its author approves it, anybody resumes "
        "it behind its canary; if its client is gone: txmq plan cancel",
    ),
    AlarmRule(
        "outbox.stuck",
        "critical",
        conditions.outbox_stuck,
        "txmq outbox list DSN; remove the cause, or the row: those of its keys wait behind it",
    ),
    AlarmRule(
        "token.cleanup_stuck",
        "warning",
        conditions.token_cleanup_stuck,
        "remove the reason: old token rows stay until then",
    ),
)
