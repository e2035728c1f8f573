"""Settings: each error is reported with its path and its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

import txmq
from txmq.config.broker import FlushEvery, SettingsFile, load_broker, load_resolvers, load_xa
from txmq.config.listen import ListenAddress, listen_address
from txmq.errors import ConfigError

WHOLE = """
[broker]
data = "/var/lib/txmq"
flush = { every_ms = 5, messages = 100 }

[consumers]
lost_connection_grace_s = 2

[[resolver]]
name = "shop"
dsn = "postgresql://txmq:secret@db/shop"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "txmq.toml"


def mistake(file: Path, text: str, **overrides: object) -> str:
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as raised:
        load_broker(file, overrides)
    return str(raised.value).replace(str(file), "FILE")


def test_a_file_is_read_and_the_command_line_goes_before_it(file: Path) -> None:
    file.write_text(WHOLE)
    settings = load_broker(file, {"listen": "[::1]:0", "data": Path("/elsewhere"), "name": None})
    assert settings.broker.data == Path("/elsewhere")
    assert settings.broker.flush == FlushEvery(every_ms=5, messages=100)
    assert (settings.broker.listen, settings.broker.name) == ("[::1]:0", "broker-1")
    assert [resolver.name for resolver in settings.resolver] == ["shop"]
    assert settings.consumers.lost_connection_grace_s == 2.0


def test_without_a_file_the_options_are_enough(tmp_path: Path) -> None:
    assert load_broker(None, {"data": tmp_path}).broker.data == tmp_path


def test_passwords_are_not_shown_with_the_settings(file: Path) -> None:
    file.write_text(WHOLE)
    assert "secret" not in repr(load_broker(file, {}))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "broker.data: is missing (in FILE)"),
        ("broker = 3", "broker: must be a section, not 3 (in FILE)"),
        (
            "[broker]\ndat = 'x'",
            "broker.dat: there is no such setting: did you mean data? (in FILE)",
        ),
        (
            "[broker]\ndata = 'x'\nlisen = '1'",
            "broker.lisen: there is no such setting: did you mean listen? (in FILE)",
        ),
        (
            "[broker]\ndata = 'x'\nhours = 3",
            "broker.hours: there is no such setting: it belongs to [retention] (in FILE)",
        ),
        ("[broker]\ndata = 'x'\nxyzzy = 3", "broker.xyzzy: there is no such setting (in FILE)"),
        (
            "[broker]\ndata = 'x'\n[retension]\nhours = 3",
            "retension: there is no such setting: did you mean retention? (in FILE)",
        ),
        ("[broker]\ndata = 3", "broker.data: must be text in quotes, not 3 (in FILE)"),
        (
            "[broker]\ndata = 'x'\nflush = 'async'",
            'broker.flush: must be "sync" or { every_ms = 10 }, not "async" (in FILE)',
        ),
        (
            "[broker]\ndata = 'x'\nflush = { messages = 0 }",
            "broker.flush.messages: must be greater than 0, not 0 (in FILE)",
        ),
        (
            "[broker]\ndata = 'x'\nsegment_bytes = '1'",
            'broker.segment_bytes: must be a whole number, without quotes, not "1" (in FILE)',
        ),
        (
            "[broker]\ndata = 'x'\n[retention]\npolicy = 'keep'",
            "retention.policy: must be 'delete' or 'archive', not \"keep\" (in FILE)",
        ),
        (
            "[broker]\ndata = 'x'\n[resolver]\nname = 'shop'",
            (
                "resolver: there can be several: begin each with [[resolver]], not [resolver] "
                "(in FILE)"
            ),
        ),
        (
            "[broker]\ndata = 'x'\nname = 'a b'",
            "broker.name: invalid name 'a b': use letters, digits, '.', '_' and '-' (in FILE)",
        ),
        (
            "[broker]\ndata = 'x'\n[[resolver]]\nname = 'shop'",
            "resolver.0.dsn: is missing (in FILE)",
        ),
    ],
)
def test_a_mistake_is_named_by_its_path(file: Path, text: str, error: str) -> None:
    assert mistake(file, text) == error


def test_an_error_of_an_option_names_no_file(file: Path) -> None:
    output = mistake(file, "[broker]\ndata = 'x'", listen="7650")
    assert output == (
        "broker.listen: invalid address '7650': use HOST:PORT, as 127.0.0.1:7650 or [::1]:7650 "
        "(see txmq broker --help)"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[[resolver]]\nname = 'shop'\ndsn = ['password=secret']",
        "[[xa.broker]]\nurl = 'shop:secret@db'",
        "[relay]\ndsn = 'dbname=x'\ntimeout_s = 'password=secret'",
    ],
)
def test_a_wrong_value_is_not_repeated_where_it_may_be_secret(file: Path, text: str) -> None:
    assert "secret" not in mistake(file, f"[broker]\ndata = 'x'\n{text}")
    assert "secret" not in mistake(file, "resolver = 'postgresql://shop:secret@db'\n[broker]")


@pytest.mark.parametrize(
    ("section", "setting"),
    [
        ("[[resolver]]\nname = 'shop'", "resolver.0.dsn"),
        ("[[xa.database]]\nname = 'shop'", "xa.database.0.dsn"),
        ("[relay]", "relay.dsn"),
    ],
)
@pytest.mark.parametrize(
    "dsn", ["secret", "host=db passwort=secret", "postgresql://shop:secret%zz@db/shop"]
)
def test_an_invalid_dsn_is_named_and_not_repeated(
    file: Path, section: str, setting: str, dsn: str
) -> None:
    found = mistake(file, f"[broker]\ndata = 'x'\n{section}\ndsn = '{dsn}'")
    assert found.startswith(f"{setting}: is not a DSN: use postgresql://")
    assert found.endswith("(in FILE)")
    assert "secret" not in found


def test_a_file_that_cannot_be_read_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"txmq.toml: cannot be read: No such file or directory"):
        load_broker(file, {})


@pytest.mark.parametrize("data", [b"[broker", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_named(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"txmq.toml: is not TOML"):
        load_broker(file, {})


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7650", ListenAddress("127.0.0.1", 7650)),
        ("localhost:0", ListenAddress("localhost", 0)),
        ("[::1]:65535", ListenAddress("::1", 65535)),
    ],
)
def test_an_address_has_a_host_and_a_port(text: str, address: ListenAddress) -> None:
    assert listen_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "7650", ":7650", "host", "host:", "host:65536", "host:-1", "host:٣", "::1:7650", "[::1]"],
)
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid address"):
        listen_address(text)


def test_a_resolver_needs_nothing_of_the_broker_in_its_file(file: Path) -> None:
    file.write_text("[[resolver]]\nname = 'shop'\ndsn = 'dbname=shop'\n[checks]\nfirst_s = 1.5")
    settings = load_resolvers(file)
    assert ([one.name for one in settings.resolver], settings.checks.first_s) == (["shop"], 1.5)
    file.write_text("[broker]\ndata = 'x'")
    with pytest.raises(ConfigError, match="resolver: is missing"):
        load_resolvers(file)


XA = """
[xa]
safety_s = 2
[[xa.database]]
name = "shop"
dsn = "postgresql://txmq:secret@db/shop"
[[xa.broker]]
url = "txmq://broker-2:7650"
"""


def test_a_recoverer_needs_nothing_of_the_broker_in_its_file(file: Path) -> None:
    file.write_text(XA)
    xa = load_xa(file)
    assert [(one.name, one.dsn) for one in xa.database] == [
        ("shop", "postgresql://txmq:secret@db/shop")
    ]
    assert ([one.url for one in xa.broker], xa.safety_s, xa.every_s) == (
        ["txmq://broker-2:7650"],
        2.0,
        10.0,
    )
    assert "secret" not in repr(xa)
    file.write_text(f"[broker]\ndata = 'x'\n{XA}")
    assert load_broker(file, {}).xa == xa


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "xa: is missing"),
        ("[xa]\nsafety_s = 3", r"xa: no \[\[xa.database\]\] is configured"),
        ("[[xa.database]]\nname = 'shop'", "xa.database.0.dsn: is missing"),
        ("[xa]\nsafety = 3", r"xa.safety: there is no such setting: did you mean safety_s\?"),
        (XA.replace("txmq://", "http://"), "xa.broker.0.url: must begin with txmq://"),
        (XA.replace("= 2", "= 0"), "xa.safety_s: must be greater than 0"),
    ],
)
def test_a_mistake_of_a_recoverer_s_is_named_by_its_path(file: Path, text: str, error: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=error):
        load_xa(file)


def _fields(model: type[BaseModel]) -> Iterator[str]:
    """Yield the names of all settings of a model and of its sections."""
    for name, field in model.model_fields.items():
        yield name
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _fields(part)


def test_every_setting_is_read_by_some_module() -> None:
    package = Path(txmq.__file__).parent
    read = {
        name
        for path in package.rglob("*.py")
        if "config" not in path.relative_to(package).parts
        for name in re.findall(r"\.(\w+)", path.read_text("utf-8"))
    }
    settings = set(_fields(SettingsFile))
    assert {"session_s", "end_backend_after_s"} <= settings, "sections are found"
    assert settings - read == set()


CLUSTER = """
[broker]
data = "/var/lib/txmq"
listen = "{listen}"
[cluster]
kafka = "k:9092"
"""


@pytest.mark.parametrize("listen", ["0.0.0.0:7650", "[::]:7650", "127.0.0.1:0"])
def test_a_node_that_nobody_can_find_has_to_say_where_it_is(file: Path, listen: str) -> None:
    said = mistake(file, CLUSTER.format(listen=listen))
    assert said.startswith(f"cluster: clients cannot be told {listen}: set cluster.advertise to")
    file.write_text(CLUSTER.format(listen=listen) + 'advertise = "node-1:7650"')
    cluster = load_broker(file, {}).cluster
    assert cluster is not None
    assert cluster.advertise == "node-1:7650"


def test_a_node_does_not_answer_before_the_others_have_it(file: Path) -> None:
    flush = 'listen = "h:1"\nflush = { every_ms = 5 }'
    said = mistake(file, CLUSTER.replace('listen = "{listen}"', flush))
    assert said == (
        "cluster: a node of a cluster answers once the others have it: flush = sync (in FILE)"
    )


def test_a_node_is_found_where_it_listens(file: Path) -> None:
    file.write_text(CLUSTER.format(listen="10.0.0.1:7650"))
    assert load_broker(file, {}).cluster is not None
