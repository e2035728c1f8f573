"""Parts of txmq whose packages `pip install txmq` does not bring."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from txmq.errors.base import TxmqError


class MissingExtra(TxmqError, ImportError):
    """A part of txmq was imported without its packages; `extra` brings them."""

    def __init__(self, extra: str, missing: list[str]) -> None:
        packages = " and ".join(missing)
        super().__init__(f"{packages} cannot be imported", hint=f"run: {how_to_install(extra)}")
        self.extra = extra


def how_to_install(extra: str) -> str:
    """Return the command that brings an extra, from where this txmq was installed."""
    # for the rare program that lacks something
    import json  # noqa: PLC0415
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415
    from urllib.parse import unquote, urlsplit  # noqa: PLC0415

    try:
        text = distribution("txmq").read_text("direct_url.json")  # PEP 610
    except PackageNotFoundError:
        text = None
    source = json.loads(text) if text else {}
    url = str(source.get("url", ""))
    if (directory := source.get("dir_info")) is not None:
        editable = "-e " if directory.get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(url).path)}[{extra}]'"
    kind = source.get("vcs_info", {}).get("vcs")
    place = f" @ {f'{kind}+' if kind else ''}{url}" if url else ""
    return f"pip install 'txmq[{extra}]{place}'"


def require(extra: str, *modules: str) -> None:
    """Raise MissingExtra unless the modules that an extra brings can be found.

    A part calls it before it imports them: their own error would name a module that its
    user has never heard of.
    """
    if missing := [name for name in modules if _is_missing(name)]:
        raise MissingExtra(extra, missing)


def _is_missing(name: str) -> bool:
    # A module that is there already may have no spec, such as Kombu's.
    return sys.modules[name] is None if name in sys.modules else find_spec(name) is None
