"""Targets: groups whose tasks are sent to a URL (push), or to another broker (forward), instead of
to subscribers.

Secrets are only ever taken: no answer, no log and no message has them. An address with credentials
is refused where it is checked, so none of these ever sees one either.
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
from tickwheel.api.verb import Audit, Method, Need, Of, Over, Right, Verb
from tickwheel.errors import BadRequest
from tickwheel.limits import Limits

URL_LENGTH_MAX: Final = 2048
SECRETS_MAX: Final = 8
"""Secrets of one push: requests are signed with each, so that receivers can change to the next."""
SECRET_BYTES_MIN: Final = 24
SECRET_BYTES_MAX: Final = 64
PASSWORD_LENGTH_MAX: Final = 4096
BATCH: Final = 512
BATCH_MAX: Final = 4096
"""Tasks that a forwarder sends together at most: by default, and at all."""
CONCURRENCY_MAX: Final = 1024
TOKEN_LENGTH_MAX: Final = 2048
LOG_MAX: Final = 200
"""Requests of one push that are remembered."""
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")
_HIDDEN: Final = frozenset(("password", "passwd", "secret", "token", "api_key", "access_key"))
SYMMETRIC, PRIVATE = "whsec_", "whsk_"
"""What the text of a secret begins with: a key of HMAC-SHA256, or a private key of Ed25519."""


def shown_url(url: str) -> str:
    """The URL as people may see it: of a push without the values of its query, which may be
    secrets, of another target without those that are named like one."""
    base, mark, query = url.partition("?")
    if not mark:
        return url
    hides_all = url.startswith(("http://", "https://"))
    pairs = parse_qsl(query, keep_blank_values=True)
    said = (f"{n}={'…' if hides_all or n.lower() in _HIDDEN else v}" for n, v in pairs)
    return f"{base}?{'&'.join(said)}"


class Url(FieldKind):
    """The address of a target, without credentials; that of a broker may name a user."""

    word, python, json = "str", "str", str

    def __init__(self, *schemes: str) -> None:
        """``schemes``: which there may be; none: whichever."""
        self.schemes = schemes

    def check(self, value: Any, field: str, limits: Limits) -> str:
        text: str = _URL_TEXT.check(value, field, limits)
        expected = f"a URL ({', '.join(self.schemes) or 'scheme'}://host…)"
        if not text.isprintable() or " " in text or "#" in text:
            raise BadRequest(f"{field} must be {expected} without spaces and without a fragment")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            raise BadRequest(f"{field} must be {expected}; its host or port cannot be read") from (
                None
            )
        user, at, _ = parts.netloc.rpartition("@")
        if at and (self.schemes or ":" in user):
            what = "credentials" if self.schemes else "a password"
            raise BadRequest(f"{field} must not have {what} before its host; that comes by itself")
        is_known = parts.scheme in self.schemes if self.schemes else _SCHEME.fullmatch(parts.scheme)
        if not is_known or not parts.netloc or port == 0:
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
    none_takes_away = False

    def check(self, value: Any, field: str, limits: Limits) -> Sequence[str]:
        many = array(tuple(value) if type(value) is list else value, field, SECRETS_MAX)
        if not many:
            raise BadRequest(f"{field} has 0 elements; name at least one")
        for index, one in enumerate(many):
            check_secret(one, f"{field}[{index}]")
        return many

    def of_python(self, value: Any, field: str) -> Any:
        if isinstance(value, (str, bytes)):
            raise BadRequest(f"{field} must be several texts, not one")
        return tuple(value)

    @property
    def bounds(self) -> str:
        return f"1 to {SECRETS_MAX}, each `{SYMMETRIC}` or `{PRIVATE}` and base64"


def check_secret(text: object, field: str) -> None:
    """Raises BadRequest, which does not say the secret, if the text is none."""
    prefix = next((p for p in (SYMMETRIC, PRIVATE) if str(text).startswith(p)), None)
    if type(text) is not str or prefix is None:
        raise BadRequest(f"{field} must begin with {SYMMETRIC} or {PRIVATE}")
    try:
        length = len(base64.b64decode(text.removeprefix(prefix), validate=True))
    except (binascii.Error, ValueError):
        raise BadRequest(f"{field} must have base64 behind {prefix}") from None
    fits = length in (32, 64) if prefix == PRIVATE else length >= SECRET_BYTES_MIN
    if not fits or length > SECRET_BYTES_MAX:
        many = "32 or 64" if prefix == PRIVATE else f"{SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}"
        raise BadRequest(f"{field} must be {many} bytes in base64, not {length}")


class Password(Text):
    """What opens the other side; no log has it."""

    is_logged = False

    def __init__(self) -> None:
        super().__init__(PASSWORD_LENGTH_MAX, "PASSWORD_LENGTH_MAX")

    def check(self, value: Any, field: str, limits: Limits) -> str:
        if type(value) is not str or any(0xD800 <= ord(one) <= 0xDFFF for one in value):
            raise BadRequest(f"{field} must be a text that UTF-8 can say")
        return super().check(value, field, limits)


PUSH_URL: Final = Url("http", "https")
FORWARD_URL: Final = Url()
SECRETS: Final = Secrets()
FORMATS: Final = Choice("PushFormat", "plain", "cloudevents")

# --- requests ------------------------------------------------------------------------------------


class SetPush(OfGroup):
    """The request makes a URL the consumer of a group."""

    url: Annotated[str, PUSH_URL, "Where each task is sent to, by POST."]
    secrets: Annotated[
        Any,
        SECRETS,
        "What requests are signed with; several, while receivers change to the first of them."
        " Left out: those of the push that is there.",
    ] = None
    format: Annotated[
        str, FORMATS, '"plain": the body is the task\'s; "cloudevents": a CloudEvent in JSON.'
    ] = "plain"
    concurrency: Annotated[int, Whole(1, CONCURRENCY_MAX), "The most requests at a time."] = 32
    request_timeout_ms: Annotated[
        int | None,
        Span(100, 600_000),
        "The most time for a whole request with its answer; by default 30 s.",
    ] = None
    connect_timeout_ms: Annotated[
        int | None, Span(100, 60_000), "The most time for a connection to the host; by default 5 s."
    ] = None
    callback_lease_ms: Annotated[
        int | None,
        Span(1_000, 43_200_000),
        "How long a task waits for its callback after a 202; without this, a 202 acks.",
    ] = None


class SetForward(OfGroup):
    """The request makes another broker the consumer of a group."""

    url: Annotated[
        str,
        FORWARD_URL,
        "redis://HOST/DB?stream=NAME, amqp://…, kafka://… or what an extension takes.",
    ]
    secret: Annotated[
        str | None, Password(), "The password for the broker; the user stands in the URL."
    ] = None
    batch: Annotated[int, Whole(1, BATCH_MAX), "The most tasks that are sent together."] = BATCH
    concurrency: Annotated[int, Whole(1, 64), "The most batches at a time."] = 1


class OfTargets(Request):
    """The request asks for targets: those of a topic, or all."""

    topic: Annotated[
        str | None, NAME, "Only those of this topic; by default those of all topics."
    ] = None


class TestPush(Request):
    """The request asks for one signed request to a URL, of which nothing is kept."""

    __test__ = False  # no test of pytest's
    url: Annotated[str, PUSH_URL, "The URL that the request goes to."]
    secrets: Annotated[
        Any, SECRETS, "The secrets that the request is signed with; without them it is not signed."
    ] = None
    format: Annotated[str, FORMATS, "The format of the body, as in a push."] = "plain"


class PushLogPage(OfGroup):
    """The request asks for the last requests of a push."""

    limit: Annotated[int, Whole(1, LOG_MAX), "The most items of the answer."] = 50


class Resend(OfGroup):
    """The request sends one of the last requests of a push once more."""

    number: Annotated[int, Whole(1), "The number of the request in the log."] = place()


class SettleCallback(Request):
    """The request settles the task that an endpoint has answered 202 for."""

    token: Annotated[
        str, Text(TOKEN_LENGTH_MAX), "What the path of the header ``tickwheel-callback`` ends with."
    ]
    result: Annotated[
        str,
        Choice("str", "ack", "nack", "reject", "extend"),
        '"ack": done; "nack": failed, try again; "reject": never again; "extend": not yet.',
    ] = "ack"
    delay_ms: Annotated[
        int | None,
        Span(0, 315_576_000_000),
        "For nack: the delay until the next attempt; by default the policy's.",
    ] = None
    lease_ms: Annotated[
        int | None,
        Span(1_000, 43_200_000),
        "For extend: how much longer the lease lasts; by default as long as at first.",
    ] = None
    reason: Annotated[str | None, Text(1_000), "For nack and reject: the reason."] = None


# --- answers -------------------------------------------------------------------------------------


class TargetInfo(Answer):
    """Where the tasks of a group are sent, and how that goes."""

    topic: Annotated[str, NAME, "The topic of the group."]
    group: Annotated[str, NAME, "The group whose tasks are sent."]
    kind: Annotated[str, Choice("TargetKind", "push", "forward"), '"push" or "forward".']
    url: Annotated[str, "The address, without what may be secret in it."]
    since_ms: Annotated[int, Moment(), "When it was set."]
    by: Annotated[str, "Who set it."]
    state: Annotated[
        str,
        Choice("TargetState", "sending", "failing", "open", "ended", "starting", "stopped"),
        '"sending"; "failing": the last attempt failed; "open": its host failed so often that'
        ' nothing is sent for a while; "ended": the endpoint wants nothing any more; "starting";'
        ' "stopped": no process of this daemon sends.',
    ]
    created: Annotated[bool, "Whether this very call made the target."] = False
    secrets: Annotated[int, "How many secrets there are; nobody is told which."] = 0
    format: Annotated[str | None, "The format of a push; None: it is a forwarder."] = None
    batch: Annotated[
        int | None, "The most tasks that a forwarder sends together; None: it is a push."
    ] = None
    concurrency: Annotated[int, "Requests, or batches, at a time."] = 1
    request_timeout_ms: Annotated[
        int | None, "For a push: the most time for a whole request, in milliseconds."
    ] = None
    connect_timeout_ms: Annotated[
        int | None, "For a push: the most time for a connection, in milliseconds."
    ] = None
    callback_lease_ms: Annotated[
        int | None, "For a push: how long a callback may take, in milliseconds."
    ] = None
    sent: Annotated[int, "Attempts since the process began."] = 0
    acked: Annotated[int, "How many of these attempts were acked."] = 0
    failed: Annotated[int, "How many of these attempts failed."] = 0
    in_flight: Annotated[int, "Attempts that are under way."] = 0
    waiting: Annotated[int, "How many tasks wait for a callback."] = 0
    last_ms: Annotated[int | None, Moment(), "When the last attempt ended."] = None
    last_status: Annotated[int | None, "The HTTP status of the last attempt."] = None
    last_error: Annotated[str | None, "Why the last attempt that failed did so."] = None
    ended_ms: Annotated[int | None, Moment(), "When the endpoint said that it wants no more."] = (
        None
    )
    reason: Annotated[str | None, "How the endpoint said that."] = None

    since = when("since_ms", "When it was set.")


class Targets(Answer):
    """The targets of groups."""

    targets: Annotated[list[TargetInfo], "The targets."]


class PushSent(Answer):
    """One request of a push, and what came of it."""

    number: Annotated[int, "The number by which it can be sent again; 0: it is not kept."]
    at_ms: Annotated[int, Moment(), "When it began."]
    duration_ms: Annotated[float, "How long it took, in milliseconds."]
    result: Annotated[
        str,
        Choice("PushResult", "acked", "retry", "rejected", "callback", "ended", "given_back"),
        '"acked", "retry", "rejected", "callback" (202: it waits for one), "ended" (410),'
        ' "given_back" (nothing was sent).',
    ]
    status: Annotated[int | None, "The HTTP status; None: there was no answer."] = None
    error: Annotated[str | None, "Why it failed."] = None
    body: Annotated[str | None, "The beginning of the answer's body."] = None
    address: Annotated[str | None, "The IP address that was asked."] = None
    id: Annotated[int | None, ID, "The task."] = None
    attempt: Annotated[int | None, "Which delivery of the task it was."] = None
    again: Annotated[bool, "Whether an operator has sent it again."] = False

    at = when("at_ms", "When it began.")


class PushLog(Answer):
    """The last requests of a push, the newest first."""

    requests: Annotated[list[PushSent], "The requests."]


class CallbackSettled(Answer):
    """What became of the task of a callback."""

    result: Annotated[
        str,
        '"acked", "retrying", "dead", "extended"; or what else became of it before: "stale",'
        ' "cancelled", "gone", …',
    ]


class TargetRemoved(Answer):
    """A target was taken away; its group takes subscribers again."""

    kind: Annotated[str, '"push" or "forward".']
    url: Annotated[str, "The address, without what may be secret in it."]


_GROUP = "/v1/topics/{topic}/groups/{group}"
_ADMIN, _READ = Need(Right.ADMIN, Of.NAMED), Need(Right.READ, Of.NAMED)
_TAG = "targets"
ANSWER_S: Final = 60.0
"""How much longer than other answers that of a request to elsewhere may take, in seconds."""

VERBS: Final = (
    Verb(
        "set_push", SetPush, TargetInfo, _ADMIN, "Send the tasks of a group to a URL",
        "Send the tasks of a group to a URL, signed as Standard Webhooks says. A group that is not"
        " there is made; a target that is there is replaced. Raises BadRequest for an address that"
        " may not be asked (push_allow), Conflict while somebody is subscribed.",
        FrameType.PUSH_SET, path=f"PUT {_GROUP}/push", tag=_TAG, status=201,
        errors=("conflict",), audit=Audit.ALWAYS, changes=True, methods=(Method("set_push"),),
        command="push set TOPIC GROUP",
        over=Over.TURN,
    ),
    Verb(
        "set_forward", SetForward, TargetInfo, _ADMIN,
        "Send the tasks of a group to another broker",
        "Send the tasks of a group to another broker. A group that is not there is made; a target"
        " that is there is replaced. Raises as ``set_push``.",
        FrameType.FORWARD_SET, path=f"PUT {_GROUP}/forward", tag=_TAG, status=201,
        errors=("conflict",), audit=Audit.ALWAYS, changes=True, methods=(Method("set_forward"),),
        command="forward set TOPIC GROUP",
        over=Over.TURN,
    ),
    Verb(
        "remove_target", OfGroup, TargetRemoved, _ADMIN, "Take the target of a group away",
        "Send the tasks of a group nowhere any more, and forget the secrets. The group keeps what"
        " it holds, and takes subscribers again. Raises NotFound.",
        FrameType.TARGET_REMOVE, path=f"DELETE {_GROUP}/target", tag=_TAG, errors=("not_found",),
        audit=Audit.ALWAYS, changes=True, methods=(Method("remove_target"),),
        command="push remove TOPIC GROUP",
        over=Over.TURN,
    ),
    Verb(
        "targets", OfTargets, Targets, Need(Right.READ, Of.FOUND), "Where groups are sent to",
        "The targets of all groups, or of those of a topic, and how they go.",
        FrameType.TARGET_LIST, path="GET /v1/targets", tag=_TAG,
        methods=(Method("targets", gives="targets"),),
        over=Over.ALL,
    ),
    Verb(
        "test_push", TestPush, PushSent, Need(Right.ADMIN, Of.ANY), "Try a URL",
        "Send one request to a URL as a push would, and say what came of it. Raises BadRequest for"
        " an address that may not be asked, Conflict where no process sends.",
        FrameType.PUSH_TEST, path="POST /v1/push-test", tag=_TAG, errors=("conflict",),
        audit=Audit.ALWAYS, repeat=False, prompt=False, extra_s=ANSWER_S,
        methods=(Method("test_push"),),
        command="push test URL",
        over=Over.ONE,
    ),
    Verb(
        "push_log", PushLogPage, PushLog, _READ, "The last requests of a push",
        "The last requests of a group's push, the newest first; the daemon keeps"
        f" {LOG_MAX} in memory. Raises NotFound, Conflict where no process sends.",
        FrameType.PUSH_LOG, path=f"GET {_GROUP}/push/log", tag=_TAG,
        errors=("not_found", "conflict"), methods=(Method("push_log", gives="requests"),),
        command="push log TOPIC GROUP",
        over=Over.ALL,
    ),
    Verb(
        "resend", Resend, PushSent, Need(Right.OPERATE, Of.NAMED), "Send a request once more",
        "Send one of the last requests of a push once more; nothing becomes of its task. Raises"
        " NotFound, Conflict.",
        FrameType.PUSH_RESEND, path=f"POST {_GROUP}/push/resend", tag=_TAG,
        errors=("not_found", "conflict"), audit=Audit.ALWAYS, repeat=False, prompt=False,
        extra_s=ANSWER_S, methods=(Method("resend"),),
        command="push resend TOPIC GROUP NUMBER",
        over=Over.ONE,
    ),
    Verb(
        "settle_callback", SettleCallback, CallbackSettled, None, "Settle a task after 202",
        path="POST /v1/callbacks/{token}", tag=_TAG, errors=("not_found",), changes=True,
        public=True,
    ),
)  # fmt: skip
