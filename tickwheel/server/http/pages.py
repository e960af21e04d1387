"""The OpenAPI 3.1 document, made of the table of routes and their types and nothing else, a page of
it, and the console: files that need no other host.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route as PageRoute

from tickwheel.api.kinds import NAME_PATTERN
from tickwheel.api.verbs import VERBS
from tickwheel.errors import BY_CODE
from tickwheel.server.http import enqueue, types
from tickwheel.server.http.call import JSON, JSON_TYPE, PROBLEM_TYPE, Route, as_json
from tickwheel.server.http.routes import ROUTES
from tickwheel.version import __version__

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


def pages(*, wait_ms_max: int) -> list[PageRoute]:
    """``/openapi.json`` and ``/docs/``, which are public: they say nothing of any task."""
    said, packed = as_sent(wait_ms_max)

    async def openapi(request: Request) -> Response:
        headers = {"content-type": JSON_TYPE.decode(), "vary": "accept-encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, headers=headers | {"content-encoding": "gzip"})
        return Response(said, headers=headers)

    start = Response(_START, media_type="text/javascript", headers=_HEADERS)
    return [
        PageRoute("/openapi.json", openapi),
        _always("/docs", RedirectResponse("/docs/")),
        _always("/docs/", HTMLResponse(_PAGE, headers=_HEADERS)),
        _always("/docs/start.js", start),
        *(PageRoute(f"/docs/{name}", _swagger_ui(*where)) for name, where in SWAGGER_UI.items()),
        *_console(),
    ]


@cache
def as_sent(wait_ms_max: int) -> tuple[bytes, bytes]:
    """The document as JSON, plain and packed. It is made before anybody asks: it holds the loop."""
    said = as_json(document(ROUTES, wait_ms_max=wait_ms_max))
    return said, gzip.compress(said)


def _always(path: str, response: Response) -> PageRoute:
    """The route of an answer that is always the same."""
    return PageRoute(path, response, methods=["GET"])


def _console() -> list[PageRoute]:
    """The console's files, which are public: they say nothing of any task."""
    found = [_always(path, RedirectResponse("/console/")) for path in ("/", "/console")]
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


# --- the document --------------------------------------------------------------------------------

ALWAYS = (
    "internal", "unauthorized", "forbidden", "bad_request", "not_found", "method_not_allowed",
    "request_timeout", "overloaded", "refused", "outcome_unknown", "too_many_connections",
)  # fmt: skip
"""Error codes that every request may get."""
WITH_BODY = ("body_too_large", "unsupported_media_type")
_EVENT = {
    "type": "object",
    "required": ["specversion", "id", "source", "type"],
    "properties": {
        "specversion": {"const": "1.0", "type": "string"},
        **{name: {"type": "string", "minLength": 1} for name in ("id", "source", "type")},
        "data": {},
        "data_base64": {"type": "string", "contentEncoding": "base64"},
    },
}
_RAW = {
    enqueue.STRUCTURED: _EVENT,
    "application/octet-stream": {"type": "string", "format": "binary"},
}
"""The schemas of bodies that are not JSON of ours; others are texts."""
_REF = "#/components/schemas/{name}"


def document(routes: Sequence[Route], *, wait_ms_max: int = 60_000) -> dict[str, Any]:
    """The whole document as plain values; ``wait_ms_max`` is the daemon's limit for a pull."""
    kinds = _kinds(routes)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(map(repr, kinds), schemas, strict=True))
    components["PullIn"]["properties"]["wait_ms"]["maximum"] = wait_ms_max
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(
            route, schema_of, components
        )
    for kind in {route.query for route in routes}:
        components.pop(kind.__name__, None)  # it is said by the parameters
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tickwheel",
            "version": __version__,
            "description": "Tasks that are delivered when they are due, at least once."
            " Errors are application/problem+json; their codes are the table of"
            " docs/protocol.md. Times are milliseconds since 1970, ids are text.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}],
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _kinds(routes: Sequence[Route]) -> list[Any]:
    """Every type that the routes name."""
    found: dict[str, Any] = {repr(types.Problem): types.Problem}
    for route in routes:
        for kind in (route.query, *_parts(route.body), *_parts(route.answer)):
            other = found.setdefault(repr(kind), kind)
            assert other == kind, f"two types have one name in the document: {kind!r}"
    return list(found.values())


def _parts(kind: Any) -> tuple[Any, ...]:
    """The types of a union: msgspec need not tell them apart."""
    if kind is None:
        return ()
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _operation(
    route: Route, schema_of: dict[str, Any], components: dict[str, Any]
) -> dict[str, Any]:
    rights = {VERBS[name].need for name in route.operations}
    needs = sorted({need.right for need in rights if need is not None})
    found: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "description": f"Right: {', '.join(needs)}." if needs else "It needs no right.",
        "tags": [route.tag],
        "parameters": [
            *_path_parameters(route),
            *_query_parameters(route, components),
            *_header_parameters(route),
        ],
        "responses": _responses(route, schema_of),
    }
    if route.public:
        found["security"] = []
    if route.body is not None or route.raw:
        found["requestBody"] = _request_body(route, schema_of)
    return found


_IN_PATHS: dict[str, dict[str, Any]] = {
    "id": {"pattern": "^[0-9]{1,19}$"},
    "key": {"maxLength": 255},
}


def _path_parameters(route: Route) -> Iterable[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", route.path):
        schema = {"type": "string", "minLength": 1}
        schema |= _IN_PATHS.get(name, {"pattern": NAME_PATTERN})
        yield {"name": name, "in": "path", "required": True, "schema": schema}


def _query_parameters(route: Route, components: dict[str, Any]) -> Iterable[dict[str, Any]]:
    component = components[route.query.__name__]
    for name, schema in component["properties"].items():
        yield {
            "name": name,
            "in": "query",
            "required": name in component.get("required", ()),
            "schema": _without_null(schema),
        }


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without null: in a query an absent value is left out."""
    options = schema.get("anyOf")
    if options is None:
        return schema
    rest = [option for option in options if option != {"type": "null"}]
    assert len(rest) == 1, schema
    return dict(rest[0])


def _header_parameters(route: Route) -> Iterable[dict[str, Any]]:
    for name, text in route.headers:
        yield {
            "name": name,
            "in": "header",
            "required": False,
            "description": text,
            "schema": {"type": "string"},
        }


def _request_body(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.body is not None:
        content[JSON] = {"schema": _any_of(route.body, schema_of)}
    for kind in route.raw:
        content[kind] = {"schema": _RAW.get(kind, {"type": "string"})}
    return {"required": route.body is not None, "content": content}


def _responses(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if route.answer is not None:
        content = {JSON: {"schema": _any_of(route.answer, schema_of)}}
        found[str(route.status)] = {"description": "Done.", "content": content}
        if route.method == "PUT":
            found["200"] = {"description": "It was there.", "content": content}
    if route.streams:
        found["200"] = {
            "description": "A stream.",
            "content": {kind: {"schema": {"type": "string"}} for kind in route.streams},
        }
    problem = {PROBLEM_TYPE.decode(): {"schema": {"$ref": _REF.format(name="Problem")}}}
    has_body = route.body is not None or route.raw
    codes: dict[str, list[str]] = {}
    for code in (*ALWAYS, *(WITH_BODY if has_body else ()), *route.codes):
        codes.setdefault(str(BY_CODE[code].http_status), []).append(code)
    for status, names in sorted(codes.items()):
        found[status] = {"description": ", ".join(dict.fromkeys(names)), "content": problem}
    return found


def _any_of(kind: Any, schema_of: dict[str, Any]) -> dict[str, Any]:
    schemas = [schema_of[repr(part)] for part in _parts(kind)]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
