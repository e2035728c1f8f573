"""The table of permissions: what each request and each control call needs.

This is the one place that knows. A request or call without a row fails
`tests/broker/access/test_needs.py`, and a broker does not start without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from txmq.core.consumers import letter_notes
from txmq.core.topics import delayed
from txmq.core.transactions.jobs import undecided_bundles
from txmq.core.transactions.model import get
from txmq.model.access import ANY, Need
from txmq.model.actions import RELAY
from txmq.model.decider import ByJob
from txmq.model.own_topics import is_own
from txmq.wire.bundle import unpack_part
from txmq.wire.calls.letters import SelectArgs, SelectionArgs
from txmq.wire.data_requests import (
    Opcode,
    unpack_ack,
    unpack_decide,
    unpack_fetch,
    unpack_read,
    unpack_read_letters,
    unpack_send,
)

if TYPE_CHECKING:
    from txmq.core.state.state import State
    from txmq.wire.calls.arguments import Args

Needs = Iterable[Need]
RequestNeeds = Callable[["State", bytes], Needs]
CallNeeds = Callable[["State", Any], Needs]

SHOW_CLUSTER = (Need("describe", "cluster"),)
OPERATE_CLUSTER = (Need("operate", "cluster"),)
ADMIN = (Need("admin", "cluster"),)
AUDIT = (Need("audit", "cluster"),)
NOTHING = ()


def topic(verb: str, name: str) -> Need:
    """Return a need of a topic. The broker's own topics say what operators did."""
    return AUDIT[0] if is_own(name) else Need(verb, "topic", name)


def group(verb: str, name: str) -> Need:
    """Return a need of a consumer group; a broadcast member's is that of its group."""
    return Need(verb, "group", name.partition("@")[0])


def owner(state: State, verb: str, token: bytes) -> Need:
    """Return a need of the service that a transaction belongs to."""
    row = get(state, token)
    return Need(verb, "service", ANY if row is None else row.service)


def job(state: State, verb: str, token: bytes) -> Need:
    """Return a need of the service whose bundles a job has. It takes those of others
    from users who may write that service, too.
    """
    first = next(undecided_bundles(state, token), None)
    return owner(state, verb, token if first is None else first)


def _send(_state: State, payload: bytes) -> Needs:
    yield topic("write", unpack_send(payload).topic)


def _store(state: State, payload: bytes) -> Needs:
    part = unpack_part(payload)
    if part.description is None:  # its first part names the service
        yield owner(state, "write", part.token)
    else:
        yield Need("write", "service", part.description.service)
        if isinstance(part.description.decider, ByJob):
            yield job(state, "write", part.description.decider.job)
        for action in part.description.actions:
            yield from _action(action)
    for batch in part.batches:
        yield topic("write", batch.topic)


def _action(action: Any) -> Needs:  # noqa: ANN401  # an action of a bundle, or its fields
    """Return what an action beside the messages needs, by its fields: an ack or a
    replay names its group. A watermark is a relay's, whatever service the bundle names:
    behind one that somebody else has moved on, what a relay sends passes for stored.
    """
    match action:
        case ("ack", str(name), *_):
            yield group("read", name)
        case ("replay", str(name), *_):
            yield group("operate", name)
        case ("mark", *_):
            yield Need("write", "service", RELAY)


def _decide(state: State, payload: bytes) -> Needs:
    yield owner(state, "write", unpack_decide(payload).token)


def _fetch(state: State, payload: bytes) -> Needs:
    request = unpack_fetch(payload)
    yield group("read", request.group)
    found = state.groups.by_name.get(request.group)
    member = None if found is None else found.members.get(request.member)
    if member is not None:
        topics = map(state.topics_by_id.get, member.topics)
        yield from (topic("read", each.name) for each in topics if each is not None)


def _ack(_state: State, payload: bytes) -> Needs:
    yield group("read", unpack_ack(payload).group)


def _read(_state: State, payload: bytes) -> Needs:
    yield topic("read", unpack_read(payload).topic)


def _read_letters(state: State, payload: bytes) -> Needs:
    plan = state.plans.by_name.get(unpack_read_letters(payload).plan)
    found = None if plan is None else state.groups.by_id.get(plan.group_id)
    yield Need("read", "group", ANY) if found is None else group("read", found.name)


REQUESTS: dict[int, RequestNeeds] = {
    Opcode.PING: lambda _state, _payload: NOTHING,
    Opcode.SEND: _send,
    Opcode.GROUP: _store,
    Opcode.DECIDE: _decide,
    Opcode.FETCH: _fetch,
    Opcode.ACK: _ack,
    Opcode.READ: _read,
    Opcode.LETTERS: _read_letters,
}
# frames of several requests: each is judged, and answered, by itself
FRAMES_OF = {
    Opcode.SENDS: Opcode.SEND,
    Opcode.GROUPS: Opcode.GROUP,
    Opcode.DECISIONS: Opcode.DECIDE,
}
# they come before the login; a CALL is judged by its name
NOT_JUDGED = {Opcode.HELLO, Opcode.LOGIN, Opcode.CALL}


def _always(*needs: Need) -> CallNeeds:
    return lambda _state, _args: needs


def _of_group(verb: str) -> CallNeeds:
    return lambda _state, args: (group(verb, args.group),)


def _of_topic(verb: str) -> CallNeeds:
    return lambda _state, args: (topic(verb, args.name),)


def _of_token(verb: str) -> CallNeeds:
    return lambda state, args: (owner(state, verb, bytes.fromhex(args.token)),)


def _of_service(verb: str) -> CallNeeds:
    return lambda _state, args: (Need(verb, "service", args.service),)


def _of_plan(verb: str) -> CallNeeds:
    """Return a rule for plans, which belong to a group."""

    def needs(state: State, args: Any) -> Needs:  # noqa: ANN401  # the call's own model
        plan = state.plans.by_name.get(args.name)
        found = None if plan is None else state.groups.by_id.get(plan.group_id)
        yield Need(verb, "group", ANY) if found is None else group(verb, found.name)

    return needs


def _schema(_state: State, args: Any) -> Needs:  # noqa: ANN401
    changes = not args.dry_run and (args.json_schema, args.compatibility) != (None, None)
    yield topic("alter" if changes else "describe", args.name)


def _describe_topics(state: State, args: Any) -> Needs:  # noqa: ANN401
    for name in args.names:
        yield topic("describe", name)
        if args.create and name not in state.topics:
            yield topic("create", name)


def _join(_state: State, args: Any) -> Needs:  # noqa: ANN401
    yield group("read", args.group)
    yield from (topic("read", name) for name in args.topics)


def _clone(_state: State, args: Any) -> Needs:  # noqa: ANN401
    yield group("operate", args.group)
    yield group("operate", args.to)


def _edit(_state: State, args: Any) -> Needs:  # noqa: ANN401
    yield group("operate", args.group)
    yield group("read", args.group)


def _redrive(_state: State, args: Any) -> Needs:  # noqa: ANN401
    """Return the needs of a redrive: it brings bodies to where others may read them."""
    yield group("operate", args.group)
    yield group("read", args.group)
    if args.to is not None:
        yield topic("write", args.to)
    if args.to_group is not None:
        yield group("operate", args.to_group)


def _check(state: State, args: Any) -> Needs:  # noqa: ANN401
    if args.token is None:
        yield OPERATE_CLUSTER[0]
    else:
        yield owner(state, "write", bytes.fromhex(args.token))


def _stores(_state: State, args: Any) -> Needs:  # noqa: ANN401
    yield SHOW_CLUSTER[0] if args.group is None else group("describe", args.group)


def _delayed(_state: State, args: Any) -> Needs:  # noqa: ANN401
    yield SHOW_CLUSTER[0] if args.topic is None else topic("describe", args.topic)


def _recall(state: State, args: Any) -> Needs:  # noqa: ANN401
    """Return the needs of a recall: who reads a message knows the ids of others of its
    producer.
    """
    yield Need("write", "topic", ANY)
    for one in args.ids:
        waiting = delayed.find(state, one)
        if waiting is not None:
            yield topic("write", state.topics_by_id[waiting.message.topic_id].name)
            if get(state, one[0]) is not None:  # of a transaction
                yield owner(state, "write", one[0])


def _job(state: State, args: Any) -> Needs:  # noqa: ANN401
    """Return the needs of a job's decision: it decides its services' bundles."""
    yield job(state, "write", bytes.fromhex(args.token))
    for token in args.winners:
        yield owner(state, "write", bytes.fromhex(token))


CALLS: dict[str, CallNeeds] = {
    "topic.create": _of_topic("create"),
    "topic.alter": _of_topic("alter"),
    "topic.schema": _schema,
    "topic.describe": _describe_topics,
    "topic.list": _always(*SHOW_CLUSTER),
    "topic.show": _of_topic("describe"),
    "topic.grow": _of_topic("alter"),
    "topic.delete": _of_topic("delete"),
    "consumer.join": _join,
    **dict.fromkeys(
        ("consumer.heartbeat", "consumer.leave", "consumer.nack", "consumer.return",
         "consumer.extend", "consumer.stored", "inbox.show", "inbox.open", "inbox.restore"),
        _of_group("read"),
    ),
    "group.list": _always(*SHOW_CLUSTER),
    "group.show": _of_group("describe"),
    **dict.fromkeys(
        ("group.alter", "group.delete", "group.reset", "group.pause", "group.resume"),
        _of_group("operate"),
    ),
    "group.clone": _clone,
    "tx.list": _always(*SHOW_CLUSTER),
    "tx.show": _of_token("describe"),
    "tx.states": _always(Need("describe", "service", ANY)),
    "tx.committed": _always(*SHOW_CLUSTER),
    "tx.decide": _of_token("operate"),
    "tx.check": _check,
    "tx.pending": _always(*SHOW_CLUSTER),
    "tx.oldest": _always(*SHOW_CLUSTER),
    "tx.lease": _always(Need("write", "service", ANY)),
    "mark.show": lambda _state, _args: (Need("write", "service", ANY),),
    "producer.register": _of_service("write"),
    "producer.skip": _always(Need("write", "topic", ANY)),
    "xa.list": _always(Need("describe", "service", ANY)),
    "xa.decided": _always(*SHOW_CLUSTER),
    "xa.committed": _always(*SHOW_CLUSTER),
    "xa.find": _always(Need("write", "service", ANY)),
    "xa.outcome": _of_token("write"),
    "xa.heuristic": _of_token("write"),
    "xa.forget": _of_token("write"),
    "job.show": lambda state, args: (job(state, "describe", bytes.fromhex(args.token)),),
    "job.decide": _job,
    "checks.wait": _of_service("write"),
    "checks.answer": _of_token("write"),
    **dict.fromkeys(("dlq.list", "dlq.show", "dlq.stats", "dlq.tried"), _of_group("describe")),
    **dict.fromkeys(
        ("dlq.replay", "dlq.abandon", "dlq.exported", "dlq.try", "dlq.note", "retry.now",
         "retry.bury", "retry.skip", "recover.adopt"),
        _of_group("operate"),
    ),
    "dlq.edit": _edit,
    "dlq.redrive": _redrive,
    "dlq.save": _always(Need("operate", "group", ANY)),
    "dlq.saved": _always(Need("describe", "group", ANY)),
    "plan.create": _of_group("operate"),
    **dict.fromkeys(
        ("plan.add", "plan.freeze", "plan.approve", "plan.start", "plan.pause", "plan.resume",
         "plan.cancel", "plan.abandon", "plan.leave", "plan.delete"),
        _of_plan("operate"),
    ),
    "plan.list": _always(*SHOW_CLUSTER),
    **dict.fromkeys(("plan.show", "plan.letters", "plan.check"), _of_plan("describe")),
    "policy.set": _of_group("operate"),
    "policy.list": _always(*SHOW_CLUSTER),
    "recover.list": _stores,
    "recover.show": _of_group("describe"),
    "recover.tell": _of_group("read"),
    "message.recall": _recall,
    "message.delayed": _delayed,
    # an id and a key do not say in which topics they are
    "message.show": _always(*SHOW_CLUSTER),
    "message.search": _always(*SHOW_CLUSTER),
    "message.find": lambda _state, args: (topic("describe", args.topic),),
    "message.life": lambda _state, args: (topic("describe", args.topic),),
    "message.deliveries": lambda _state, args: tuple(
        topic("describe", name) for name in sorted({place[0] for place in args.messages})
    ),
    "audit.list": _always(*AUDIT),
    "log.hold": _always(*OPERATE_CLUSTER),
    "log.release": _always(*OPERATE_CLUSTER),
    # bodies of all messages are there, and verifiers of all passwords
    "log.read": _always(*ADMIN),
    "log.backed_up": _always(*OPERATE_CLUSTER),
    "log.restores": _always(*SHOW_CLUSTER),
    "log.accept": _always(*OPERATE_CLUSTER),
    "broker.show": _always(*SHOW_CLUSTER),
    "broker.alarms": _always(*SHOW_CLUSTER),
    "broker.stats": _always(*SHOW_CLUSTER),
    "broker.series": _always(*SHOW_CLUSTER),
    "broker.reload": _always(*OPERATE_CLUSTER),
    "broker.settings": _always(*SHOW_CLUSTER),
    "cluster.describe": _always(*SHOW_CLUSTER),
    **dict.fromkeys(
        ("cluster.step_down", "cluster.add_logs", "cluster.drain_log", "cluster.remove_log",
         "cluster.copy_logs"),
        _always(*OPERATE_CLUSTER),
    ),
    "clock.show": _always(*SHOW_CLUSTER),
    "clock.confirm": _always(*OPERATE_CLUSTER),
    "alarms.test": _always(*OPERATE_CLUSTER),
    "alarms.report": _always(Need("report", "cluster")),
    "user.me": _always(),
    **dict.fromkeys(
        ("user.set", "user.delete", "user.quota", "user.list", "acl.grant", "acl.revoke",
         "token.add", "token.revoke"),
        _always(*ADMIN),
    ),
}  # fmt: skip

# What a call with `bodies` shows. Without this permission the bodies are left out, or
# the call is denied where it asks for them by name.
BODIES: dict[str, CallNeeds] = {
    "dlq.list": _of_group("read"),
    "dlq.show": _of_group("read"),
    "recover.show": _of_group("read"),
    "tx.show": _always(Need("read", "topic", "")),
    "message.show": _always(Need("read", "topic", "")),
    "message.search": _always(Need("read", "topic", "")),
    "message.find": lambda _state, args: (topic("read", args.topic),),
}
JUDGES: dict[str, CallNeeds] = {**BODIES, "dlq.save": _always(Need("read", "group", ANY))}


def judging(state: State, name: str, args: Args) -> Needs:
    """Return what a call needs besides, where its outcome tells of bodies."""
    if not args.judges_bodies and not _saved_judges_bodies(state, args):
        return ()
    return JUDGES.get(name, _of_group("read"))(state, args)


def _saved_judges_bodies(state: State, args: Args) -> bool:
    """Return whether the selection does that which the arguments name."""
    saved = args.saved if isinstance(args, SelectArgs) else None
    note = None if saved is None else letter_notes.selection_of(state, saved)
    return note is not None and SelectionArgs.model_validate_json(note.text).body is not None
