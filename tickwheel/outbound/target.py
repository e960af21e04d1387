"""The interface of targets, their URLs, and the messages that other systems receive.

``Target`` and ``Outcome`` are the whole interface. A custom kind of target is a function
``(url, secret) -> Target``, registered as an entry point of the group ``tickwheel.targets`` with
the scheme of its URLs as the name. ``message`` converts a delivery to a body and headers.

Invariants: passwords in URLs are refused, because URLs are listed and logged. URLs with unknown
options are refused. This module depends neither on subscriptions nor on any target's library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import entry_points
from typing import Final, NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from tickwheel.api.targets import BATCH, BATCH_MAX
from tickwheel.api.tasks import Value
from tickwheel.client.delivery import Delivery
from tickwheel.errors import BadRequest, needs_extra, shown
from tickwheel.model.records import id_time_ms
from tickwheel.model.values import whole_number


class Outcome(NamedTuple):
    """The outcome of a delivery."""

    settled: str
    """``ack``: the other system has accepted it. ``retry``: it failed and is retried after
    ``delay_s`` or by the group's retry policy. ``reject``: it cannot succeed and becomes a dead
    letter. ``later``: it is postponed by ``delay_s`` without counting as a failure."""
    delay_s: float | None = None
    reason: str | None = None


ACK: Final = Outcome("ack")


class NotNow(Exception):
    """The other system currently accepts no deliveries, whatever the tasks are.

    If some deliveries of the batch were accepted, ``outcomes`` has the outcome of each delivery, in
    order, which is ``later`` for the others. An empty sequence means that none was accepted.
    """

    def __init__(self, reason: str, outcomes: Sequence[Outcome] = ()) -> None:
        super().__init__(reason)
        self.outcomes = outcomes


class Target(Protocol):
    """A destination of deliveries. ``connect`` is called before the first ``send``, and again
    before a ``send`` after ``close``."""

    batch_max: int
    """Maximum number of deliveries in one ``send``."""
    concurrency: int
    """Maximum number of concurrent calls of ``send``."""

    async def connect(self) -> None:
        """Prepare to send. Raise an error if the other system is unreachable."""

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[Outcome]:
        """Send deliveries. Return an Outcome for each, in order, after the other system has
        confirmed it.

        After an error, ``connect`` is called and the deliveries are sent again, except those that
        ``NotNow.outcomes`` settles. ``NotNow`` does not count as a failed attempt; any other error
        does, because one of the deliveries may have caused it. The target sets its own timeout."""

    async def close(self) -> None:
        """Close the connection, even after an error. A second call does nothing."""


# --- URLs of targets -----------------------------------------------------------------------------

Factory = Callable[[str, str | None], Target]
"""Creates a target from a URL and a secret such as a password, without connecting."""

ENTRY_POINTS: Final = "tickwheel.targets"
_BUILTIN: Final = {
    "redis": "redis_target", "rediss": "redis_target",
    "amqp": "amqp_target", "amqps": "amqp_target",
    "kafka": "kafka_target", "kafkas": "kafka_target",
}  # fmt: skip
"""Scheme → the function of ``forward.py``."""


def target_of(url: str, secret: str | None = None) -> Target:
    """Create the target of a URL without connecting.

    Raise BadRequest for an unknown scheme, a missing extra, or options that the target refuses."""
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    return _factory(scheme)(url, secret)


def _factory(scheme: str) -> Factory:
    if scheme in _BUILTIN:
        builtin: Factory = getattr(import_module("tickwheel.outbound.forward"), _BUILTIN[scheme])
        return builtin
    plugins = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if scheme in plugins:
        plugin: Factory = plugins[scheme].load()
        return plugin
    schemes = ", ".join(f"{name}://" for name in (*_BUILTIN, *sorted(plugins)))
    raise BadRequest(f"url must begin with one of {schemes}, not {shown(f'{scheme}://')}")


def needs(extra: str) -> AbstractContextManager[None]:
    """Convert a failed import of a target's library to a BadRequest that names the extra."""
    return needs_extra("this target", extra)


class TargetUrl:
    """A parsed URL of a target.

    ``option``, ``number`` and ``choice`` read its query; ``check_all_read`` refuses unread
    options."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            self.scheme: str = parts.scheme
            has_password = parts.password is not None
            self._host, self._port = parts.hostname, None if "," in parts.netloc else parts.port
        except ValueError as error:
            raise BadRequest(f"url is not a valid URL: {error}") from None
        if has_password:
            raise BadRequest("url must not contain a password: pass it in a file")
        user, at, hosts = parts.netloc.rpartition("@")
        self.user = unquote(user) if at else None
        self.hosts = hosts
        """HOST:PORT, or several of these separated by commas."""
        self.path = unquote(parts.path.removeprefix("/"))
        try:
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise BadRequest(f"the query of url is not valid: {error}") from None
        self._options = dict(pairs)
        if len(self._options) < len(pairs):
            raise BadRequest("url has an option more than once")

    def host(self) -> str:
        """Return the host name or address. Raise BadRequest unless the URL names exactly one."""
        if not self._host or "," in self.hosts:
            raise BadRequest(f"url must name one host: {self.scheme}://HOST")
        return self._host

    def port(self, default: int) -> int:
        return default if self._port is None else self._port

    def has_option(self, name: str) -> bool:
        """Return whether the query has the option."""
        return name in self._options

    def option(self, name: str, default: str | None = None) -> str:
        """Return an option of the query. Raise BadRequest if the option is absent or empty and
        there is no default."""
        value = self._options.pop(name, default)
        if value is None or (not value and default is None):
            raise BadRequest(f"url must have {name}: {self.scheme}://…?{name}=…")
        return value

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """Return an option that is a whole number between ``low`` and ``high``."""
        text = self._options.pop(name, None)
        if text is None:
            return default
        number = whole_number(text)
        if number is None or not low <= number <= high:
            raise BadRequest(f"{name} of url must be between {low} and {high}, not {shown(text)}")
        return number

    def batch_max(self) -> int:
        """Return the option ``batch``: the maximum number of deliveries in one ``send``."""
        return self.number("batch", BATCH, 1, BATCH_MAX)

    def choice(self, name: str, *words: str) -> str:
        """Return an option that is one of these words. The first word is the default."""
        value = self._options.pop(name, words[0])
        if value not in words:
            raise BadRequest(f"{name} of url must be {' or '.join(words)}, not {shown(value)}")
        return value

    def check_all_read(self) -> None:
        """Raise BadRequest for an option that was not read."""
        if self._options:
            name = next(iter(self._options))
            raise BadRequest(f"{shown(name)} is not a valid option of {self.scheme}://")


# --- messages to other systems -------------------------------------------------------------------

CONTENT_TYPES: Final = {"json": "application/json", "msgpack": "application/msgpack"}
"""Content types by the first part of an encoding."""
PREFIX: Final = "tickwheel-"
PROPERTY: Final = "property-"
DEDUPE_ID: Final = "tickwheel-dedupe-id"


class Message(NamedTuple):
    """A task in the form that other systems receive."""

    body: bytes
    """The stored bytes, not decoded; the header ``tickwheel-encoding`` states their encoding."""
    headers: dict[str, Value]


def message(delivery: Delivery) -> Message:
    """Return the message of a delivery, without headers that have no value."""
    item = delivery.raw
    task_id, attempt, due_ms, body = item[:4]
    headers: dict[str, Value] = {
        DEDUPE_ID: str(task_id),
        "tickwheel-id": str(task_id),
        "tickwheel-topic": delivery.topic,
        "tickwheel-enqueued-ms": id_time_ms(task_id),
        "tickwheel-due-ms": due_ms,
        "tickwheel-attempt": attempt,
    }
    if len(item) > 4:
        _add_options(headers, delivery)
    return Message(body, headers)


def _add_options(headers: dict[str, Value], delivery: Delivery) -> None:
    encoding = delivery.encoding
    values = {
        "tickwheel-key": delivery.key,
        "tickwheel-order-key": delivery.order_key,
        "tickwheel-tag": delivery.tag,
        "tickwheel-priority": delivery.priority or None,
        "tickwheel-encoding": encoding,
        "tickwheel-replay-of": None if delivery.replay_of is None else str(delivery.replay_of),
        "traceparent": delivery.trace,
        "content-type": CONTENT_TYPES.get((encoding or "").partition(";")[0]),
    }
    headers.update((name, value) for name, value in values.items() if value is not None)
    headers.update((PROPERTY + name, value) for name, value in delivery.properties.items())


def as_text(value: Value) -> str:
    """Return a header's value as text: numbers in decimal, booleans as ``true`` or ``false``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)


def error_text(error: BaseException) -> str:
    """Return the text of an error on one line, for reasons and states."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    if type(error) is NotNow:
        return text
    if isinstance(error, TimeoutError) and not text:
        return "no answer in time"
    return f"{name}: {text}" if text else name
