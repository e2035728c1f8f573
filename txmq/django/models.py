"""A model without a table: the page of Django's admin, and the right to see it."""

from __future__ import annotations

from django.db import models


class Broker(models.Model):  # type: ignore[misc]  # Django has no types
    """Model for the page of what waits at the brokers."""

    class Meta:
        """No table is made for it."""

        managed = False
        default_permissions = ("view",)
        verbose_name = "broker"
        verbose_name_plural = "transactions and dead letters"

    def __str__(self) -> str:
        return "broker"
