"""Conditions of alarms: each function has the name of an alarm, and returns its text
while the condition holds, else "". Of what is about one group, plan or transaction it
names that, too.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from txmq.broker.data_directory.retention_service import TRANSACTIONS
from txmq.broker.monitoring.liveness import SILENT_S
from txmq.broker.reactor.steady_clock import BELIEVED_US
from txmq.core.consumers.key_fences import is_stopped
from txmq.core.state.plans import CANARY_IS_THROUGH, PlanState
from txmq.core.transactions import indexes
from txmq.core.transactions.indexes import ListKind
from txmq.core.transactions.model import get
from txmq.core.transactions.queries import recorded_conflicts
from txmq.model.measures import counted
from txmq.model.units import DAY, SECOND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from txmq.broker.background.clock_service import ClockStatus
    from txmq.broker.checkback.resolvers import ResolverStatus
    from txmq.broker.engine.disk_space import Disk
    from txmq.broker.engine.faults import Faults
    from txmq.broker.monitoring.statistics import Unattended
    from txmq.broker.reactor.tls import CertificateEnd
    from txmq.config.broker import AlarmSettings as Limits
    from txmq.core.state.plans import Plan
    from txmq.core.state.state import State
    from txmq.model.cluster import NodeView
    from txmq.store.log.decoder import Damage

DOUBTED = timedelta(days=1)  # a broker that was down for less is no reason for an alarm
BUILT_WITHIN_S = 3_600.0  # a plan whose letters a client adds
BEHIND_S = 10.0  # that sends wait; less is a burst
NODE_BEHIND_S = 30.0  # what a node tells of itself is up to so old
EVERYTHING = "everything"  # instead of what a filter lets through
FAULT_S = 3_600.0  # that an internal error stays an alarm
ENDING_US = DAY  # before its end, a certificate is a critical alarm
BACKUP_S = 129_600.0  # that a daily backup may be old, unless a setting says otherwise
CERTIFIED = {"cert": "the broker's certificate", "client_ca": "the authority of clients"}


class Conditions(NamedTuple):
    """The facts that rules judge. `missed` is the number of messages that retention
    took from groups, and the time of the last.
    """

    state: State
    read_only: bool
    quarantined: Sequence[Damage]
    disk: Disk
    missed: tuple[int, int]
    held_bytes: int  # bytes of log, for the sake of transactions
    now: int
    resolvers: Sequence[ResolverStatus]
    unresolvable_at: int
    limits: Limits
    clock: ClockStatus
    faults: Faults
    silent_s: float  # that the oldest pending reply has waited
    behind_s: float  # that sends have been waiting for the disk
    filters: Mapping[str, Mapping[str, str]]  # of members, by group
    undelivered: Mapping[str, str]  # why receivers of alarms do not get them, by name
    unattended: Mapping[int, Unattended]  # groups without a member
    nodes: Sequence[NodeView]  # of the cluster; a broker alone has none
    certificates: Sequence[CertificateEnd]

    def older_than(self, since: int, seconds: float) -> bool:
        """Return whether `since` is more than `seconds` ago; 0 = never."""
        return since > 0 and self.now - since > seconds * SECOND

    def age(self, since: int) -> str:
        return str(timedelta(seconds=(self.now - since) // SECOND))


class Raised(NamedTuple):
    """Text of an alarm, and what it is about, as in the audit: "group:billing".
    `severity` "" = that of the rule.
    """

    text: str
    about: str
    severity: str = ""


def broker_fault(seen: Conditions) -> str:
    faults = seen.faults
    if not faults.last_at or seen.older_than(faults.last_at, FAULT_S):
        return ""
    return f"internal errors since the start: {faults.counts.total()}, the last in {faults.last}"


def index_rebuilt(seen: Conditions) -> str:
    faults = seen.faults
    if not faults.rebuilt_at or seen.older_than(faults.rebuilt_at, FAULT_S):
        return ""
    return f"the index was made anew {seen.age(faults.rebuilt_at)} ago: {faults.rebuilt}"


def broker_silent(seen: Conditions) -> str:
    if seen.silent_s <= SILENT_S or seen.read_only:
        return ""
    return f"replies have waited for the disk for {seen.silent_s:.0f} s"


def disk_full(seen: Conditions) -> str:
    if seen.read_only:
        return "the disk is full: nothing is stored, only read"
    if seen.disk.refusing:
        return f"only {seen.disk.free_mib} MiB are free: writes are refused"
    return ""


def disk_behind(seen: Conditions) -> str:
    if seen.behind_s <= BEHIND_S or seen.read_only:
        return ""
    return f"sends have been waiting for the disk for {seen.behind_s:.0f} s"


def disk_low(seen: Conditions) -> str:
    if seen.disk.low and not seen.disk.refusing:
        return f"only {seen.disk.free_mib} MiB are free"
    return ""


def disk_trouble(seen: Conditions) -> str:
    return "; ".join(f"{what}: {why}" for what, why in sorted(seen.disk.troubles.items()))


def cluster_node_silent(seen: Conditions) -> str:
    silent = [node for node in seen.nodes if node.role == "silent"]
    return "; ".join(
        f"{node.name} at {node.address} was not heard of for {node.heard_s:.0f} s"
        for node in silent
    )


def cluster_node_behind(seen: Conditions) -> str:
    late = [node for node in seen.nodes if node.role == "follower" and node.lag_s > NODE_BEHIND_S]
    return "; ".join(
        f"{node.name} has read the log up to {node.lag_s:.0f} s ago, and lacks "
        f"{node.lag_bytes >> 20} MiB"
        for node in late
    )


def cluster_no_follower(seen: Conditions) -> str:
    if not seen.nodes or any(node.role == "follower" for node in seen.nodes):
        return ""
    return "no other node follows the log: when this one dies, nobody serves"


def log_damaged(seen: Conditions) -> str:
    if not seen.quarantined:
        return ""
    first = seen.quarantined[0]
    return (
        f"spans of the log that cannot be read: {len(seen.quarantined)}, as "
        f"{first.path}, {first.position}: {first.reason}"
    )


def retention_passed_group(seen: Conditions) -> str:
    messages, at = seen.missed
    if not messages or seen.older_than(at, seen.limits.conflict_s):
        return ""
    return (
        f"retention took {counted(messages, 'message')} that consumer groups had not processed, "
        f"the last {seen.age(at)} ago"
    )


def retention_held(seen: Conditions) -> str:
    mib = seen.held_bytes >> 20
    if mib <= seen.limits.held_mib:
        return ""
    return f"{mib} MiB of the log are kept because of {TRANSACTIONS}"


def transaction_in_doubt(seen: Conditions) -> str | Raised:
    return _listed(seen, ListKind.IN_DOUBT, "transactions undecided after many check-backs")


def transaction_unverified(seen: Conditions) -> str | Raised:
    return _listed(seen, ListKind.UNVERIFIED, "transactions decided by hand without their database")


def heuristic_mixed(seen: Conditions) -> str | Raised:
    return _listed(seen, ListKind.HEURISTIC, "transactions decided by hand or found mixed")


def _listed(seen: Conditions, kind: ListKind, what: str) -> str | Raised:
    count = seen.state.listed[kind]
    if not count:
        return ""
    oldest = next(indexes.listed_tokens(seen.state, kind)).hex()
    return Raised(f"{what}: {count}, the oldest is {oldest}", f"tx:{oldest}")


def transaction_oldest_undecided(seen: Conditions) -> str | Raised:
    token = next(indexes.undecided_tokens(seen.state), None)
    return _aged(seen, token, seen.limits.undecided_s, "undecided")


def transaction_open(seen: Conditions) -> str | Raised:
    token = next(indexes.listed_tokens(seen.state, ListKind.OPEN), None)
    return _aged(seen, token, seen.limits.open_s, "waiting for its missing parts")


def _aged(seen: Conditions, token: bytes | None, limit_s: float, what: str) -> str | Raised:
    row = None if token is None else get(seen.state, token)
    if token is None or row is None or not seen.older_than(row.stored_at, limit_s):
        return ""
    of = f" of service {row.service}" if row.service else ""
    text = f"transaction {token.hex()}{of} has been {what} for {seen.age(row.stored_at)}"
    return Raised(text, f"tx:{token.hex()}")


def transaction_conflict(seen: Conditions) -> str | Raised:
    last = next(recorded_conflicts(seen.state), None)
    if last is None or seen.older_than(last.at, seen.limits.conflict_s):
        return ""
    token = last.token.hex()
    text = f"{last.by} asked to {last.asked.name} transaction {token}, which was decided otherwise"
    return Raised(text, f"tx:{token}")


def resolver_unreachable(seen: Conditions) -> str:
    limit_s = seen.limits.resolver_s
    down = [one for one in seen.resolvers if seen.older_than(one.failing_since, limit_s)]
    return "; ".join(
        f"{one.name}, for {seen.age(one.failing_since)}: {one.trouble}" for one in down
    )


def resolver_blocked(seen: Conditions) -> str:
    limit_s = seen.limits.resolver_s
    slow = [
        f"{one.name}: a call has been under way for {seen.age(one.busy_since)}"
        for one in seen.resolvers
        if seen.older_than(one.busy_since, limit_s)
    ]
    blocked = [
        f"{one.name}, for {seen.age(one.blocked_since)}: {one.blocked}"
        for one in seen.resolvers
        if seen.older_than(one.blocked_since, limit_s)
    ]
    return "; ".join(slow + blocked)


def resolver_refused(seen: Conditions) -> str:
    refused = [one for one in seen.resolvers if one.refusal]
    return "; ".join(f"{one.name}: {one.refusal}" for one in refused)


def resolver_missing(seen: Conditions) -> str:
    at = seen.unresolvable_at
    if not at or seen.older_than(at, seen.limits.conflict_s):
        return ""
    return "transactions are refused: no resolver leads to the database that decides them"


def outbox_stuck(seen: Conditions) -> str:
    stuck = [one for one in seen.resolvers if one.outbox_error]
    return "; ".join(
        f"{one.name}, for {seen.age(one.outbox_stuck_since)}: {one.outbox_error}" for one in stuck
    )


def token_cleanup_stuck(seen: Conditions) -> str:
    limit_s = seen.limits.cleanup_s
    stuck = [one for one in seen.resolvers if seen.older_than(one.cleanup_failing_since, limit_s)]
    return "; ".join(
        f"{one.name}, for {seen.age(one.cleanup_failing_since)}: {one.cleanup_error}"
        for one in stuck
    )


def fence_full(seen: Conditions) -> str | Raised:
    stopped = [
        (group, place)
        for group in seen.state.groups.by_id.values()
        for place in group.stops
        if is_stopped(group, place)
    ]
    if not stopped:
        return ""
    group, (topic_id, partition) = stopped[0]
    topic = seen.state.topics_by_id[topic_id].name
    parked = counted(group.settings.max_parked, "message")
    return Raised(
        f"partitions that stand still: {len(stopped)}, as {topic}/{partition} for group "
        f"{group.name}: {parked} parked behind one failed key",
        f"group:{group.name}",
    )


def group_slow(seen: Conditions) -> str | Raised:
    groups = (group for group in seen.state.groups.by_id.values() if group.leases)
    # leases are in the order in which they were granted
    first = ((group.name, next(iter(group.leases.values()))) for group in groups)
    oldest = min(((lease.granted_at, name, lease.member) for name, lease in first), default=None)
    if oldest is None or not seen.older_than(oldest[0], seen.limits.slow_s):
        return ""
    granted_at, name, member = oldest
    text = f"member {member} of group {name} has had messages for {seen.age(granted_at)}"
    return Raised(text, f"group:{name}")


def group_filters_differ(seen: Conditions) -> str | Raised:
    for name, filters in seen.filters.items():
        group = seen.state.groups.by_name.get(name)
        if group is None or len({*filters.values()}) < 2:
            continue
        # one member for each filter with these topics: most members have the same
        found = {
            (member.topics, filters[member.name]): member.name
            for member in group.members.values()
            if member.name in filters
        }
        takes: dict[int, tuple[str, str]] = {}  # topic: a member, and its filter
        for (topics, own), member_name in found.items():
            for topic_id in topics:
                other, others = takes.setdefault(topic_id, (member_name, own))
                if others != own:
                    return Raised(
                        f"members of group {name} take different messages of topic "
                        f"{seen.state.topics_by_id[topic_id].name}: {other} "
                        f"{others or EVERYTHING}, {member_name} {own or EVERYTHING}",
                        f"group:{name}",
                    )
    return ""


def alarms_undelivered(seen: Conditions) -> str:
    return "; ".join(f"receiver {name} {why}" for name, why in sorted(seen.undelivered.items()))


def plan_paused(seen: Conditions) -> str | Raised:
    plans = [plan for plan in seen.state.plans.active.values() if plan.state is PlanState.PAUSED]
    paused = [plan for plan in plans if plan.why != CANARY_IS_THROUGH]
    if not paused:
        return ""
    plan = min(paused, key=lambda one: one.changed_at)
    return Raised(
        f"paused replay plans: {len(paused)}, as {plan.name} of group {plan.group} "
        f"for {seen.age(plan.changed_at)}: {plan.why}",
        f"plan:{plan.name}",
    )


def plan_waiting(seen: Conditions) -> str | Raised:
    waiting = [plan for plan in seen.state.plans.active.values() if _waits(seen, plan)]
    if not waiting:
        return ""
    plan = min(waiting, key=lambda one: one.changed_at)
    what = {PlanState.BUILDING: "to be completed", PlanState.PAUSED: "to be resumed"}.get(
        plan.state, "for an approval"
    )
    return Raised(
        f"replay plans that wait {what}: {len(waiting)}, as {plan.name} of group {plan.group} "
        f"for {seen.age(plan.changed_at)}: {counted(plan.letters, 'letter')}, made by {plan.by}",
        f"plan:{plan.name}",
    )


def _waits(seen: Conditions, plan: Plan) -> bool:
    """Return whether somebody has to approve a plan, to add its letters, or to let it
    go on behind its canary, where it was told to wait.
    """
    if plan.state is PlanState.PAUSED:
        return plan.why == CANARY_IS_THROUGH
    if plan.state is PlanState.BUILDING:
        return not plan.complete and seen.older_than(plan.changed_at, BUILT_WITHIN_S)
    return plan.state is PlanState.PLANNED and plan.waits_for_approval


def clock_jumped(seen: Conditions) -> str:
    clock = seen.clock
    if clock.is_believed:
        return ""
    span = timedelta(seconds=abs(clock.wall_ahead) // SECOND)
    if clock.wall_ahead > 0:
        return f"the machine's clock is {span} ahead of the time that has passed: not believed"
    return f"the machine's clock is {span} behind the broker's time, which goes on"


def clock_doubted(seen: Conditions) -> str:
    clock = seen.clock
    span = timedelta(seconds=(clock.now - clock.certain) // SECOND)
    if span < DOUBTED:
        return ""
    until = (
        ""
        if clock.certain_after_s is None
        else f", for {timedelta(seconds=int(clock.certain_after_s))} more if the clock is right"
    )
    return f"the broker's time may be {span} ahead: retention and expiry wait{until}"


def clock_differs(seen: Conditions) -> str:
    differ = [
        f"{name} by {timedelta(seconds=abs(time - seen.now) // SECOND)}"
        for name, time in seen.clock.databases.items()
        if abs(time - seen.now) > BELIEVED_US
    ]
    if not differ:
        return ""
    return f"clocks of databases differ from the broker's time: {', '.join(differ)}"


def log_restored(seen: Conditions) -> str:
    restores = seen.state.restores
    if not restores or restores[-1].accepted:
        return ""
    last, to = restores[-1], datetime.fromtimestamp(restores[-1].stored_to / SECOND, UTC)
    return (
        f"the log was restored from a backup {seen.age(last.at)} ago, to position {last.position} "
        f"and the state of {to:%Y-%m-%dT%H:%M:%SZ}: what was stored later is lost"
    )


def log_backup_old(seen: Conditions) -> str:
    """Once there is a backup, or where a setting asks for one."""
    at, limit_s = seen.state.backed_up_at, seen.limits.backup_s
    if not at:
        return "the log was never backed up" if limit_s else ""
    limit_s = BACKUP_S if limit_s is None else limit_s
    if not limit_s or not seen.older_than(at, limit_s):
        return ""
    return f"the newest backup of the log is {seen.age(at)} old"


def certificate_ends(seen: Conditions) -> str | Raised:
    limit = seen.limits.certificate_s * SECOND
    soon = [one for one in seen.certificates if one.at - seen.now < limit]
    if not soon:
        return ""
    texts = [
        f"{CERTIFIED[one.setting]} {one.path} {_ends(seen, one.at)}"
        + (f"; its new file is not used: {one.trouble}" if one.trouble else "")
        for one in soon
    ]
    is_close = min(one.at for one in soon) - seen.now < ENDING_US
    return Raised("; ".join(texts), "", "critical" if is_close else "")


def _ends(seen: Conditions, at: int) -> str:
    if at <= seen.now:
        return f"ended {seen.age(at)} ago"
    return f"ends in {timedelta(seconds=(at - seen.now) // SECOND)}"
