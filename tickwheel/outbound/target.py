"""What a target is, how a URL makes one, and what other systems are told of a task.

``Target`` and ``Outcome`` are the whole interface: a kind of target of your own is a function
``(url, secret) -> Target``, named by an entry point of the group ``tickwheel.targets`` whose name
is the scheme of its URLs. ``message`` is the one place where a delivery becomes a body and headers.

Invariants: no password is taken from a URL, since URLs are listed and logged; a URL with a word
that nobody reads is refused. Knows nothing of subscriptions, and of no target's library.
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


class Outcome(NamedTuple):
    """What becomes of one delivery."""

    settled: str
    """``ack``: the other side has it. ``retry``: it failed, again after ``delay_s``, or by the
    group's retry policy. ``reject``: it can never succeed, a dead letter at once. ``later``: not
    now, again after ``delay_s``, and it counts as no failure."""
    delay_s: float | None = None
    reason: str | None = None


ACK: Final = Outcome("ack")


class NotNow(Exception):
    """The other side says of itself that it takes nothing at the moment: no task is to blame.

    ``outcomes``: what became of each delivery of the batch, in order, where some were taken;
    ``later`` stands for those that were not. Without them none was taken.
    """

    def __init__(self, reason: str, outcomes: Sequence[Outcome] = ()) -> None:
        super().__init__(reason)
        self.outcomes = outcomes


class Target(Protocol):
    """Where deliveries go. One ``connect`` before the first ``send``, and again after ``close``."""

    batch_max: int
    """How many deliveries one ``send`` takes."""
    concurrency: int
    """How many ``send`` may be under way at a time."""

    async def connect(self) -> None:
        """Get ready to send. Raises when the other side cannot be reached."""

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[Outcome]:
        """Hand over deliveries; one Outcome for each, in order, once the other side has confirmed
        it. Raising means: all of them again, and ``connect`` before. ``NotNow`` costs no task an
        attempt; with any other error one of the deliveries may be to blame. It has a time-out of
        its own."""

    async def close(self) -> None:
        """Let go of the connection, also of one that has failed. It may be called twice."""


# --- a target of a URL ---------------------------------------------------------------------------

Factory = Callable[[str, str | None], Target]
"""Makes a target of a URL and a password, or another secret, without connecting."""

ENTRY_POINTS: Final = "tickwheel.targets"
_OURS: Final = {
    "redis": "redis_target", "rediss": "redis_target",
    "amqp": "amqp_target", "amqps": "amqp_target",
    "kafka": "kafka_target", "kafkas": "kafka_target",
}  # fmt: skip
"""Scheme → the function of ``forward.py``."""


def target_of(url: str, secret: str | None = None) -> Target:
    """The target that a URL names; nothing is connected. Raises BadRequest for a scheme that nobody
    knows, an extra that is missing, or what the target objects to."""
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    return _factory(scheme)(url, secret)


def _factory(scheme: str) -> Factory:
    if scheme in _OURS:
        ours: Factory = getattr(import_module("tickwheel.outbound.forward"), _OURS[scheme])
        return ours
    theirs = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if scheme in theirs:
        loaded: Factory = theirs[scheme].load()
        return loaded
    known = ", ".join(f"{name}://" for name in (*_OURS, *sorted(theirs)))
    raise BadRequest(f"url must begin with one of {known}, not {shown(f'{scheme}://')}")


def needs(extra: str) -> AbstractContextManager[None]:
    """Around the import of a target's library: its lack is a BadRequest that names the extra."""
    return needs_extra("this target", extra)


class TargetUrl:
    """A target's URL taken apart: ``option`` and ``number`` read its query, ``done`` says that all
    of it was read."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            self.scheme: str = parts.scheme
            has_password = parts.password is not None
            self._host, self._port = parts.hostname, None if "," in parts.netloc else parts.port
        except ValueError as error:
            raise BadRequest(f"url is none: {error}") from None
        if has_password:
            raise BadRequest("url must not have a password: it is given apart, by a file")
        user, at, places = parts.netloc.rpartition("@")
        self.user = unquote(user) if at else None
        self.places = places
        """What stands between the user and the path: HOST:PORT, or several with commas."""
        self.path = unquote(parts.path.removeprefix("/"))
        try:
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise BadRequest(f"the query of url is none: {error}") from None
        self._options = dict(pairs)
        if len(self._options) < len(pairs):
            raise BadRequest("an option of url is there twice")

    def host(self) -> str:
        """The name or address to connect to."""
        if not self._host or "," in self.places:
            raise BadRequest(f"url must name one host: {self.scheme}://HOST")
        return self._host

    def port(self, default: int) -> int:
        return default if self._port is None else self._port

    def has(self, name: str) -> bool:
        """Whether the query has the option."""
        return name in self._options

    def option(self, name: str, default: str | None = None) -> str:
        """An option of the query; without a default it has to be there, and not to be empty."""
        found = self._options.pop(name, default)
        if found is None or (not found and default is None):
            raise BadRequest(f"url lacks {name}: {self.scheme}://…?{name}=…")
        return found

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """An option that is a whole number of ``low`` to ``high``."""
        text = self._options.pop(name, None)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise BadRequest(f"{name} of url must be {low} to {high}, not {shown(text)}")
        return int(text)

    def batch_max(self) -> int:
        """How many deliveries one ``send`` takes: the option ``batch``."""
        return self.number("batch", BATCH, 1, BATCH_MAX)

    def choice(self, name: str, *words: str) -> str:
        """An option that is one of these words; the first is the default."""
        found = self._options.pop(name, words[0])
        if found not in words:
            raise BadRequest(f"{name} of url must be {' or '.join(words)}, not {shown(found)}")
        return found

    def done(self) -> None:
        """Raises BadRequest for an option that nothing has read."""
        if self._options:
            name = next(iter(self._options))
            raise BadRequest(f"url has the option {shown(name)}, which {self.scheme}:// has not")


# --- what other systems are told -----------------------------------------------------------------

CONTENT_TYPES: Final = {"json": "application/json", "msgpack": "application/msgpack"}
"""By what the first part of an encoding says that the body is."""
PREFIX: Final = "tickwheel-"
PROPERTY: Final = "property-"
DEDUPE_ID: Final = "tickwheel-dedupe-id"


class Message(NamedTuple):
    """A task as other systems get it."""

    body: bytes
    """The bytes that were stored: nothing is unpacked, ``tickwheel-encoding`` says what was done to
    them."""
    headers: dict[str, Value]


def message(delivery: Delivery) -> Message:
    """What other systems get of a delivery. Headers that have nothing to say are absent."""
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
    said = {
        "tickwheel-key": delivery.key,
        "tickwheel-order-key": delivery.order_key,
        "tickwheel-tag": delivery.tag,
        "tickwheel-priority": delivery.priority or None,
        "tickwheel-encoding": encoding,
        "tickwheel-replay-of": None if delivery.replay_of is None else str(delivery.replay_of),
        "traceparent": delivery.trace,
        "content-type": CONTENT_TYPES.get((encoding or "").partition(";")[0]),
    }
    headers.update((name, value) for name, value in said.items() if value is not None)
    headers.update((PROPERTY + name, value) for name, value in delivery.properties.items())


def as_text(value: Value) -> str:
    """A header's value where there is nothing but text: numbers in decimal, ``true``, ``false``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)


def why(error: BaseException) -> str:
    """An error on one line, for reasons and states."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    if type(error) is NotNow:
        return text
    if isinstance(error, TimeoutError) and not text:
        return "no answer in time"
    return f"{name}: {text}" if text else name
