"""The schema of a topic: a setting whose changes follow a rule."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.core.driver import Driver
from txmq.core import machine
from txmq.core.topics import schemas
from txmq.core.topics.schemas import ChangedSchema, ChangeSchema
from txmq.core.topics.topics import AlterTopic, CreateTopic, DeleteTopic
from txmq.errors import IncompatibleSchema, Throttled, UnknownTopic


def schema(**fields: str) -> str:
    properties = {name: {"type": kind} for name, kind in fields.items()}
    return json.dumps({"properties": properties, "required": [*fields], "type": "object"})


ONE, OTHER = schema(id="integer"), schema(id="string")


@pytest.fixture
def core() -> Driver:
    core = Driver()
    core.do(CreateTopic("t", 1))
    return core


def change(core: Driver, *args: Any, **options: Any) -> Any:
    return core.do(ChangeSchema("t", *args, **options))


def test_a_schema_survives_a_restart_and_other_changes(core: Driver) -> None:
    assert change(core, ONE) == ChangedSchema("t", ONE, "backward", [])
    core.do(AlterTopic("t", {"writable": False}))
    again = core.replayed()
    machine.save(again)
    for state in (core.state, again, machine.load(again.tables)):
        assert state.topics["t"].settings.schema == ONE
        assert state.schema_characters == len(ONE)
    core.do(AlterTopic("t", {"writable": True}))
    core.do(CreateTopic("t", 1))  # the settings that it was created with
    core.do(DeleteTopic("t"))
    assert core.state.schema_characters == core.replayed().schema_characters == 0


def test_a_change_that_breaks_the_rule_is_refused_with_what_it_breaks(core: Driver) -> None:
    change(core, ONE)
    refused = change(core, OTHER)
    assert type(refused) is IncompatibleSchema
    told = "$.id: string is accepted, not integer"
    assert refused.detail == {"compatibility": "backward", "breaks": [told]}
    assert told in refused.message
    assert change(core, OTHER, dry_run=True).breaks == [told]
    assert core.state.topics["t"].settings.schema == ONE
    assert change(core, OTHER, force=True).breaks == [told]
    assert change(core, ONE, "none").breaks == []
    assert change(core, None, "forward") == ChangedSchema("t", ONE, "forward", [])
    assert change(core, schema(id="integer", more="string")).breaks == []
    assert change(core, "") == ChangedSchema("t", "", "", [])
    assert type(core.do(ChangeSchema("none"))) is UnknownTopic


def test_what_cannot_be_judged_needs_force(core: Driver) -> None:
    change(core, ONE)
    strange = '{"not":{"type":"string"}}'
    refused = change(core, strange)
    assert type(refused) is IncompatibleSchema
    assert "--force" in refused.hint
    assert "keyword 'not'" in refused.message
    assert change(core, strange, force=True).schema == strange


def test_nothing_is_recorded_for_nothing(core: Driver) -> None:
    change(core, ONE)
    records = len(core.log)
    change(core, ONE)
    change(core)
    assert len(core.log) == records


def test_all_schemas_are_bounded(core: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "MAX_ALL_SCHEMAS", len(ONE) + 5)
    change(core, ONE)
    core.do(CreateTopic("u", 1))
    assert type(core.do(ChangeSchema("u", ONE))) is Throttled
    change(core, "")
    assert core.do(ChangeSchema("u", ONE)).schema == ONE
