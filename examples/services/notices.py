"""Writes to customers when their parcels are sent: Django.

    python -m examples.services.notices

The notice's row and the ack of the message are one decision, that of `atomic()`: each
message has one notice, without an inbox. `txmq_consume` is a command of `manage.py`.
A project has the settings and the model of this file in modules of its own.
"""

from __future__ import annotations

import json
import os

import django
from django.conf import settings
from django.core.management import call_command
from django.db import models
from psycopg.conninfo import conninfo_to_dict

import txmq

PLACE = conninfo_to_dict(os.environ["DSN"])

settings.configure(
    INSTALLED_APPS=["txmq.django"],
    DATABASES={
        "default": {
            "ENGINE": "txmq.django.backend", "NAME": PLACE.pop("dbname"), "OPTIONS": PLACE,
        }
    },
    TXMQ={"URL": os.environ["TXMQ_BROKER"], "SERVICE": "notices"},
)  # fmt: skip
django.setup()


class Notice(models.Model):
    """What a customer is told."""

    order_id = models.TextField()
    parcel = models.TextField()

    class Meta:
        """The place of the table."""

        app_label = "notices"
        db_table = "notices"

    def __str__(self) -> str:
        return f"order {self.order_id} is parcel {self.parcel}"


def tell(message: txmq.ReceivedMessage) -> None:
    """Write one notice."""
    shipped = json.loads(message.body)
    Notice.objects.create(order_id=shipped["order"], parcel=shipped["parcel"])


if __name__ == "__main__":
    call_command("txmq_consume", "notices", "shipped", handler=f"{__name__}.tell", workers=2)
