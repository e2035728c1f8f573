"""A page of Django's admin for undecided transactions and dead letters, to look at."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.template.response import TemplateResponse

import txmq.django
from txmq.client.blocking.client import Client
from txmq.client.blocking.cluster import Cluster
from txmq.django.models import Broker
from txmq.errors import TxmqError
from txmq.model.units import SECOND

SHOWN = 100  # rows of a table


@admin.register(Broker)
class BrokerAdmin(admin.ModelAdmin):  # type: ignore[misc]  # Django has no types
    """For those with the permission `txmq.view_broker`."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> TemplateResponse:
        """Return the page; `?group=` lists the letters of a group."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        group = request.GET.get("group", "")
        context = {
            **self.admin_site.each_context(request),
            "title": self.opts.verbose_name_plural,
            "opts": self.opts,
            "group": group,
            **(extra_context or {}),
        }
        try:
            context |= found(txmq.django.client(), group)
        except TxmqError as error:
            context["error"] = error
        return TemplateResponse(request, "txmq/broker.html", context)


def found(client: Client | Cluster, group: str) -> dict[str, Any]:
    """Return the rows of the page's tables. Raises as a call does."""
    return {
        "shown": SHOWN,
        "transactions": list(islice(undecided(client), SHOWN)),
        "groups": list(islice(groups(client), SHOWN)),
        "letters": [
            letter._asdict() | {"dead_at": moment(letter.dead_at)}
            for letter in islice(client.letters(group), SHOWN if group else 0)
        ],
    }


def undecided(client: Client | Cluster) -> Iterator[dict[str, Any]]:
    """Yield the undecided transactions of each broker, the oldest first."""
    for broker in brokers(client):
        listed = broker.call("tx.list", state="undecided", limit=SHOWN)
        for transaction in listed["transactions"]:
            yield transaction | {"stored_at": moment(transaction["stored_at"])}


def groups(client: Client | Cluster) -> Iterator[dict[str, Any]]:
    """Yield the groups that have unprocessed messages."""
    for broker in brokers(client):
        for group in broker.call("group.list", limit=1_000)["groups"]:
            if group["unprocessed"]:
                yield group


def brokers(client: Client | Cluster) -> list[Client]:
    """Return a client of each broker."""
    return list(client.clients) if isinstance(client, Cluster) else [client]


def moment(micros: int) -> datetime:
    """Return a time as Django's templates show it."""
    return datetime.fromtimestamp(micros / SECOND, UTC)
