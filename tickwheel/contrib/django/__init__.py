"""Django: tasks from views, with the transaction or at once, and a command that runs handlers.

    INSTALLED_APPS = [..., "tickwheel.contrib.django"]
    TICKWHEEL = {"URL": "tcp://wheel.internal:7355", "HANDLERS": ["shop.tasks:worker"]}

    enqueue_on_commit("orders.close", b"", delay=1800, key="42")

``python manage.py check`` says what is wrong with the settings (``apps.py``), ``python manage.py
tickwheel_worker`` runs the workers of HANDLERS. Invariant: there is one client in each process,
made with its first use, also after a fork; it is closed when the process ends.
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
"""Keys of the setting TICKWHEEL that are keywords of Client, in capitals."""
OTHER_KEYS = frozenset(("HANDLERS", "TIMEOUT"))
"""HANDLERS are the workers of ``tickwheel_worker``; TIMEOUT is how long, in seconds, an enqueue of
this module may take that does not say it."""

_CLIENTS: dict[str, Client] = {}


def options() -> Mapping[str, Any]:
    """The setting TICKWHEEL."""
    found: Mapping[str, Any] = getattr(settings, "TICKWHEEL", {})
    return found


def client_options() -> dict[str, Any]:
    """The keywords of Client that the setting has."""
    return {name.lower(): value for name, value in options().items() if name in CLIENT_KEYS}


def client() -> Client:
    """The client of this process; it connects with its first call."""
    found = _CLIENTS.get("default")
    if found is None:  # two threads may get here; one client is used, and none is connected yet
        found = _CLIENTS.setdefault("default", Client(**client_options()))
    return found


def forget_client() -> None:
    """Close the client of this process; the next use makes one of the settings as they are."""
    found = _CLIENTS.pop("default", None)
    if found is not None:
        found.close()


def enqueue(
    topic: str,
    body: bytes,
    *,
    delay: Duration | None = None,
    at: datetime | None = None,
    timeout: Duration | None = None,
    **task: Unpack[TaskKeywords],
) -> Receipt:
    """Store a task durably, now; as ``Client.enqueue``, and within TIMEOUT of the settings when it
    has no ``timeout``."""
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
    """``enqueue`` when the transaction of the database ``using`` is committed, and never when it is
    rolled back; at once where there is none. ``delay`` counts from then.

    What is wrong with the task is raised here, while the transaction can be rolled back. What goes
    wrong after the commit is raised where the ``atomic`` block ends, and the order, say, is stored
    without its task; ``robust``: it is logged instead, and other functions of ``on_commit`` run.
    """
    TaskChecker().check(Task(topic, body, delay=delay, at=at, **task))

    def store() -> None:
        enqueue(topic, body, delay=delay, at=at, timeout=timeout, **task)

    transaction.on_commit(store, using=using, robust=robust)
