"""Targets: groups whose tasks are sent to a URL (push), or to another broker (forward), instead of
to subscribers.

No answer, log or message contains secrets. The check of an address refuses credentials, so they
cannot reach an answer, log or message either.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final
from urllib.parse import parse_qsl, urlsplit

from tickwheel.api.frames import FrameType
from tickwheel.api.groups import OfGroup
from tickwheel.api.kinds import ID, NAME, Choice, FieldKind, Moment, Span, Text, Whole, array, wrong
from tickwheel.api.shapes import Answer, Request, place, when
from tickwheel.api.verb import Audit, Method, Need, Of, Right, Routing, Verb
from tickwheel.errors import BadRequest
from tickwheel.limits import Limits

URL_LENGTH_MAX: Final = 2048
SECRETS_MAX: Final = 8
"""Maximum number of secrets of a push. Requests are signed with each secret, so that receivers can
rotate them."""
SECRET_BYTES_MIN: Final = 24
SECRET_BYTES_MAX: Final = 64
PASSWORD_LENGTH_MAX: Final = 4096
BATCH: Final = 512
"""Default maximum number of tasks that a forwarder sends together."""
BATCH_MAX: Final = 4096
CONCURRENCY_MAX: Final = 1024
TOKEN_LENGTH_MAX: Final = 2048
LOG_MAX: Final = 200
"""Maximum number of a push's requests that the daemon remembers."""
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")
_HIDDEN: Final = frozenset(("password", "passwd", "secret", "token", "api_key", "access_key"))
HIDDEN_VALUE: Final = "…"
SYMMETRIC, PRIVATE = "whsec_", "whsk_"
"""Prefixes of secrets: of an HMAC-SHA256 key, and of an Ed25519 private key."""


def shown_url(url: str) -> str:
    """Return the URL without query values that may be secrets: for a push all values, for other
    targets values with names such as ``password``."""
    base, mark, query = url.partition("?")
    if not mark:
        return url
    hides_all = url.startswith(("http://", "https://"))
    pairs = parse_qsl(query, keep_blank_values=True)
    shown = ((n, HIDDEN_VALUE if hides_all or n.lower() in _HIDDEN else v) for n, v in pairs)
    return f"{base}?{'&'.join(map('='.join, shown))}"


def hosts_of(url: str) -> list[tuple[str, int | None]]:
    """Return the (host, port) pairs of a URL. Only the URL of a broker can have several. Raise
    ValueError if one is not valid."""
    scheme, netloc = urlsplit(url)[:2]
    authorities = [netloc] if scheme in ("http", "https") else netloc.split(",")
    return [(p.hostname or "", p.port) for p in (urlsplit(f"//{text}") for text in authorities)]


class Url(FieldKind):
    """The address of a target, without credentials. A broker's address can name a user."""

    word, python, json = "str", "str", str

    def __init__(self, *schemes: str) -> None:
        """``schemes`` are the allowed schemes; by default all are allowed."""
        self.schemes = schemes

    def check(self, value: Any, field: str, limits: Limits) -> str:
        text: str = _URL_TEXT.check(value, field, limits)
        expected = f"a URL ({', '.join(self.schemes) or 'scheme'}://host…)"
        if not text.isprintable() or " " in text or "#" in text:
            raise BadRequest(f"{field} must be {expected} without spaces or a fragment")
        try:
            parts = urlsplit(text)
            ports = [port for _, port in hosts_of(text)]
        except ValueError:
            raise BadRequest(f"{field} must be {expected}; its host or port is not valid") from None
        user, at, _ = parts.netloc.rpartition("@")
        if at and (self.schemes or ":" in user):
            secret = "credentials" if self.schemes else "a password"
            raise BadRequest(f"{field} must not contain {secret}; pass secrets in their own field")
        is_known = parts.scheme in self.schemes if self.schemes else _SCHEME.fullmatch(parts.scheme)
        if not is_known or not parts.netloc or 0 in ports:
            wrong(field, expected, shown_url(text))
        return text

    def of_python(self, value: Any, field: str) -> Any:
        if not isinstance(value, str):
            wrong(field, "a str", value)
        return value

    def logged(self, value: Any) -> Any:
        return shown_url(value)

    def schema(self) -> dict[str, Any]:
        return {"maxLength": URL_LENGTH_MAX}

    @property
    def bounds(self) -> str:
        return f"up to {URL_LENGTH_MAX} characters, without credentials"


_URL_TEXT: Final = Text(URL_LENGTH_MAX, "URL_LENGTH_MAX")


class Secrets(FieldKind):
    """Secrets that sign requests, as Standard Webhooks writes them."""

    word, python, json = "array of str", "Iterable[str]", list[str]
    is_logged = False
    none_removes = False

    def check(self, value: Any, field: str, limits: Limits) -> Sequence[str]:
        secrets = array(tuple(value) if type(value) is list else value, field, SECRETS_MAX)
        if not secrets:
            raise BadRequest(f"{field} has 0 elements; the minimum is 1")
        for index, secret in enumerate(secrets):
            check_secret(secret, f"{field}[{index}]")
        return secrets

    def of_python(self, value: Any, field: str) -> Any:
        if isinstance(value, (str, bytes)):
            raise BadRequest(f"{field} must be a list of strings, not one string")
        return tuple(value)

    @property
    def bounds(self) -> str:
        return f"1 to {SECRETS_MAX}, each `{SYMMETRIC}` or `{PRIVATE}` and base64"


def check_secret(text: object, field: str) -> None:
    """Raise BadRequest if the text is not a valid secret. The message does not contain the text."""
    prefix = next((p for p in (SYMMETRIC, PRIVATE) if str(text).startswith(p)), None)
    if type(text) is not str or prefix is None:
        raise BadRequest(f"{field} must begin with {SYMMETRIC} or {PRIVATE}")
    try:
        length = len(base64.b64decode(text.removeprefix(prefix), validate=True))
    except (binascii.Error, ValueError):
        raise BadRequest(f"{field} must have base64 after {prefix}") from None
    fits = length in (32, 64) if prefix == PRIVATE else length >= SECRET_BYTES_MIN
    if not fits or length > SECRET_BYTES_MAX:
        lengths = "32 or 64" if prefix == PRIVATE else f"{SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}"
        raise BadRequest(f"{field} must be {lengths} bytes in base64, not {length}")


class Password(Text):
    """A password, which is not logged."""

    is_logged = False

    def __init__(self) -> None:
        super().__init__(PASSWORD_LENGTH_MAX, "PASSWORD_LENGTH_MAX")

    def check(self, value: Any, field: str, limits: Limits) -> str:
        if type(value) is not str or any(0xD800 <= ord(char) <= 0xDFFF for char in value):
            raise BadRequest(f"{field} must be a string that UTF-8 can encode")
        return super().check(value, field, limits)


PUSH_URL: Final = Url("http", "https")
FORWARD_URL: Final = Url()
SECRETS: Final = Secrets()
FORMATS: Final = Choice("PushFormat", "plain", "cloudevents")

# --- requests ------------------------------------------------------------------------------------


class SetPush(OfGroup):
    """The request makes a URL the consumer of a group."""

    url: Annotated[str, PUSH_URL, "The URL to which each task is sent, by POST."]
    secrets: Annotated[
        Any,
        SECRETS,
        "The secrets that sign requests; use several while receivers switch to the first. By"
        " default an existing push keeps its secrets.",
    ] = None
    format: Annotated[
        str, FORMATS, '"plain" sends the task\'s body; "cloudevents" sends a CloudEvent in JSON.'
    ] = "plain"
    concurrency: Annotated[
        int, Whole(1, CONCURRENCY_MAX), "Maximum number of concurrent requests."
    ] = 32
    request_timeout_ms: Annotated[
        int | None,
        Span(100, 600_000),
        "Timeout of a whole request, including the answer; by default 30 s.",
    ] = None
    connect_timeout_ms: Annotated[
        int | None, Span(100, 60_000), "Timeout of a connection to the host; by default 5 s."
    ] = None
    callback_lease_ms: Annotated[
        int | None,
        Span(1_000, 43_200_000),
        "How long a task waits for its callback after a 202; by default a 202 acks the task.",
    ] = None


class SetForward(OfGroup):
    """The request makes another broker the consumer of a group."""

    url: Annotated[
        str,
        FORWARD_URL,
        "redis://HOST/DB?stream=NAME, amqp://…, kafka://… or the URL of an extension.",
    ]
    secret: Annotated[
        str | None, Password(), "The password for the broker; the user is part of the URL."
    ] = None
    batch: Annotated[int, Whole(1, BATCH_MAX), "Maximum number of tasks per batch."] = BATCH
    concurrency: Annotated[int, Whole(1, 64), "Maximum number of concurrent batches."] = 1


class OfTargets(Request):
    """The request asks for the targets of a topic, or of all topics."""

    topic: Annotated[str | None, NAME, "Only targets of this topic; by default all targets."] = None


class TestPush(Request):
    """The request sends one test request to a URL without storing anything."""

    __test__ = False  # not a pytest class
    url: Annotated[str, PUSH_URL, "The URL of the test request."]
    secrets: Annotated[
        Any, SECRETS, "The secrets that sign the request; without secrets it is not signed."
    ] = None
    format: Annotated[str, FORMATS, "The format of the body, as in a push."] = "plain"


class PushLogPage(OfGroup):
    """The request asks for the last requests of a push."""

    limit: Annotated[int, Whole(1, LOG_MAX), "Maximum number of items in the answer."] = 50


class Resend(OfGroup):
    """The request sends one of the last requests of a push again."""

    number: Annotated[int, Whole(1), "The number of the request in the log."] = place()


class SettleCallback(Request):
    """The request settles a task for which an endpoint has answered 202."""

    token: Annotated[
        str, Text(TOKEN_LENGTH_MAX), "The last segment of the URL in ``tickwheel-callback``."
    ]
    result: Annotated[
        str,
        Choice("str", "ack", "nack", "reject", "extend"),
        '"ack": finished; "nack": failed, retry; "reject": never retry; "extend": unfinished.',
    ] = "ack"
    delay_ms: Annotated[
        int | None,
        Span(0, 315_576_000_000),
        "For nack: the delay until the next attempt; by default the retry policy decides.",
    ] = None
    lease_ms: Annotated[
        int | None,
        Span(1_000, 43_200_000),
        "For extend: the new length of the lease; by default its original length.",
    ] = None
    reason: Annotated[str | None, Text(1_000), "For nack and reject: the reason."] = None


# --- answers -------------------------------------------------------------------------------------


class TargetInfo(Answer):
    """The target of a group and its state."""

    topic: Annotated[str, NAME, "The topic of the group."]
    group: Annotated[str, NAME, "The group whose tasks are sent."]
    kind: Annotated[str, Choice("TargetKind", "push", "forward"), '"push" or "forward".']
    url: Annotated[str, "The address, without secrets."]
    since_ms: Annotated[int, Moment(), "When the target was set."]
    by: Annotated[str, "Who set the target."]
    state: Annotated[
        str,
        Choice("TargetState", "sending", "failing", "open", "ended", "starting", "stopped"),
        '"sending"; "failing": the last attempt failed; "open": nothing is sent for a while,'
        ' because its host failed too often; "ended": the endpoint answered 410; "starting";'
        ' "stopped": the daemon has no process that sends.',
    ]
    created: Annotated[bool, "Whether this call created the target."] = False
    secrets: Annotated[int, "The number of secrets; the secrets are never shown."] = 0
    format: Annotated[str | None, "The format of a push; None for a forwarder."] = None
    batch: Annotated[
        int | None, "Maximum number of tasks per batch of a forwarder; None for a push."
    ] = None
    concurrency: Annotated[int, "Maximum number of concurrent requests or batches."] = 1
    request_timeout_ms: Annotated[
        int | None, "For a push: the timeout of a whole request, in milliseconds."
    ] = None
    connect_timeout_ms: Annotated[
        int | None, "For a push: the timeout of a connection, in milliseconds."
    ] = None
    callback_lease_ms: Annotated[
        int | None, "For a push: how long a task waits for its callback, in milliseconds."
    ] = None
    sent: Annotated[int, "Number of attempts since the sending process started."] = 0
    acked: Annotated[int, "Number of these attempts whose tasks were acked."] = 0
    failed: Annotated[int, "Number of these attempts that failed."] = 0
    in_flight: Annotated[int, "Number of unfinished attempts."] = 0
    last_ms: Annotated[int | None, Moment(), "When the last attempt ended."] = None
    last_status: Annotated[int | None, "The HTTP status of the last attempt."] = None
    last_error: Annotated[str | None, "The error of the last failed attempt."] = None
    ended_ms: Annotated[int | None, Moment(), "When the endpoint answered 410."] = None
    reason: Annotated[str | None, "The endpoint's answer that ended the push."] = None

    since = when("since_ms", "When it was set.")


class Targets(Answer):
    """All requested targets."""

    targets: Annotated[list[TargetInfo], "The targets."]


class PushSent(Answer):
    """One request of a push and its result."""

    number: Annotated[
        int, "The number with which the request can be resent; 0 if it is not stored."
    ]
    at_ms: Annotated[int, Moment(), "When the request began."]
    duration_ms: Annotated[float, "How long the request took, in milliseconds."]
    result: Annotated[
        str,
        Choice("PushResult", "acked", "retry", "rejected", "callback", "ended", "given_back"),
        '"acked", "retry", "rejected", "callback" (202, the task waits for its callback), "ended"'
        ' (410), "given_back" (nothing was sent).',
    ]
    status: Annotated[int | None, "The HTTP status; None without an answer."] = None
    error: Annotated[str | None, "Why the request failed."] = None
    body: Annotated[str | None, "The beginning of the answer's body."] = None
    address: Annotated[str | None, "The IP address of the endpoint."] = None
    id: Annotated[int | None, ID, "The id of the task."] = None
    attempt: Annotated[int | None, "The number of the delivery, counted from 1."] = None
    again: Annotated[bool, "Whether an operator resent the request."] = False

    at = when("at_ms", "When it began.")


class PushLog(Answer):
    """The last requests of a push, the newest first."""

    requests: Annotated[list[PushSent], "The requests."]


class CallbackSettled(Answer):
    """The effect of a callback on its task."""

    result: Annotated[
        str,
        '"acked", "retrying", "dead", "extended"; or the state that prevents settling: "stale",'
        ' "cancelled", "gone", …',
    ]


class TargetRemoved(Answer):
    """The removed target. Its group accepts subscribers again."""

    kind: Annotated[str, '"push" or "forward".']
    url: Annotated[str, "The address, without secrets."]


_GROUP = "/v1/topics/{topic}/groups/{group}"
_ADMIN, _READ = Need(Right.ADMIN, Of.NAMED), Need(Right.READ, Of.NAMED)
_TAG = "targets"
ANSWER_S: Final = 60.0
"""Number of seconds that an answer may take in addition to the usual time if it depends on another
host."""

VERBS: Final = (
    Verb(
        "set_push", SetPush, TargetInfo, _ADMIN, "Send the tasks of a group to a URL",
        "Send the tasks of a group to a URL, signed as in Standard Webhooks. Create the group if"
        " it does not exist, and replace an existing target. Raise BadRequest for an address that"
        " push_allow does not permit, and Conflict while the group has subscribers.",
        FrameType.PUSH_SET, path=f"PUT {_GROUP}/push", tag=_TAG, status=201,
        errors=("conflict",), audit=Audit.ALWAYS, changes=True, methods=(Method("set_push"),),
        command="push set TOPIC GROUP",
        routing=Routing.TURN,
    ),
    Verb(
        "set_forward", SetForward, TargetInfo, _ADMIN,
        "Send the tasks of a group to another broker",
        "Send the tasks of a group to another broker. Create the group if it does not exist, and"
        " replace an existing target. Raise the same errors as ``set_push``.",
        FrameType.FORWARD_SET, path=f"PUT {_GROUP}/forward", tag=_TAG, status=201,
        errors=("conflict",), audit=Audit.ALWAYS, changes=True, methods=(Method("set_forward"),),
        command="forward set TOPIC GROUP",
        routing=Routing.TURN,
    ),
    Verb(
        "remove_target", OfGroup, TargetRemoved, _ADMIN, "Remove the target of a group",
        "Remove the target of a group with its secrets. The group keeps its tasks and accepts"
        " subscribers again. Raise NotFound if there is no target.",
        FrameType.TARGET_REMOVE, path=f"DELETE {_GROUP}/target", tag=_TAG, errors=("not_found",),
        audit=Audit.ALWAYS, changes=True, repeat=False, methods=(Method("remove_target"),),
        command="push remove TOPIC GROUP",
        routing=Routing.TURN,
    ),
    Verb(
        "targets", OfTargets, Targets, Need(Right.READ, Of.FOUND), "List targets",
        "Return the targets of all groups, or of the groups of a topic, with their states.",
        FrameType.TARGET_LIST, path="GET /v1/targets", tag=_TAG,
        methods=(Method("targets", gives="targets"),),
        routing=Routing.ALL,
    ),
    Verb(
        "test_push", TestPush, PushSent, Need(Right.ADMIN, Of.ANY), "Test a URL",
        "Send one request to a URL as a push would, and return the result. Raise BadRequest for an"
        " address that push_allow does not permit, and Conflict if the daemon has no process that"
        " sends.",
        FrameType.PUSH_TEST, path="POST /v1/push-test", tag=_TAG, errors=("conflict",),
        audit=Audit.ALWAYS, repeat=False, prompt=False, extra_s=ANSWER_S,
        methods=(Method("test_push"),),
        command="push test URL",
        routing=Routing.ONE,
    ),
    Verb(
        "push_log", PushLogPage, PushLog, _READ, "The last requests of a push",
        "Return the last requests of a group's push, the newest first. The daemon keeps"
        f" {LOG_MAX} in memory. Raise NotFound if there is no push, and Conflict if the daemon has"
        " no process that sends.",
        FrameType.PUSH_LOG, path=f"GET {_GROUP}/push/log", tag=_TAG,
        errors=("not_found", "conflict"), methods=(Method("push_log", gives="requests"),),
        command="push log TOPIC GROUP",
        routing=Routing.ALL,
    ),
    Verb(
        "resend", Resend, PushSent, Need(Right.OPERATE, Of.NAMED), "Send a request again",
        "Send one of the last requests of a push again, without an effect on its task. Raise"
        " NotFound if the request is not in the log, and Conflict if the daemon has no process that"
        " sends.",
        FrameType.PUSH_RESEND, path=f"POST {_GROUP}/push/resend", tag=_TAG,
        errors=("not_found", "conflict"), audit=Audit.ALWAYS, repeat=False, prompt=False,
        extra_s=ANSWER_S, methods=(Method("resend"),),
        command="push resend TOPIC GROUP NUMBER",
        routing=Routing.ONE,
    ),
    Verb(
        "settle_callback", SettleCallback, CallbackSettled, None, "Settle a task after 202",
        path="POST /v1/callbacks/{token}", tag=_TAG, errors=("not_found",), changes=True,
        public=True,
    ),
)  # fmt: skip
