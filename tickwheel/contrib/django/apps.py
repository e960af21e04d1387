"""The configuration of the Django application, and the system checks of the setting TICKWHEEL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, register
from django.core.signals import setting_changed

from tickwheel.api.times import duration_ms
from tickwheel.client import Client
from tickwheel.client.worker import joined
from tickwheel.contrib import django as contrib
from tickwheel.contrib.workers import load_worker
from tickwheel.errors import TickwheelError


class TickwheelConfig(AppConfig):
    """Registers the checks, and resets the client when a test overrides the setting."""

    name = "tickwheel.contrib.django"
    label = "tickwheel"
    verbose_name = "Tickwheel"

    def ready(self) -> None:
        register(check_settings)
        setting_changed.connect(_changed, dispatch_uid="tickwheel")


def _changed(*, setting: str, **_: Any) -> None:
    if setting == "TICKWHEEL":
        contrib.forget_client()


def check_settings(**_: Any) -> list[CheckMessage]:
    """Return the errors in the setting TICKWHEEL. This imports the handlers."""
    return list(_errors(contrib.options()))


def _errors(options: Any) -> Iterator[CheckMessage]:
    if not isinstance(options, Mapping):
        yield _error(1, f"TICKWHEEL must be a dict, not {type(options).__name__}")
        return
    known = sorted(contrib.CLIENT_KEYS | contrib.OTHER_KEYS)
    for name in sorted(map(str, options.keys() - {*known})):
        close = get_close_matches(name.upper(), known, 1)
        hint = f"Do you mean {close[0]}?" if close else f"Valid keys are {', '.join(known)}."
        yield _error(2, f"TICKWHEEL has no key {name!r}", hint)
    try:
        Client(**contrib.client_options())
    except (TickwheelError, TypeError, AttributeError) as error:
        message = error.message if isinstance(error, TickwheelError) else str(error)
        yield _error(3, f"TICKWHEEL: the client cannot be created: {message}")
    if options.get("TIMEOUT") is not None:
        try:
            duration_ms(options["TIMEOUT"], "TICKWHEEL['TIMEOUT']")
        except TickwheelError as error:
            yield _error(4, error.message)
    yield from _handler_errors(options.get("HANDLERS", ()))


def _handler_errors(targets: Any) -> Iterator[CheckMessage]:
    if not isinstance(targets, (list, tuple)) or not all(isinstance(name, str) for name in targets):
        hint = 'For example "HANDLERS": ["shop.tasks:worker"].'
        yield _error(5, f"TICKWHEEL['HANDLERS'] must be a list of strings, not {targets!r}", hint)
        return
    workers = []
    for target in targets:
        try:
            workers.append(load_worker(target))
        except TickwheelError as error:
            yield _error(6, f"TICKWHEEL['HANDLERS']: {error.message}")
    if not workers:
        return
    try:
        joined(Client(), workers, signals=False)
    except TickwheelError as error:
        yield _error(7, f"TICKWHEEL['HANDLERS']: {error.message}")


def _error(number: int, message: str, hint: str | None = None) -> Error:
    return Error(message, hint=hint, id=f"tickwheel.E{number:03}")
