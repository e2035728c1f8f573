"""The rules for connections whose driver blocks: those of services and of tools."""

from __future__ import annotations

from txmq.tx.postgres import (
    caller,
    commit,
    identity,
    inbox,
    inbox_compaction,
    outbox,
    prepared,
    tokens,
)
from txmq.tx.postgres.drivers import blocking

roll_back = blocking(caller.roll_back)
guarded_commit = blocking(commit.guarded_commit)
commit_and = blocking(commit.commit_and)
read_server = blocking(identity.read_server)
read_history = blocking(identity.read_history)
server_of = blocking(identity.server_of)
insert_token = blocking(tokens.insert_token)
may_have_reported = blocking(tokens.may_have_reported)
read_status = blocking(outbox.read_status)
read_key_status = blocking(outbox.read_key_status)
enqueue = blocking(outbox.enqueue)
fetch = blocking(outbox.fetch)
look = blocking(prepared.look)
prepare = blocking(prepared.prepare)
commit_prepared = blocking(prepared.commit_prepared)
roll_back_prepared = blocking(prepared.roll_back_prepared)
claim = blocking(inbox.claim)
applied = blocking(inbox.applied)
noted_run = blocking(inbox.noted_run)
note_run = blocking(inbox.note_run)
compact = blocking(inbox_compaction.compact)
