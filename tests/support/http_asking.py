"""HTTP requests and their unchecked answers."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any, NamedTuple


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(url: str, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """Return the answer, whatever its status. Certificates are not verified."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        named["content-type"] = "application/json"
    request = urllib.request.Request(url + path, data, named, method=method)  # noqa: S310  # our own
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:  # noqa: S310  # our own
            return Answer(answer.status, dict(answer.headers), answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, dict(error.headers), error.read())
