"""The error table, shared by TCP, HTTP, the CLI and the client: one class for each code.

A message names the field, the limit and the offending value. After a ``retryable`` error the same
request can succeed later. After an error that is not ``uncertain``, nothing from the request is
stored. Codes never change their meaning; new codes can be added. ``docs/protocol.md`` lists them; a
test compares the two.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

SHOWN_LENGTH_MAX = 60


class _Shown(reprlib.Repr):
    """Limits width and depth, because the values come from untrusted clients."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = 12
        self.maxother = self.maxlong = SHOWN_LENGTH_MAX + 1

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: SHOWN_LENGTH_MAX + 1])

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[: SHOWN_LENGTH_MAX + 1])

    def repr_int(self, x: int, level: int) -> str:
        # ``repr`` raises for a number of more than 4,300 digits.
        bits = x.bit_length()
        return super().repr_int(x, level) if bits < 10_000 else f"an integer of {bits} bits"


_shown = _Shown()


def shown(value: object) -> str:
    """Return a short representation of a value for an error message. Never raise, unlike ``repr``,
    which raises RecursionError for deeply nested values."""
    text = _shown.repr(value)
    return text if len(text) <= SHOWN_LENGTH_MAX else text[: SHOWN_LENGTH_MAX - 3] + "..."


def text_of(value: object) -> str:
    """Return the ``str`` of a user's value in a form that can be sent: lone surrogates are escaped,
    and an error in ``__str__`` is reported in the text."""
    try:
        text = str(value)
    except Exception as problem:
        text = f"(no text: its __str__ raised {type(problem).__name__})"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class TickwheelError(Exception):
    """Root of every error that this package raises deliberately. Any other exception is a bug."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    uncertain: ClassVar[bool] = False
    """Whether the request may have been executed."""
    closes_connection: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    remark: ClassVar[str] = ""
    """Remark on the code in docs/protocol.md; docs/errors.md has the docstring."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.__doc__ or self.code)

    @property
    def message(self) -> str:
        return str(self.args[0])


class InternalError(TickwheelError):
    """The daemon failed unexpectedly; its log has the details."""

    retryable = uncertain = True


# --- the connection cannot continue: answer and close ---------------------------------------


class ProtocolError(TickwheelError):
    """The byte stream is not a sequence of msgpack frames, or violates the protocol."""

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
    """The daemon does not support the requested protocol version."""

    code = "version_unsupported"
    remark = "The message lists the supported versions."


class TlsRequired(ProtocolError):
    """The port requires TLS, and the client sent plain bytes."""

    code = "tls_required"
    remark = "The answer is plain as well."


class Unauthorized(TickwheelError):
    """The token is missing or wrong."""

    code = "unauthorized"
    remark = "A token that is revoked or expires while in use gets this code in GOODBYE."
    closes_connection = True
    http_status = 401


class Forbidden(TickwheelError):
    """The caller lacks the right; or, over HTTP, a page of another site sent the request."""

    code = "forbidden"
    remark = "See [security.md](security.md#rights)."
    http_status = 403


class TooManyConnections(TickwheelError):
    """The daemon has reached its limit of connections."""

    code = "too_many_connections"
    remark = "The limit is `connections_max`."
    retryable = True
    closes_connection = True
    http_status = 503


class SlowReader(TickwheelError):
    """The peer does not read, and its output buffer is full."""

    code = "slow_reader"
    remark = "Only in the daemon's log: see *Slow readers*."
    retryable = True
    closes_connection = True
    http_status = 503


class PeerSilent(TickwheelError):
    """A peer that promised to answer heartbeats has sent nothing for too long."""

    code = "peer_silent"
    remark = "Only in the daemon's log: see *Ending a connection*."
    retryable = True
    closes_connection = True
    http_status = 503


# --- the request is wrong: answer and keep the connection ------------------------------------


class BadRequest(TickwheelError):
    """A field is missing, of the wrong type, or out of range."""

    code = "bad_request"
    http_status = 400


class UnknownType(BadRequest):
    """This version does not know the frame's type."""

    code = "unknown_type"


class BodyTooLarge(BadRequest):
    """A task's body is larger than the limit."""

    code = "body_too_large"
    remark = "The limit is `body_bytes_max`."
    http_status = 413


class DueTooFar(BadRequest):
    """The due time is further away than the maximum delay."""

    code = "due_too_far"
    remark = "The limit is `delay_ms_max` from now."


class LimitExceeded(BadRequest):
    """A count or a length is over its limit."""

    code = "limit_exceeded"
    remark = "The message names the limit."


class MethodNotAllowed(BadRequest):
    """HTTP: the path exists, but not with this method."""

    code = "method_not_allowed"
    http_status = 405


class RequestTimeout(BadRequest):
    """HTTP: the request did not arrive completely in time."""

    code = "request_timeout"
    retryable = True
    http_status = 408


class UnsupportedMediaType(BadRequest):
    """HTTP: this path does not accept the body's content type or encoding."""

    code = "unsupported_media_type"
    http_status = 415


class IdempotencyKeyReused(BadRequest):
    """HTTP: the Idempotency-Key was used before with another payload."""

    code = "idempotency_key_reused"
    http_status = 422


class RequestForgotten(BadRequest):
    """The request number is below the session's floor: its answer was sent and forgotten."""

    code = "request_forgotten"
    http_status = 409


class NotFound(TickwheelError):
    """Nothing with this name or id exists."""

    code = "not_found"
    http_status = 404


class StaleReceipt(TickwheelError):
    """The receipt does not belong to the current delivery."""

    code = "stale_receipt"
    remark = "TCP answers with the outcome `stale` instead."
    http_status = 409


class Conflict(TickwheelError):
    """The current state does not allow this, such as a second subscription with the same number."""

    code = "conflict"
    http_status = 409


class UnknownTransaction(NotFound):
    """No transaction has this name, or its decision is so old that it is forgotten."""

    code = "unknown_transaction"


class TransactionCommitted(Conflict):
    """The transaction was committed: its tasks exist, and it accepts no more."""

    code = "transaction_committed"


class TransactionRolledBack(Conflict):
    """The transaction was rolled back: its tasks were dropped, and it accepts no more."""

    code = "transaction_rolled_back"


class TaskGone(TickwheelError):
    """The task finished so long ago that its outcome is forgotten."""

    code = "gone"
    remark = "TCP answers with the outcome `gone` instead."
    http_status = 410


# --- the daemon cannot do this now: answer, and the client retries later ---------------------


class Refused(TickwheelError):
    """The store refused the request and kept no part of it."""

    code = "refused"
    retryable = True
    http_status = 503


class StoreFull(Refused):
    """The store is full; enqueues are refused until space is freed."""

    code = "store_full"
    http_status = 507


class RowMissing(TickwheelError):
    """The store has no row for an unfinished task; the daemon keeps looking for it."""

    code = "row_missing"
    remark = (
        "A fault: see [operations.md](operations.md#rows-that-are-missing). The request did not "
        "change the task."
    )
    retryable = True
    http_status = 503


class Overloaded(Refused):
    """A queue inside the daemon, or the caller's share of it, has reached its limit."""

    after_s: float = 1.0
    """Seconds after which a retry is worthwhile."""
    code = "overloaded"
    http_status = 429


class WindowFull(Overloaded):
    """The session has reached its limit of unanswered requests."""

    code = "window_full"
    remark = "The limit is `window_max`, counted from the session's floor."


class BacklogFull(Overloaded):
    """The topic or the daemon has reached its limit of tasks."""

    code = "backlog_full"


class TooManySessions(Overloaded):
    """The daemon has reached its limit of producer sessions."""

    code = "too_many_sessions"
    remark = "Sent in answer to HELLO, before the connection closes."


class Draining(Refused):
    """The daemon is shutting down."""

    code = "draining"
    remark = "Nothing was kept."


class NotActive(Refused):
    """This daemon is a standby; ask the active daemon."""

    code = "not_active"
    remark = "Nothing was kept; the message names the active daemon if it is known."


class OutcomeUnknown(TickwheelError):
    """The store did not confirm the request in time; resend it to learn the outcome."""

    code = "outcome_unknown"
    retryable = uncertain = True
    http_status = 504


# --- raised by the client, never sent --------------------------------------------------------


class Unreachable(TickwheelError):
    """No address of the daemon answered in time."""

    code = "unreachable"
    remark = "Nothing was sent."
    retryable = True
    http_status = 503


class TlsFailed(TickwheelError):
    """The daemon's certificate is not trusted, or its port does not speak TLS."""

    code = "tls_failed"
    http_status = 502


class ConnectionLost(TickwheelError):
    """The connection broke before the answer arrived."""

    code = "connection_lost"
    retryable = uncertain = True
    http_status = 502


class SendTimeout(TickwheelError):
    """No answer arrived within the send timeout and its retries; the outcome is unknown."""

    code = "send_timeout"
    retryable = uncertain = True
    http_status = 504


class ClientClosed(TickwheelError):
    """The client was closed before or during the call."""

    code = "client_closed"
    uncertain = True


class Undecodable(TickwheelError):
    """This client cannot decode a body: it lacks the key, the extra or the encoding step."""

    code = "undecodable"
    remark = "A worker releases the task and stops."


class BadBody(Undecodable):
    """A body does not match its encoding, was altered, or is too large once decoded."""

    code = "bad_body"
    remark = "A worker rejects the task."


def _walk(root: type[TickwheelError]) -> dict[str, type[TickwheelError]]:
    table = {root.code: root}
    for child in root.__subclasses__():
        table.update(_walk(child))
    return table


BY_CODE: dict[str, type[TickwheelError]] = _walk(TickwheelError) | {"internal": InternalError}


def from_wire(code: str, message: str) -> TickwheelError:
    """Return the exception for a code from a peer. An unknown code becomes part of the message."""
    kind = BY_CODE.get(code)
    if kind is None:
        return InternalError(f"{code}: {message}")
    error = kind(message)
    after = _AFTER.search(message)
    if after is not None and isinstance(error, Overloaded):
        error.after_s = float(after[1])
    return error


_AFTER = re.compile(r"; try again in (\d{1,9}\.\d{3}) s$", re.ASCII)
"""Matches the end of the message of a used-up quota."""


# --- extras that are not installed ---------------------------------------------------------------


def lacks_extra(what: str, extra: str, missing: str | None) -> BadRequest:
    """Return the error for a feature whose extra, or its module ``missing``, is not installed."""
    install = f"pip install 'tickwheel[{extra}]'"
    return BadRequest(f"{what} needs the extra {extra}: {install} (missing: {missing})")


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Convert a failed import to a BadRequest that names the feature ``what`` and its extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise lacks_extra(what, extra, error.name) from None


@contextmanager
def module_needs_extra(module: str, extra: str) -> Iterator[None]:
    """Convert a failed import in one of our modules to a ModuleNotFoundError with a single line
    that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            lacks_extra(module, extra, error.name).message, name=error.name
        ) from None
