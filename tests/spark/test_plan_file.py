"""The file of a plan: a function of its inputs, refused where it was changed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spark.letters import letter
from txmq.errors import ConfigError
from txmq_spark.plan import LetterClass, PlanRules, make_plan
from txmq_spark.plan_file import PlanInputs, decode_plan, encode_plan

FACTS = PlanInputs(
    group="billing",
    log_id="0f0e",
    ends={"orders": (12, 40)},
    database="7123/shop",
    snapshot="740:740:",
    snapshot_at=1_700_000_000_000_000,
)
HOSTILE = ['"},{"', "a\nb", "\u2028", "<script>", "\x00", "\u202eevil", "=cmd|", "💥"]


def frozen(*keys: str, facts: PlanInputs = FACTS, rules: PlanRules | None = None) -> bytes:
    rules = rules or PlanRules()
    return encode_plan(
        facts, rules, make_plan([letter(n, key) for n, key in enumerate(keys)], rules)
    )


def test_a_decoded_plan_equals_the_encoded_one() -> None:
    rules = PlanRules(error_types=frozenset({"BadOrder"}))
    letters = [
        letter(1, "a"),
        letter(2, "a"),
        letter(3, "b", applied=True),
        letter(4, error_type="BadOrder"),
    ]
    planned = make_plan(letters, rules)
    manifest = decode_plan(encode_plan(FACTS, rules, planned))
    assert [
        (e.topic, e.partition, e.offset, e.key, e.cls, e.reason, e.chunk) for e in manifest.entries
    ] == [
        (
            p.letter.topic,
            p.letter.partition,
            p.letter.offset,
            p.letter.key,
            p.cls,
            p.reason,
            p.chunk,
        )
        for p in planned
    ]
    assert [entry.offset for entry in manifest.replays] == [1, 2]
    assert manifest.header.facts == FACTS
    assert manifest.header.filters.error_types == ("BadOrder",)
    assert manifest.header.letters == {
        **dict.fromkeys(LetterClass, 0),
        LetterClass.REPLAY_CHAIN: 2,
        LetterClass.APPLIED: 1,
        LetterClass.POISON: 1,
    }
    assert (manifest.header.replays, manifest.header.chunks) == (2, 1)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=6))
def test_the_same_letters_give_the_same_bytes_one_line_each(keys: list[str]) -> None:
    data = frozen(*keys)
    assert data == frozen(*keys)
    assert data.isascii()
    assert len(data.splitlines()) == 1 + len(keys)
    assert sorted(entry.key or "" for entry in decode_plan(data).entries) == sorted(keys)


@pytest.mark.parametrize("key", HOSTILE)
def test_hostile_keys_come_back_as_they_are(key: str) -> None:
    [entry] = decode_plan(frozen(key)).entries
    assert entry.key == key


def test_plans_from_other_inputs_have_other_names() -> None:
    later = FACTS.model_copy(update={"snapshot": "741:741:"})
    names = {
        decode_plan(data).header.digest
        for data in (
            frozen("a"),
            frozen("a", facts=later),
            frozen("b"),
            frozen("a", rules=PlanRules(chunk=2)),
        )
    }
    assert len(names) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b'"offset":1', b'"offset":7'),
        lambda data: b"".join(data.splitlines(keepends=True)[:-1]),
        lambda data: data + data.splitlines(keepends=True)[-1],
        lambda data: data.replace(b'"billing"', b'"refunds"'),
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: data.replace(b'"chunk":0', b'"chunk":1', 1),
    ],
)
def test_a_changed_plan_is_refused(change: object) -> None:
    data = frozen("a", "b")
    changed = change(data)  # type: ignore[operator] # one of the functions above
    assert changed != data
    with pytest.raises(ConfigError, match="changed after it was made"):
        decode_plan(changed)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"not json",
        b"[]\n",
        b'{"txmq_plan":1}\n',
        b'{"txmq_plan":1,"evil":"' + b"[" * 100_000 + b'"}',
        b"\xff\xfe",
    ],
)
def test_a_file_that_is_not_a_plan_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="run reconcile again"):
        decode_plan(data)


def test_a_plan_of_another_version_is_refused() -> None:
    header, *rest = frozen("a").splitlines(keepends=True)
    fields = json.loads(header) | {"txmq_plan": 2}
    with pytest.raises(ConfigError, match="version 2"):
        decode_plan(json.dumps(fields).encode() + b"\n" + b"".join(rest))
