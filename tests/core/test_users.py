"""Users and grants: who must stay, and that snapshot and log give the same users."""

from __future__ import annotations

from typing import Any

from tests.broker.access.support import VERIFIER
from txmq.core import machine, users
from txmq.core.events.base import KINDS, Event, RecordContext, decode, encode
from txmq.core.events.outcome import Outcome
from txmq.core.state.state import State
from txmq.core.state.users import Token
from txmq.core.topics.topics import CreateTopic, DeleteTopic, TopicView
from txmq.core.users import (
    DeleteUser,
    GrantAccess,
    MakeToken,
    RevokeAccess,
    RevokeToken,
    SetQuota,
    SetUser,
)
from txmq.errors import NotPermitted, RequestRejected
from txmq.model.access import Grant
from txmq.model.quota import NO_QUOTA, Quota
from txmq.store.tables import MemoryTables

SECRET = b"s" * 32
READ = Grant("read", "topic:orders")


class Fold:
    """A state, and the events behind it."""

    def __init__(self) -> None:
        self.tables = MemoryTables()
        self.state = machine.load(self.tables)
        self.events: list[Event] = []

    def do(self, command: object) -> Any:
        made = machine.decide(self.state, command, 7)
        if isinstance(made, RequestRejected):
            return made
        assert isinstance(made, Outcome)
        for event in made.events:
            self.events.append(event)
            apply(self.state, event)
        return made.reply


def apply(state: State, event: Event) -> None:
    # as the log has it: no attributes inside
    again = decode(KINDS[type(event)], encode(event))
    machine.apply(state, again, RecordContext(0, 1, 0, 7, 1))


def set_user(name: str, *roles: str, new: bool | None = True) -> SetUser:
    return SetUser(name, roles, tuple(VERIFIER), "ada", SECRET, new)  # type: ignore[arg-type]  # a plain tuple


def test_users_are_the_same_from_the_log_and_from_the_tables() -> None:
    fold = Fold()
    for command in (
        set_user("root", "admin"),
        set_user("shop", "producer"),
        GrantAccess("shop", READ, "root"),
        GrantAccess("shop", Grant("describe", "cluster"), "root"),
        RevokeAccess("shop", Grant("describe", "cluster"), "root"),
        set_user("gone"),
        DeleteUser("gone", "root"),
        SetQuota("shop", {"topics": 1, "bytes_per_s": 10}, "root"),
        SetUser("shop", ("consumer",), None, "root", b"other" * 8, new=False),
        MakeToken("shop", "old", b"o" * 32, 10, "root"),
        MakeToken("shop", "ci", b"d" * 32, 1_000, "root"),
        RevokeToken("shop", "old", "root"),
        MakeToken("root", "only", b"r" * 32, 1_000, "root"),
    ):
        assert fold.do(command) == users.Changed(changed=True)
    machine.save(fold.state)
    stored = machine.load(fold.tables).users
    replayed = machine.load(MemoryTables())
    for event in fold.events:
        apply(replayed, event)
    for found in (stored, replayed.users):
        assert found.by_name == fold.state.users.by_name
        assert found.secret == SECRET
        assert found.by_name["shop"].quota == Quota(bytes_per_s=10, topics=1)
        assert found.by_name["root"].quota == NO_QUOTA
        assert found.by_name["shop"].tokens == (Token("ci", b"d" * 32, 1_007, 7, "root"),)
        assert [token.name for token in found.by_name["root"].tokens] == ["only"]
    shop = stored.by_name["shop"]
    assert (shop.roles, shop.grants, shop.verifier) == (("consumer",), (READ,), tuple(VERIFIER))
    assert "stored" not in repr(shop)
    assert VERIFIER.stored_key.hex() not in repr(shop)


def test_the_first_user_is_an_admin_and_the_last_admin_stays() -> None:
    fold = Fold()
    assert isinstance(fold.do(set_user("shop", "producer")), RequestRejected)
    fold.do(set_user("root", "admin"))
    fold.do(set_user("shop", "producer"))
    for command in (
        DeleteUser("root", "root"),
        SetUser("root", (), None, "root", SECRET, new=False),
    ):
        refused = fold.do(command)
        assert isinstance(refused, RequestRejected)
        assert "admin" in refused.message
    fold.do(DeleteUser("shop", "root"))
    assert fold.do(DeleteUser("root", "root")) == users.Changed(changed=True)
    assert not fold.state.users.by_name


def test_what_is_there_already_changes_nothing_and_what_is_not_is_refused() -> None:
    fold = Fold()
    fold.do(set_user("root", "admin"))
    assert isinstance(fold.do(set_user("root", "admin")), RequestRejected)
    assert fold.do(set_user("root", "admin", new=None)) == users.Changed(changed=False)
    fold.do(GrantAccess("root", READ, "root"))
    assert fold.do(GrantAccess("root", READ, "root")) == users.Changed(changed=False)
    for command in (
        RevokeAccess("root", Grant("write", "topic:t"), "root"),
        GrantAccess("nobody", READ, "root"),
        DeleteUser("nobody", "root"),
        set_user("nobody", new=False),
    ):
        assert isinstance(fold.do(command), RequestRejected)


def test_the_topics_that_a_user_makes_count_for_the_quota() -> None:
    fold = Fold()
    for command in (
        set_user("root", "admin"), set_user("shop"), SetQuota("shop", {"topics": 2}, "root")
    ):  # fmt: skip
        fold.do(command)
    for name in ("a", "b"):
        assert isinstance(fold.do(CreateTopic(name, 1, user="shop")), TopicView)
    refused = fold.do(CreateTopic("c", 1, user="shop"))
    assert isinstance(refused, RequestRejected)
    assert (type(refused), "2 topics" in refused.message) == (NotPermitted, True)
    assert isinstance(fold.do(CreateTopic("a", 1, user="shop")), TopicView), "it is there"
    fold.do(CreateTopic("d", 1, user="root"))
    fold.do(CreateTopic("e", 1))
    machine.save(fold.state)
    stored = machine.load(fold.tables).users
    assert stored.topic_counts == {"shop": 2, "root": 1}
    assert stored.topic_owners == fold.state.users.topic_owners
    fold.do(DeleteTopic("a"))
    assert isinstance(fold.do(CreateTopic("c", 1, user="shop")), TopicView)
    fold.do(DeleteUser("shop", "root"))
    machine.save(fold.state)
    assert +machine.load(fold.tables).users.topic_counts == {"root": 1}


def test_tokens_have_names_of_their_own_and_a_number() -> None:
    fold = Fold()
    fold.do(set_user("root", "admin"))
    for number in range(users.MAX_TOKENS):
        assert fold.do(MakeToken("root", f"t{number}", b"d" * 32, 1, "root")).changed
    for refused in (
        MakeToken("root", "one more", b"d" * 32, 1, "root"),
        MakeToken("root", "t0", b"d" * 32, 1, "root"),
        MakeToken("nobody", "t", b"d" * 32, 1, "root"),
        RevokeToken("root", "none", "root"),
        RevokeToken("nobody", "t0", "root"),
    ):
        found = fold.do(refused)
        assert isinstance(found, RequestRejected)
        assert found.hint
