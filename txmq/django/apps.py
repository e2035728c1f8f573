"""The app `txmq.django`, and its check of the settings."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.signals import setting_changed

import txmq.django
from txmq.errors import ConfigError


class TxmqConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """The app. Its migrations make txmq's tables, which no model knows."""

    name = "txmq.django"
    label = "txmq"
    verbose_name = "txmq"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        checks.register(check_settings)
        setting_changed.connect(_forget_client)


def check_settings(**_options: Any) -> list[checks.CheckMessage]:  # noqa: ANN401  # Django's
    """Warn of settings that take no messages along."""
    found: list[checks.CheckMessage] = []
    try:
        txmq.django.client()
    except ConfigError as error:
        found.append(checks.Warning(error.message, hint=error.hint, id="txmq.W001"))
    engines = [database.get("ENGINE", "") for database in settings.DATABASES.values()]
    if "django.db.backends.postgresql" in engines and "txmq.django.backend" not in engines:
        found.append(
            checks.Warning(
                "No database takes messages along",
                hint=txmq.django.BACKEND_HINT,
                id="txmq.W002",
            )
        )
    return found


def _forget_client(*, setting: str, **_options: Any) -> None:  # noqa: ANN401  # Django's
    if setting == "TXMQ":
        txmq.django.forget_client()
