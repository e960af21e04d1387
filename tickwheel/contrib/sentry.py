"""Sentry integration: a separate scope for each attempt of a handler, and capture of its errors.

    sentry_sdk.init(integrations=[TickwheelIntegration()])

It observes the attempts of all workers of the process. Invariants: an exception is captured once
for each attempt that it ends. Bodies of tasks are never sent, nor are values of variables, which
can contain parts of a body.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import sentry_sdk
from sentry_sdk.integrations import Integration
from sentry_sdk.integrations.logging import ignore_logger
from sentry_sdk.utils import current_stacktrace, event_from_exception

from tickwheel.client.jobs import LOGGER, OBSERVERS, Reject, RetryLater, Snooze
from tickwheel.errors import Undecodable

if TYPE_CHECKING:
    from tickwheel.client import Delivery

ORIGIN = "auto.queue.tickwheel"
VERDICTS = (Reject, RetryLater, Snooze)


class TickwheelIntegration(Integration):
    """Captures exceptions of handlers, with the tags ``tickwheel.topic``, ``.group``, ``.attempt``
    and ``.task_id``. With tracing, each attempt is a transaction in the trace of its task.

    With ``verdicts``, it also captures Reject, RetryLater and Snooze, which settle a task.
    """

    identifier = "tickwheel"

    def __init__(self, *, verdicts: bool = False) -> None:
        self.verdicts = verdicts

    @staticmethod
    def setup_once() -> None:
        """Observe all workers. ``sentry_sdk.init`` calls this once per process."""
        OBSERVERS.insert(0, _Observer())
        ignore_logger(LOGGER.name)  # it logs the same exceptions


class _Observer:
    def begin(self, delivery: Delivery) -> _Attempt | None:
        integration = _integration()
        return None if integration is None else _Attempt(delivery, verdicts=integration.verdicts)


class _Attempt:
    """The scope and the transaction of an attempt, which are the current ones until ``end``."""

    def __init__(self, delivery: Delivery, *, verdicts: bool) -> None:
        self._verdicts = verdicts
        with ExitStack() as contexts:
            scope = contexts.enter_context(sentry_sdk.isolation_scope())
            scope.clear_breadcrumbs()
            scope.add_event_processor(_without_variables)
            if delivery.encrypted_with is not None:
                scope.add_event_processor(_without_texts)
            for name, value in _about(delivery).items():
                scope.set_tag(f"tickwheel.{name}", value)
            contexts.enter_context(_transaction(delivery))
            self._contexts = contexts.pop_all()

    def end(self, outcome: str, error: BaseException | None = None) -> None:
        with self._contexts:
            if isinstance(error, VERDICTS):
                is_captured = self._verdicts
            elif isinstance(error, (asyncio.CancelledError, Undecodable)):
                is_captured = outcome == "nack"
            else:
                is_captured = outcome in ("nack", "settled")
            if error is not None and is_captured:
                _capture(error)


def _integration() -> TickwheelIntegration | None:
    return sentry_sdk.get_client().get_integration(TickwheelIntegration)


def _about(delivery: Delivery) -> dict[str, str]:
    return {
        "topic": delivery.topic,
        "group": delivery.group,
        "attempt": str(delivery.attempt),
        "task_id": str(delivery.id),
    }


def _transaction(delivery: Delivery) -> Any:
    """Return the Sentry transaction of an attempt, which is a context manager. Without tracing, it
    sends nothing."""
    headers = {}
    if delivery.trace is not None:  # convert the W3C format to Sentry's
        _, trace_id, span_id, flags = delivery.trace.split("-")[:4]
        headers["sentry-trace"] = f"{trace_id}-{span_id}-{int(flags, 16) & 1}"
    transaction = sentry_sdk.continue_trace(
        headers,
        op="queue.process",
        name=f"{delivery.topic} ({delivery.group})",
        source="task",
        origin=ORIGIN,
    )
    transaction.set_status("ok")
    for name, value in (
        ("system", "tickwheel"),
        ("destination.name", delivery.topic),
        ("message.id", str(delivery.id)),
        ("message.retry.count", delivery.failures),
        ("message.receive.latency", delivery.delivered_ms - delivery.due_ms),
    ):
        transaction.set_data(f"messaging.{name}", value)
    about = {"tickwheel": _about(delivery)}
    return sentry_sdk.start_transaction(transaction, custom_sampling_context=about)


def _capture(error: BaseException) -> None:
    scope = sentry_sdk.get_current_scope()
    if scope.transaction is not None:
        scope.transaction.set_status("internal_error")
    event, hint = event_from_exception(
        error,
        client_options=sentry_sdk.get_client().options,
        mechanism={"type": TickwheelIntegration.identifier, "handled": False},
    )
    scope.capture_event(event, hint=hint)


def _without_variables(event: Any, _: Any) -> Any:
    """Remove the values of variables from the frames of the event."""
    has_stack = not event.keys().isdisjoint(("exception", "stacktrace", "threads"))
    attaches = sentry_sdk.get_client().options["attach_stacktrace"]
    if attaches and not has_stack and event.get("type") is None:
        # Sentry would otherwise add the stack later, with variables.
        stack = current_stacktrace(include_local_variables=False)
        here = {"stacktrace": stack, "crashed": False, "current": True}
        event["threads"] = {"values": [here]}
    parts = [event, *_values(event, "exception"), *_values(event, "threads")]
    for part in parts:
        for frame in ((part.get("stacktrace") or {}).get("frames")) or ():
            frame.pop("vars", None)
    return event


def _without_texts(event: Any, _: Any) -> Any:
    """Remove the texts of exceptions, which can contain decrypted parts of a body."""
    for exception in _values(event, "exception"):
        exception["value"] = ""
    return event


def _values(event: Any, name: str) -> list[Any]:
    return (event.get(name) or {}).get("values") or []
