"""Errors as ``application/problem+json``: one row of the error table, one status.

The table is ``errors.py``'s; here is only how an error looks over HTTP, and when to come again.
"""

from __future__ import annotations

from math import ceil

from tickwheel.errors import (
    BY_CODE,
    Overloaded,
    SendTimeout,
    StoreFull,
    TickwheelError,
    Unauthorized,
    Unreachable,
)
from tickwheel.errors import ConnectionLost as _ConnectionLost
from tickwheel.server.http import types
from tickwheel.server.http.encode import as_json

PROBLEM_TYPE = b"application/problem+json"
RETRY_AFTER_S = 1
RETRY_AFTER_FULL_S = 5
"""Seconds after which to come again when a disk is full: its room returns more slowly."""
_OF_CLIENTS = (Unreachable, _ConnectionLost, SendTimeout)

Headers = list[tuple[bytes, bytes]]


def status_of(code: str) -> int:
    """The HTTP status of an error's code."""
    return BY_CODE[code].http_status


def problem(
    error: TickwheelError, *, active: str | None = None, active_http: str | None = None
) -> tuple[int, Headers, bytes]:
    """(status, headers, body) of an error. ``active``, ``active_http``: the address and HTTP URL of
    the daemon that leads."""
    status = error.http_status
    said = types.Problem(
        type=f"urn:tickwheel:error:{error.code}",
        title=(type(error).__doc__ or error.code).strip().partition("\n")[0],
        status=status,
        detail=error.message,
        code=error.code,
        retryable=error.retryable,
        active=active,
        active_http=active_http,
    )
    headers: Headers = [(b"content-type", PROBLEM_TYPE)]
    if error.retryable and not isinstance(error, _OF_CLIENTS):
        full = isinstance(error, StoreFull)
        after_s = RETRY_AFTER_FULL_S if full else RETRY_AFTER_S
        if isinstance(error, Overloaded):
            after_s = max(1, ceil(error.after_s))
        headers.append((b"retry-after", b"%d" % after_s))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b'Bearer realm="tickwheel"'))
    return status, headers, as_json(said)


def line(error: TickwheelError, number: int | None = None) -> dict[str, object]:
    """An error within a stream of lines. ``number``: that of its line, from 1 on, empty ones
    counted."""
    said: dict[str, object] = {} if number is None else {"line": number}
    return said | {"code": error.code, "detail": error.message, "retryable": error.retryable}


assert Overloaded.http_status == 429
