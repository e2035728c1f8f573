"""What `txmq-spark` prints of texts that come from elsewhere."""

from __future__ import annotations

from argparse import Namespace

import pytest

from txmq.errors import ConfigError
from txmq_spark import command_line, plan_commands
from txmq_spark.replay import ReplayResult

HOSTILE = "\x1b]0;owned\x07\x9b31m\u202egnp\u2028\r"


def refuse() -> int:
    raise ConfigError("x", f"refused {HOSTILE}\nplan forged: done")


def test_no_error_and_no_reason_of_a_plan_has_control_characters_for_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line._exit_status(refuse) == 1
    paused = {"name": "p", "state": "paused", "why": f"{HOSTILE}\nplan forged: done"}
    plan_commands._tell_result(Namespace(json=False), ReplayResult((paused,), {"replayed": 1}))
    out, err = capsys.readouterr()
    assert all(char.isprintable() or char == "\n" for char in out + err)
    assert not any(line.startswith("plan forged") for line in (out + err).splitlines())
    assert "gnp" in out
    assert "gnp" in err
