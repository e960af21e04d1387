"""The error table: one root, one row a code, shared by TCP, HTTP, the CLI and the client.

A message names the field, the limit and the value that broke it. ``retryable`` means: the
same request may succeed later without a change; nothing of it was kept. Codes never change
their meaning; new ones may be added. ``docs/protocol.md`` lists them (a test compares).
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

SHOWN_LENGTH_MAX = 60


class _Shown(reprlib.Repr):
    """Bounds width and depth: what is shown may have come from anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = 12
        self.maxother = self.maxlong = SHOWN_LENGTH_MAX + 1

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: SHOWN_LENGTH_MAX + 1])

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[: SHOWN_LENGTH_MAX + 1])


_shown = _Shown()


def shown(value: object) -> str:
    """A value as an error message shows it: short, and never an error itself. (``repr`` of what
    is nested a thousand deep is a RecursionError.)"""
    text = _shown.repr(value)
    return text if len(text) <= SHOWN_LENGTH_MAX else text[: SHOWN_LENGTH_MAX - 3] + "..."


def text_of(value: object) -> str:
    """The text of a value that a user's code made, as it can be sent: lone surrogates are escaped,
    and a ``__str__`` that raises is named instead."""
    try:
        text = str(value)
    except Exception as problem:
        text = f"(no text: its __str__ raised {type(problem).__name__})"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class TickwheelError(Exception):
    """Root of every error this package raises on purpose. Anything else is a bug."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    closes_connection: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    remark: ClassVar[str] = ""
    """What the protocol's document says beside the docstring."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.__doc__ or self.code)

    @property
    def message(self) -> str:
        return str(self.args[0])


class InternalError(TickwheelError):
    """The daemon failed in a way it should not; its log says more."""

    retryable = True


# --- the stream or the conversation is unusable: answer and close ---------------------------


class ProtocolError(TickwheelError):
    """The byte stream is not a sequence of msgpack frames, or breaks the conversation's rules."""

    code = "protocol_error"
    closes_connection = True
    http_status = 400


class FrameTooLarge(ProtocolError):
    """A frame is larger than the connection's limit."""

    code = "frame_too_large"
    remark = "The limit is `frame_bytes_max`."
    http_status = 413


class HelloRequired(ProtocolError):
    """The first frame of a connection must be HELLO."""

    code = "hello_required"


class VersionUnsupported(ProtocolError):
    """The protocol version asked for is not spoken here."""

    code = "version_unsupported"
    remark = "The message names what is."


class TlsRequired(ProtocolError):
    """The port speaks TLS, and the client does not."""

    code = "tls_required"
    remark = "The answer to plain bytes is also plain."


class Unauthorized(TickwheelError):
    """The token is missing or wrong."""

    code = "unauthorized"
    remark = "Or it was revoked, or has expired: to one in use GOODBYE says so."
    closes_connection = True
    http_status = 401


class Forbidden(TickwheelError):
    """The caller has no right to this; or, over HTTP, a page of another site asks."""

    code = "forbidden"
    remark = "See [security.md](security.md#rights)."
    http_status = 403


class TooManyConnections(TickwheelError):
    """The daemon has as many connections as it may."""

    code = "too_many_connections"
    remark = "The limit is `connections_max`."
    retryable = True
    closes_connection = True
    http_status = 503


class SlowReader(TickwheelError):
    """The peer does not read what it is sent, and the buffer for it is full."""

    code = "slow_reader"
    remark = "In the daemon's log only: see *Slow readers*."
    retryable = True
    closes_connection = True
    http_status = 503


class PeerSilent(TickwheelError):
    """The peer answers heartbeats, and nothing came from it for too long."""

    code = "peer_silent"
    remark = "In the daemon's log only: see *Ends*."
    retryable = True
    closes_connection = True
    http_status = 503


# --- the request is wrong: answer, go on -----------------------------------------------------


class BadRequest(TickwheelError):
    """A field is missing, of the wrong type, or out of range."""

    code = "bad_request"
    http_status = 400


class UnknownType(BadRequest):
    """The frame's type is not known to this version."""

    code = "unknown_type"


class BodyTooLarge(BadRequest):
    """A task's body is larger than the limit."""

    code = "body_too_large"
    remark = "The limit is `body_bytes_max`."
    http_status = 413


class DueTooFar(BadRequest):
    """A due time lies beyond the longest delay that is accepted."""

    code = "due_too_far"
    remark = "It is `delay_ms_max` from now."


class LimitExceeded(BadRequest):
    """A count or a length is over its limit."""

    code = "limit_exceeded"
    remark = "The message names it."


class MethodNotAllowed(BadRequest):
    """HTTP: the path is known, and not with this method."""

    code = "method_not_allowed"
    http_status = 405


class RequestTimeout(BadRequest):
    """HTTP: the request did not come to its end in time."""

    code = "request_timeout"
    retryable = True
    http_status = 408


class UnsupportedMediaType(BadRequest):
    """HTTP: the body's content type or encoding is not accepted here."""

    code = "unsupported_media_type"
    http_status = 415


class IdempotencyKeyReused(BadRequest):
    """HTTP: the Idempotency-Key was used before with another payload."""

    code = "idempotency_key_reused"
    http_status = 422


class RequestForgotten(BadRequest):
    """The request number lies below the session's floor: its answer was given and dropped."""

    code = "request_forgotten"
    http_status = 409


class NotFound(TickwheelError):
    """There is nothing of this name or id."""

    code = "not_found"
    http_status = 404


class StaleReceipt(TickwheelError):
    """The receipt is not of the delivery that is current."""

    code = "stale_receipt"
    remark = "On TCP it is the word `stale`."
    http_status = 409


class Conflict(TickwheelError):
    """The state does not allow this, for example a second subscription of one number."""

    code = "conflict"
    http_status = 409


class UnknownTransaction(NotFound):
    """There is no transaction of this name, or it was decided so long ago that it is forgotten."""

    code = "unknown_transaction"


class TransactionCommitted(Conflict):
    """The transaction was committed: its tasks are there, and it takes no more."""

    code = "transaction_committed"


class TransactionRolledBack(Conflict):
    """The transaction was rolled back: its tasks are gone, and it takes no more."""

    code = "transaction_rolled_back"


class TaskGone(TickwheelError):
    """The task finished so long ago that how it ended is no longer known."""

    code = "gone"
    remark = "On TCP it is a word."
    http_status = 410


# --- the daemon cannot do it now: answer, try again later ------------------------------------


class Refused(TickwheelError):
    """The store did not take it; nothing of the request was kept."""

    code = "refused"
    retryable = True
    http_status = 503


class StoreFull(Refused):
    """The store has no room; enqueues are refused until there is."""

    code = "store_full"
    http_status = 507


class RowMissing(TickwheelError):
    """The store does not have a task that has not ended; the daemon goes on looking for it."""

    code = "row_missing"
    remark = (
        "A fault: see [operations.md](operations.md#rows-that-are-missing); nothing of "
        "the request was done to it."
    )
    retryable = True
    http_status = 503


class Overloaded(Refused):
    """A queue inside the daemon, or what one caller may take of it, is at its limit."""

    after_s: float = 1.0
    """When it is worth trying again."""
    code = "overloaded"
    http_status = 429


class WindowFull(Overloaded):
    """The session has as many unanswered requests as it may."""

    code = "window_full"
    remark = "The limit is `window_max`, from its floor up."


class BacklogFull(Overloaded):
    """The topic or the daemon holds as many tasks as it may."""

    code = "backlog_full"


class TooManySessions(Overloaded):
    """The daemon remembers as many producer sessions as it may."""

    code = "too_many_sessions"
    remark = "The answer to HELLO, which closes."


class Draining(Refused):
    """The daemon is shutting down."""

    code = "draining"
    remark = "Nothing was kept."


class NotActive(Refused):
    """This daemon stands by; another one is active. Ask that one."""

    code = "not_active"
    remark = "Nothing was kept by it; the message names the active one if it is known."


class OutcomeUnknown(TickwheelError):
    """The store did not say in time whether it took the request; resend it to find out."""

    code = "outcome_unknown"
    retryable = True
    http_status = 504


# --- raised by the client, never sent --------------------------------------------------------


class Unreachable(TickwheelError):
    """No address of the daemon answered within the time allowed."""

    code = "unreachable"
    remark = "Nothing was sent."
    retryable = True
    http_status = 503


class TlsFailed(TickwheelError):
    """The daemon's certificate is not to be trusted, or its port does not speak TLS."""

    code = "tls_failed"
    http_status = 502


class ConnectionLost(TickwheelError):
    """The connection broke before the answer came."""

    code = "connection_lost"
    retryable = True
    http_status = 502


class SendTimeout(TickwheelError):
    """No answer within the send timeout and its retries; the outcome is not known."""

    code = "send_timeout"
    retryable = True
    http_status = 504


class ClientClosed(TickwheelError):
    """The client was closed while the call was under way, or before it."""

    code = "client_closed"


class Undecodable(TickwheelError):
    """This client cannot unpack a body: it lacks the key, the extra, or the step."""

    code = "undecodable"
    remark = "A worker gives the task back, and stops: another one may have it."


class BadBody(Undecodable):
    """A body is not what its encoding says, was changed, or is too large when it is unpacked."""

    code = "bad_body"
    remark = "A worker rejects the task."


def _walk(root: type[TickwheelError]) -> dict[str, type[TickwheelError]]:
    table = {root.code: root}
    for child in root.__subclasses__():
        table.update(_walk(child))
    return table


BY_CODE: dict[str, type[TickwheelError]] = _walk(TickwheelError) | {"internal": InternalError}


def from_wire(code: str, message: str) -> TickwheelError:
    """The exception for a code that a peer sent; an unknown code keeps its text."""
    kind = BY_CODE.get(code)
    if kind is None:
        return InternalError(f"{code}: {message}")
    return kind(message)


# --- what is not installed -----------------------------------------------------------------------


def lacks_extra(what: str, extra: str, missing: str | None) -> BadRequest:
    """The error for something that needs an extra whose module ``missing`` is not installed."""
    install = f"pip install 'tickwheel[{extra}]'"
    return BadRequest(f"{what} needs the extra {extra}: {install} (missing: {missing})")


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Around the import of what an extra brings: its lack is a BadRequest that names both."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise lacks_extra(what, extra, error.name) from None


@contextmanager
def module_needs_extra(module: str, extra: str) -> Iterator[None]:
    """Around what a module of ours imports of an extra: the lack of that is a ModuleNotFoundError
    of one line, which says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            lacks_extra(module, extra, error.name).message, name=error.name
        ) from None
