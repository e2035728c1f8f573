"""Settings of Django for tests, which there can be one of in a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django
from django.conf import settings
from django.db import connections
from psycopg2.extensions import parse_dsn

import txmq.django
from txmq.client.blocking.client import Client

PLAIN, OWN, OTHER = "default", "own", "other"
_NAMES = {
    "NAME": "dbname",
    "USER": "user",
    "PASSWORD": "password",
    "HOST": "host",
    "PORT": "port",
}


def configure() -> None:
    """Set Django up, once: a database of Django's backend, two of txmq's."""
    if settings.configured:
        return
    engines = {
        PLAIN: "django.db.backends.postgresql",
        OWN: "txmq.django.backend",
        OTHER: "txmq.django.backend",
    }
    settings.configure(
        DATABASES={alias: {"ENGINE": engine} for alias, engine in engines.items()},
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "txmq.django",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        ROOT_URLCONF="tests.client.django_urls",
        SECRET_KEY="for tests",
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        LOGGING_CONFIG=None,
        USE_TZ=True,
    )
    django.setup()


@contextmanager
def database(alias: str, dsn: str) -> Iterator[Any]:
    """Return Django's connection of this thread to a database."""
    configure()
    place = parse_dsn(dsn)
    wrapper = connections[alias]
    before = wrapper.settings_dict
    # Other threads read the settings, this thread its connection.
    for known in (wrapper.settings_dict, connections.settings[alias]):
        known.update({name: place.get(key, "") for name, key in _NAMES.items()})
    wrapper.close()
    try:
        yield wrapper
    finally:
        wrapper.close()
        wrapper.settings_dict = before


@contextmanager
def sender(client: Client) -> Iterator[None]:
    """Let `txmq.django` send by a client."""
    original = txmq.django.client
    txmq.django.client = lambda: client  # for a while
    try:
        yield
    finally:
        txmq.django.client = original
