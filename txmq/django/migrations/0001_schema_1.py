"""txmq's tables of version 1."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

from txmq.tx.postgres.schema import install


def make_tables(_apps: object, editor: Any) -> None:  # noqa: ANN401  # Django has no types
    """Make the tables as `txmq schema install` does, in a PostgreSQL."""
    if editor.connection.vendor == "postgresql":
        editor.connection.ensure_connection()
        install(editor.connection.connection)


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """The tables stay where the migration is taken back: they are evidence."""

    atomic = False  # the installation has a transaction and a lock of its own
    operations: ClassVar = [
        migrations.RunPython(make_tables, migrations.RunPython.noop),
        migrations.CreateModel(
            name="Broker",
            fields=[("id", models.BigAutoField(primary_key=True))],
            options={
                "managed": False,
                "default_permissions": ("view",),
                "verbose_name": "broker",
                "verbose_name_plural": "transactions and dead letters",
            },
        ),
    ]
