"""TLS of the client: whom it trusts, what it shows, and what went wrong in one line.

The context is made once a client. Trust is the system's, or a file's; the daemon's certificate has
to name the host that the client asked for. That cannot be switched off: a certificate of one's own
making is trusted by naming its file as ``ca``.
"""

from __future__ import annotations

import os
import ssl
from typing import NamedTuple

from tickwheel.errors import BadRequest, TickwheelError, TlsFailed, Unauthorized, Unreachable


class Trust(NamedTuple):
    """Files in PEM; None: the environment's file, else none."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """The TLS context of the files. Raises BadRequest, which names the file."""
        ca = self.ca or os.environ.get("TICKWHEEL_CA")
        cert = self.cert or os.environ.get("TICKWHEEL_CLIENT_CERT")
        key = self.key or os.environ.get("TICKWHEEL_CLIENT_KEY")
        for name, path in (("ca", ca), ("client_cert", cert), ("client_key", key)):
            _check(name, path)
        if key is not None and cert is None:
            raise BadRequest("client_key needs client_cert")
        try:
            context = ssl.create_default_context(cafile=ca)
        except ssl.SSLError as error:
            raise BadRequest(f"ca {ca}: {_reason(error)}") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if cert is not None:
            try:
                context.load_cert_chain(cert, key, password=lambda: "")
            except ssl.SSLError as error:
                files = cert if key is None else f"{cert} with client_key {key}"
                raise BadRequest(f"client_cert {files}: {_reason(error)}") from None
        return context


def _check(name: str, path: str | None) -> None:
    if path is None:
        return
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise BadRequest(f"{name} {path}: {error.strerror}") from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or error.strerror or str(error)).replace("_", " ").lower()


_PLAIN = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
"""TLS errors that mean the peer speaks plain text."""


def explain(problem: OSError | UnicodeError) -> TickwheelError:
    """The error for a connection that failed."""
    if isinstance(problem, ssl.SSLCertVerificationError):
        why = (problem.verify_message or str(problem)).rstrip(".")
        return TlsFailed(f"its certificate is not trusted: {why}")
    if isinstance(problem, ssl.SSLError):
        reason = problem.reason or ""
        if reason in _PLAIN:
            return TlsFailed("it does not speak TLS there; tcp:// is without")
        if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
            return Unauthorized(f"it does not take our certificate: {_reason(problem)}")
        return TlsFailed(_reason(problem))
    return Unreachable(str(problem))
