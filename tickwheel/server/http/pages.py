"""The document of the API, a page of it, and the console: files that need no other host."""

from __future__ import annotations

import gzip
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route as PageRoute

from tickwheel.server.http.call import JSON_TYPE, Route, as_json
from tickwheel.server.http.openapi import document

if TYPE_CHECKING:
    pass

SWAGGER_UI = {
    "swagger-ui.css": ("swagger_style.css", "text/css"),
    "swagger-ui.js": ("swagger_bundle.js", "text/javascript"),
}
"""Our name of a file of Swagger UI: the name in the package that it comes with, and its type."""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tickwheel: HTTP API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<noscript>The document itself: <a href="/openapi.json">openapi.json</a></noscript>
<script src="swagger-ui.js"></script>
<script src="start.js"></script>
</body>
</html>
"""
_START = """"use strict";
window.onload = () => {
  window.ui = SwaggerUIBundle({
    url: "/openapi.json",
    dom_id: "#swagger-ui",
    deepLinking: true,
    validatorUrl: null,
  });
};
"""
POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; img-src 'self' data:;"
    " style-src 'self' 'unsafe-inline'; font-src 'self' data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
"""The policy of Swagger UI: it sets styles of elements, and all else is in its files."""
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
CONSOLE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self';"
    " img-src 'self' data:; frame-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The policy of the console: no inline code, and no text of tasks that could become code."""
_CONSOLE_HEADERS = _HEADERS | {
    "content-security-policy": CONSOLE_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_CONSOLE = Path(__file__).parent / "console"
_KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def pages(routes: Sequence[Route], *, wait_ms_max: int) -> list[PageRoute]:
    """``/openapi.json`` and ``/docs/``, which are public: they say nothing of any task."""
    said = as_json(document(routes, wait_ms_max=wait_ms_max))
    packed = gzip.compress(said)

    async def openapi(request: Request) -> Response:
        headers = {"content-type": JSON_TYPE.decode(), "vary": "accept-encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, headers=headers | {"content-encoding": "gzip"})
        return Response(said, headers=headers)

    async def to_page(request: Request) -> Response:
        return RedirectResponse("/docs/")

    async def page(request: Request) -> Response:
        return HTMLResponse(_PAGE, headers=_HEADERS)

    async def start(request: Request) -> Response:
        return Response(_START, media_type="text/javascript", headers=_HEADERS)

    return [
        PageRoute("/openapi.json", openapi),
        PageRoute("/docs", to_page),
        PageRoute("/docs/", page),
        PageRoute("/docs/start.js", start),
        *(PageRoute(f"/docs/{name}", _swagger_ui(*where)) for name, where in SWAGGER_UI.items()),
        *_console(),
    ]


def _console() -> list[PageRoute]:
    """The console's files, which are public: they say nothing of any task."""

    async def to_console(request: Request) -> Response:
        return RedirectResponse("/console/")

    found = [PageRoute("/", to_console), PageRoute("/console", to_console)]
    for path in sorted(_CONSOLE.iterdir()):
        name = "" if path.name == "index.html" else path.name
        found.append(PageRoute(f"/console/{name}", _kept(path, _KINDS[path.suffix])))
    return found


def _kept(path: Path, kind: str) -> Callable[[Request], Awaitable[Response]]:
    """A file that is kept in memory from the first request on: a page is a dozen of them, and
    reading each from the disk would need a thread twice."""

    @cache
    def read() -> tuple[bytes, bytes, str]:
        data = path.read_bytes()
        return data, gzip.compress(data), f'W/"{sha256(data).hexdigest()[:16]}"'

    async def serve(request: Request) -> Response:
        data, packed, tag = read()
        headers = _CONSOLE_HEADERS | {"etag": tag, "vary": "accept-encoding"}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, media_type=kind, headers=headers | {"content-encoding": "gzip"})
        return Response(data, media_type=kind, headers=headers)

    return serve


def _swagger_ui(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return FileResponse(_folder() / name, media_type=kind, headers=_HEADERS)

    return serve


def _folder() -> Path:
    """The folder of Swagger UI's files. Importing the package would read nine megabytes."""
    spec = find_spec("offapi")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
