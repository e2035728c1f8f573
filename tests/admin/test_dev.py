"""Where a developer finds the console."""

from __future__ import annotations

from pathlib import Path

import pytest

from txmq.cli.commands.dev import _settings

DSN = "postgresql://dev@127.0.0.1/dev"


@pytest.mark.parametrize(
    ("listen", "http", "console"),
    [
        (None, None, "127.0.0.1:7651"),
        ("127.0.0.1:9000", None, "127.0.0.1:9001"),
        ("0.0.0.0:9000", None, "127.0.0.1:9001"),
        ("127.0.0.1:0", None, "127.0.0.1:0"),
        ("127.0.0.1:65535", None, "127.0.0.1:0"),
        ("127.0.0.1:9000", "localhost:80", "localhost:80"),
    ],
)
def test_the_console_is_next_to_the_broker_by_default(
    tmp_path: Path, listen: str | None, http: str | None, console: str
) -> None:
    assert _settings(tmp_path, listen, http, {"dev": DSN}).broker.http == console
