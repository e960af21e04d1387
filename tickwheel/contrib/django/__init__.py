"""Django: enqueue tasks from views, at once or on commit, and a command that runs handlers.

    INSTALLED_APPS = [..., "tickwheel.contrib.django"]
    TICKWHEEL = {"URL": "tcp://wheel.internal:7355", "HANDLERS": ["shop.tasks:worker"]}

    enqueue_on_commit("orders.close", b"", delay=1800, key="42")

``python manage.py check`` checks the settings (``apps.py``), and ``python manage.py
tickwheel_worker`` runs the workers of HANDLERS. Invariant: each process has one client, even after
a fork. The client is created on first use and closed when the process ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Unpack

from django.conf import settings
from django.db import transaction

from tickwheel.api.times import Duration
from tickwheel.client import Receipt, Task
from tickwheel.client.keywords import TaskKeywords
from tickwheel.client.tasks import TaskChecker
from tickwheel.sync import Client

CLIENT_KEYS = frozenset({
    "URL", "TOKEN", "CA", "CLIENT_CERT", "CLIENT_KEY",
    "SEND_TIMEOUT", "RETRIES", "CONNECT_TIMEOUT", "ACTIVE_TIMEOUT", "HEARTBEAT",
})  # fmt: skip
"""Keys of the setting TICKWHEEL that are keywords of Client, in upper case."""
OTHER_KEYS = frozenset(("HANDLERS", "TIMEOUT"))
"""HANDLERS names the workers that ``tickwheel_worker`` runs. TIMEOUT is the default timeout, in
seconds, of the enqueue functions of this module."""

_CLIENTS: dict[str, Client] = {}


def options() -> Mapping[str, Any]:
    """Return the setting TICKWHEEL."""
    setting: Mapping[str, Any] = getattr(settings, "TICKWHEEL", {})
    return setting


def client_options() -> dict[str, Any]:
    """Return the keywords of Client that the setting contains."""
    return {name.lower(): value for name, value in options().items() if name in CLIENT_KEYS}


def client() -> Client:
    """Return the client of this process, which connects with its first call."""
    default = _CLIENTS.get("default")
    if default is None:  # concurrent threads get the first client; surplus ones never connect
        default = _CLIENTS.setdefault("default", Client(**client_options()))
    return default


def forget_client() -> None:
    """Close the client of this process. The next use creates a client from the current settings."""
    default = _CLIENTS.pop("default", None)
    if default is not None:
        default.close()


def enqueue(
    topic: str,
    body: bytes,
    *,
    delay: Duration | None = None,
    at: datetime | None = None,
    timeout: Duration | None = None,
    **task: Unpack[TaskKeywords],
) -> Receipt:
    """Store a task durably and immediately, like ``Client.enqueue``. The default ``timeout`` is
    TIMEOUT in the settings."""
    limit = timeout if timeout is not None else options().get("TIMEOUT")
    return client().enqueue(topic, body, delay=delay, at=at, timeout=limit, **task)


def enqueue_on_commit(
    topic: str,
    body: bytes,
    *,
    delay: Duration | None = None,
    at: datetime | None = None,
    timeout: Duration | None = None,
    using: str | None = None,
    robust: bool = False,
    **task: Unpack[TaskKeywords],
) -> None:
    """Call ``enqueue`` after the transaction of the database ``using`` is committed, or at once
    without a transaction. ``delay`` counts from that moment. A rollback discards the task.

    An invalid task raises an error here, while the transaction can be rolled back. An error after
    the commit is raised at the end of the ``atomic`` block; then the transaction's data is stored
    without the task. With ``robust`` this error is logged, and other ``on_commit`` functions run.
    """
    TaskChecker().check(Task(topic, body, delay=delay, at=at, **task))

    def store() -> None:
        enqueue(topic, body, delay=delay, at=at, timeout=timeout, **task)

    transaction.on_commit(store, using=using, robust=robust)
