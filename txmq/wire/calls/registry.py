"""Control calls (docs/FORMATS.md 2.3): the arguments of each, strictly checked."""

from __future__ import annotations

from functools import cache
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from txmq.errors import RemoteProtocolError
from txmq.errors.validation import first_mistake
from txmq.wire.calls import (
    audit,
    consumers,
    letters,
    logs,
    messages,
    plans,
    recover,
    topics,
    transactions,
    users,
    xa,
)
from txmq.wire.calls.alarms import AlarmsReport
from txmq.wire.calls.arguments import (
    AddLogs,
    Args,
    ChangeLog,
    ClockConfirm,
    CopyLogs,
    ListArgs,
    NoArgs,
    SeriesArgs,
    StatsArgs,
    StepDown,
)
from txmq.wire.json import WireModel, parse

ARGUMENTS = "see docs/FORMATS.md 2.3 for the arguments of calls"

A = TypeVar("A", bound=Args)


class Call(WireModel, Generic[A]):
    """The payload of a CALL frame."""

    call: str
    args: A


CALLS: dict[str, type[Args]] = {
    "topic.create": topics.TopicCreate,
    "topic.alter": topics.TopicAlter,
    "topic.schema": topics.TopicSchema,
    "topic.describe": topics.TopicNames,
    "topic.list": topics.TopicList,
    "topic.show": topics.TopicName,
    "topic.grow": topics.TopicGrow,
    "topic.delete": topics.TopicDelete,
    "consumer.join": consumers.Join,
    "consumer.heartbeat": consumers.Heartbeat,
    "consumer.leave": consumers.MemberArgs,
    "consumer.nack": consumers.Nack,
    "consumer.return": consumers.Return,
    "consumer.extend": consumers.Extend,
    "consumer.stored": recover.ConsumerStored,
    "group.list": ListArgs,
    "group.show": consumers.GroupArgs,
    "group.alter": consumers.GroupAlter,
    "group.delete": consumers.OperatorArgs,
    "group.reset": consumers.GroupReset,
    "group.clone": consumers.GroupClone,
    "group.pause": consumers.GroupPause,
    "group.resume": consumers.GroupPause,
    "inbox.show": consumers.InboxArgs,
    "inbox.open": consumers.InboxOpen,
    "inbox.restore": consumers.InboxRestore,
    "tx.list": transactions.TxList,
    "tx.show": transactions.TxShow,
    "tx.states": transactions.TxStates,
    "tx.committed": transactions.TxCommitted,
    "tx.decide": transactions.TxDecide,
    "tx.check": transactions.TxCheck,
    "tx.pending": transactions.TxPending,
    "tx.oldest": NoArgs,
    "tx.lease": transactions.TxLease,
    "mark.show": topics.TopicName,
    "producer.register": xa.ProducerRegister,
    "producer.skip": messages.ProducerSkip,
    "xa.list": xa.XaList,
    "xa.decided": xa.XaDecided,
    "xa.committed": xa.XaCommitted,
    "xa.find": xa.XaFind,
    "xa.outcome": xa.XaOutcome,
    "xa.heuristic": xa.XaHeuristicArgs,
    "xa.forget": xa.XaForget,
    "job.show": transactions.TokenArgs,
    "job.decide": transactions.JobDecide,
    "checks.wait": transactions.ChecksWait,
    "checks.answer": transactions.ChecksAnswer,
    "dlq.list": letters.DlqList,
    "dlq.show": letters.DlqShow,
    "dlq.stats": letters.DlqStats,
    "dlq.replay": letters.DlqReplay,
    "dlq.abandon": letters.DlqAbandon,
    "retry.now": letters.RetryNow,
    "retry.bury": letters.RetryEnd,
    "retry.skip": letters.RetryEnd,
    "dlq.edit": letters.DlqEdit,
    "dlq.redrive": letters.DlqRedrive,
    "dlq.exported": letters.DlqExported,
    "dlq.try": letters.DlqTry,
    "dlq.tried": letters.DlqTried,
    "dlq.note": letters.DlqNote,
    "dlq.save": letters.DlqSave,
    "dlq.saved": letters.DlqSaved,
    "plan.create": plans.PlanCreate,
    "plan.add": plans.PlanAdd,
    "plan.freeze": plans.PlanOrder,
    "plan.list": plans.PlanList,
    "plan.show": plans.PlanName,
    "plan.letters": plans.PlanLetters,
    "plan.check": plans.PlanCheck,
    "plan.approve": plans.PlanOrder,
    "plan.start": plans.PlanOrder,
    "plan.pause": plans.PlanOrder,
    "plan.resume": plans.PlanOrder,
    "plan.cancel": plans.PlanOrder,
    "plan.abandon": plans.PlanAbandon,
    "plan.leave": plans.PlanLeave,
    "plan.delete": plans.PlanOrder,
    "policy.set": plans.PolicySet,
    "policy.list": plans.PolicyList,
    "recover.list": recover.RecoverList,
    "recover.show": recover.RecoverShow,
    "recover.adopt": recover.RecoverAdopt,
    "recover.tell": recover.RecoverTell,
    "message.recall": messages.MessageIds,
    "message.delayed": messages.DelayedList,
    "message.show": messages.MessageShow,
    "message.find": messages.MessageFind,
    "message.search": messages.MessageSearch,
    "message.life": messages.MessageLife,
    "message.deliveries": messages.MessageDeliveries,
    "audit.list": audit.AuditList,
    "log.hold": logs.LogHold,
    "log.read": logs.LogRead,
    "log.release": logs.LogRelease,
    "log.backed_up": logs.LogBackedUp,
    "log.restores": logs.LogRestores,
    "log.accept": logs.RestoreAccept,
    "broker.show": NoArgs,
    "broker.alarms": NoArgs,
    "broker.reload": NoArgs,
    "broker.stats": StatsArgs,
    "broker.series": SeriesArgs,
    "broker.settings": NoArgs,
    "cluster.describe": NoArgs,
    "cluster.step_down": StepDown,
    "cluster.add_logs": AddLogs,
    "cluster.drain_log": ChangeLog,
    "cluster.remove_log": ChangeLog,
    "cluster.copy_logs": CopyLogs,
    "clock.show": NoArgs,
    "clock.confirm": ClockConfirm,
    "alarms.test": NoArgs,
    "alarms.report": AlarmsReport,
    "user.me": NoArgs,
    "user.set": users.UserSetArgs,
    "user.delete": users.UserDelete,
    "user.quota": users.UserQuota,
    "user.list": users.UserList,
    "token.add": users.TokenAdd,
    "token.revoke": users.TokenRevoke,
    "acl.grant": users.AclChange,
    "acl.revoke": users.AclChange,
}


def decode_call(payload: bytes) -> tuple[str, Args]:
    """Return name and checked arguments of a call.

    Raises RemoteProtocolError for an unknown call or invalid arguments.
    """
    tree = parse(payload)
    name = tree.get("call") if isinstance(tree, dict) else None
    if not isinstance(name, str) or name not in CALLS:
        hint = "run the same version of txmq at client and broker"
        raise RemoteProtocolError(f"unknown call {str(name)[:64]!r}", hint=hint)
    try:
        return name, _envelope(name).model_validate_json(payload).args
    except ValidationError as error:
        where, reason = first_mistake(error, unit="argument")
        field = ".".join(part for part in where if part != "args") or "the whole"
        raise RemoteProtocolError(f"{name}: {field}: {reason}", hint=ARGUMENTS) from None


@cache
def _envelope(name: str) -> type[Call[Any]]:
    return Call[CALLS[name]]  # type: ignore[valid-type] # made at run time
