"""Settings that a running broker takes over: on SIGHUP, and by the call
`broker.reload`, it reads its settings file again.

What holds of the log, of connections and of threads is fixed when the broker starts; a
reload names it, so that nobody takes it for changed. Certificates need no reload.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from pydantic import BaseModel

from txmq.config.broker import public_settings
from txmq.errors import BadRequest, ConfigError

if TYPE_CHECKING:
    from txmq.broker.calls.dispatcher import CallContext, Handler
    from txmq.config.broker import SettingsFile
    from txmq.wire.calls.arguments import NoArgs

log = structlog.get_logger()


class Reloaded(NamedTuple):
    """The settings that differ from those before, as "section.name"; of a section that
    was not there, or of which there can be several, its name.
    """

    changed: list[str]  # in force now
    restart: list[str]  # in force after the next start


class LiveSection(NamedTuple):
    """A section of the file that may change. `fields`: those of it that may."""

    use: Callable[[Any], None]
    fields: Collection[str]


class SettingsReload:
    """The settings in force, and the parts of the broker that go by them."""

    def __init__(self, settings: SettingsFile) -> None:
        self._settings = settings
        self._sections: dict[str, LiveSection] = {}
        self.load: Callable[[], SettingsFile] | None = None  # None = there is no file
        self.handlers: dict[str, Handler] = {
            "broker.reload": self._answer,
            "broker.settings": self._show,
        }

    def register(self, name: str, use: Callable[[Any], None], fixed: Collection[str] = ()) -> None:
        """Let the section `name` change, but for its fields `fixed`; `use` gets the new
        one.
        """
        fields = type(getattr(self._settings, name)).model_fields.keys() - set(fixed)
        self._sections[name] = LiveSection(use, fields)

    def reload(self) -> Reloaded:
        """Read the file, and take over what may change. A file with a mistake changes
        nothing: ConfigError.
        """
        if self.load is None:
            reason = "the broker was started without a settings file"
            raise ConfigError("config", reason, hint="start it with --config FILE")
        found = Reloaded([], [])
        loaded, sections = self.load(), dict[str, Any]()
        for name in type(loaded).model_fields:
            old, new = getattr(self._settings, name), getattr(loaded, name)
            if old == new:
                continue
            live = self._sections.get(name)
            if not (isinstance(old, BaseModel) and isinstance(new, BaseModel)):
                found.restart.append(name)  # a list of sections, or one that was not there
                continue
            differs = [
                one for one in type(old).model_fields if getattr(old, one) != getattr(new, one)
            ]
            if live is None:
                found.restart.extend(f"{name}.{one}" for one in differs)
                continue
            takes = [one for one in differs if one in live.fields]
            found.restart.extend(f"{name}.{one}" for one in differs if one not in live.fields)
            found.changed.extend(f"{name}.{one}" for one in takes)
            if takes:
                sections[name] = old.model_copy(update={one: getattr(new, one) for one in takes})
        self._settings = self._settings.model_copy(update=sections)
        for name, section in sections.items():
            self._sections[name].use(section)
        log.info("settings.reloaded", changed=found.changed)
        if found.restart:
            log.warning("settings.need_a_restart", settings=found.restart)
        return found

    def on_signal(self) -> None:
        """Reload; a mistake in the file is logged."""
        try:
            self.reload()
        except ConfigError as error:
            log.error("settings.not_reloaded", error=str(error))  # noqa: TRY400  # no bug of ours

    def _show(self, call: CallContext, _args: NoArgs) -> None:
        call.answer({"settings": public_settings(self._settings)})

    def _answer(self, call: CallContext, _args: NoArgs) -> None:
        try:
            call.answer(self.reload()._asdict())
        except ConfigError as error:
            call.answer(BadRequest(error.message, hint=error.hint))
