"""Tokens for HTTP: rights of the user, an end, and nothing of them in log or lists."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from tests.broker.access.support import BrokerWithUsers
from txmq import errors
from txmq.core.users import SetQuota

TOKEN = "txmq_" + "a" * 43
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()
PEER = "10.0.0.1"


class Office(BrokerWithUsers):
    """A broker whose auditor has a token for an hour."""

    def __init__(self) -> None:
        super().__init__()
        self.root = self.log_in("root")
        self.guard = self.assembly.guard
        self.told: Any = self.root.call(
            "token.add", name="checks", token="ci", digest=DIGEST, expire_s=3_600, reason="ci"
        )
        self.pass_time(0)

    def enter(self, token: str = TOKEN) -> Any:
        return self.guard.log_in_by_http(PEER, f"Bearer {token}")


def test_a_token_has_the_rights_of_its_user_until_it_is_revoked() -> None:
    broker = Office()
    assert broker.told == {"user": "checks", "changed": True}
    rights = broker.enter()
    assert (rights.user, rights.roles) == ("checks", ("auditor",))
    renewed = broker.guard.renewed(rights)
    assert renewed is not None
    assert renewed.until == rights.until is not None
    broker.root.call("token.revoke", name="checks", token="ci")
    broker.pass_time(0)
    with pytest.raises(errors.LoginFailed):
        broker.enter()


def test_a_token_ends_by_the_broker_s_time_and_its_open_streams_with_it() -> None:
    broker = Office()
    rights = broker.enter()
    broker.pass_time(3_599)
    assert broker.enter().user == "checks"
    assert broker.guard.renewed(rights) is not None
    broker.pass_time(2)
    with pytest.raises(errors.LoginFailed, match="'ci' has expired") as caught:
        broker.enter()
    assert "txmq user token add" in caught.value.hint
    assert broker.guard.renewed(rights) is None


def test_who_guesses_tokens_locks_nobody_out() -> None:
    broker = Office()
    for number in range(30):
        with pytest.raises(errors.LoginFailed, match="not valid"):
            broker.enter(f"txmq_{number}\ud800")
    assert broker.guard.logins["failed"] == 30
    assert broker.enter().user == "checks"


def test_a_token_counts_for_the_quota_and_goes_with_its_user() -> None:
    broker = Office()
    broker.do(SetQuota("checks", {"requests_per_s": 2}, "root"))
    broker.guard.forget()
    for _ in range(2):
        broker.enter()
    with pytest.raises(errors.Throttled):
        broker.enter()
    broker.root.call("user.delete", name="checks")
    broker.pass_time(5)
    with pytest.raises(errors.LoginFailed):
        broker.enter()


def test_nothing_shows_a_token_or_its_digest() -> None:
    broker = Office()
    shown = broker.root.call("user.list")
    [row] = [one for one in shown["users"] if one["tokens"]]  # type: ignore[index]  # JSON
    assert (row["user"], row["tokens"][0]["token"]) == ("checks", "ci")
    texts = json.dumps([shown, broker.root.call("audit.list")])
    assert DIGEST not in texts
    assert TOKEN not in texts
    assert '"token.add"' in texts
