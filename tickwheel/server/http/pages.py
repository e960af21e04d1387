"""Serves the OpenAPI 3.1 document, the page that shows it, and the console. The document is derived
only from the routes and their types. No page loads files from other hosts.
"""

from __future__ import annotations

import gzip
import json
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
from tickwheel.server.http.deliveries import SSE
from tickwheel.server.http.enqueue import NDJSON
from tickwheel.server.http.routes import HTML, ROUTES
from tickwheel.version import __version__

SWAGGER_UI = {
    "swagger-ui.css": ("swagger_style.css", "text/css"),
    "swagger-ui.js": ("swagger_bundle.js", "text/javascript"),
}
"""Our file name → (file name in the package of Swagger UI, content type)."""
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
"""Content security policy of Swagger UI, which sets inline styles and has no inline code."""
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
"""Content security policy of the console. Inline code and text of tasks are not executed."""
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
    """Return the routes of ``/openapi.json``, ``/docs/`` and the console, which are public because
    they contain no data."""
    text, packed = document_bytes(wait_ms_max)

    async def openapi(request: Request) -> Response:
        headers = {"content-type": JSON_TYPE.decode(), "vary": "accept-encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, headers=headers | {"content-encoding": "gzip"})
        return Response(text, headers=headers)

    start = Response(_START, media_type="text/javascript", headers=_HEADERS)
    return [
        PageRoute("/openapi.json", openapi),
        _constant_route("/docs", RedirectResponse("/docs/")),
        _constant_route("/docs/", HTMLResponse(_PAGE, headers=_HEADERS)),
        _constant_route("/docs/start.js", start),
        *(PageRoute(f"/docs/{name}", _swagger_ui(*where)) for name, where in SWAGGER_UI.items()),
        *_console(),
    ]


@cache
def document_bytes(wait_ms_max: int) -> tuple[bytes, bytes]:
    """Return the document as JSON, plain and compressed. The result is cached at the start, because
    creating the document blocks the event loop."""
    text = as_json(document(ROUTES, wait_ms_max=wait_ms_max))
    return text, gzip.compress(text)


def _constant_route(path: str, response: Response) -> PageRoute:
    """Return the route of a constant answer."""
    return PageRoute(path, response, methods=["GET"])


def _console() -> list[PageRoute]:
    """Return the routes of the console's files, which are public because they contain no data."""
    routes = [_constant_route(path, RedirectResponse("/console/")) for path in ("/", "/console")]
    for path in sorted(_CONSOLE.iterdir()):
        name = "" if path.name == "index.html" else path.name
        routes.append(
            PageRoute(f"/console/{name}", _cached_file_handler(path, _KINDS[path.suffix]))
        )
    return routes


def _cached_file_handler(path: Path, kind: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of a file that stays in memory after its first request. Reading a page's
    dozen files from disk on every load would take two calls to a thread for each file."""

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
    """Return the folder of Swagger UI's files without importing its package, which would read nine
    megabytes."""
    spec = find_spec("offapi")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


# --- the document --------------------------------------------------------------------------------

ALWAYS = (
    "internal", "unauthorized", "forbidden", "bad_request", "not_found", "method_not_allowed",
    "request_timeout", "overloaded", "refused", "outcome_unknown", "too_many_connections",
)  # fmt: skip
"""Error codes that every request can get."""
WITH_BODY = ("body_too_large", "unsupported_media_type")
_EVENT = {
    "title": "CloudEvent",
    "description": "A CloudEvent in JSON (CloudEvents 1.0, JSON event format). It can have further"
    " attributes.",
    "type": "object",
    "required": ["specversion", "id", "source", "type"],
    "properties": {
        "specversion": {
            "description": 'The version of the specification: "1.0".',
            "type": "string",
            "enum": ["1.0"],
        },
        **{
            name: {"description": text, "type": "string", "minLength": 1}
            for name, text in (
                ("id", "The id of the event, unique for its source."),
                ("source", "The source of the event, a URI reference."),
                ("type", "The type of the event."),
            )
        },
        "data": {"description": "The data of the event: any JSON."},
        "data_base64": {
            "description": "The data of the event in base64, if it is not JSON.",
            "type": "string",
            "contentEncoding": "base64",
        },
    },
}
_RAW: dict[str, dict[str, Any]] = {
    enqueue.STRUCTURED: {"$ref": types.REF.format(name="CloudEvent")},
    "application/octet-stream": {
        "description": "The body of the task.",
        "type": "string",
        "format": "binary",
    },
    "text/plain": {"description": "The body of the task.", "type": "string"},
    NDJSON: {
        "description": "Lines of JSON, each a NewTask. The answer has one line for each of them.",
        "type": "string",
    },
}
"""Schemas of request bodies that are not the API's JSON."""
_STREAMED = {
    SSE: "Server-sent events, whose data is JSON.",
    NDJSON: "Lines of JSON.",
    HTML: "A page.",
}
"""Description of a stream by its content type."""
_REF = types.REF
_NULL = {"type": "null"}
_OUTERMOST = ("description", "default", types.NULL_REMOVES_SETTING)
"""Properties that belong to a whole field, not to a member of its union."""
_TAGS = {
    "tasks": "Enqueue tasks, look them up, cancel and reschedule them.",
    "keys": "Tasks by their producer's key.",
    "deliveries": "Receive and settle deliveries.",
    "topics": "Topics, their groups, and the settings of both.",
    "dead letters": "Tasks that failed permanently in a group.",
    "order and shares": "Order keys that are held, and keys that operators paused.",
    "schedules": "Recurring schedules.",
    "transactions": "Tasks that are created when their transaction is committed.",
    "bulk": "Change all matching tasks or dead letters of a topic.",
    "targets": "Groups whose tasks the daemon sends to another system.",
    "nodes": "Nodes and the shards that each of them leads.",
    "daemon": "The daemon: status, counts, limits, backups and restores.",
    "console": "Requests of the web console, which any client can send.",
}
"""Tags of the document, in its order."""


def document(routes: Sequence[Route], *, wait_ms_max: int = 60_000) -> dict[str, Any]:
    """Return the whole document as plain values; ``wait_ms_max`` is the daemon's limit for a
    pull."""
    kinds = _kinds(routes)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(map(repr, kinds), schemas, strict=True))
    components["PullIn"]["properties"]["wait_ms"]["maximum"] = wait_ms_max
    in_requests = _referenced(
        [schema_of[repr(kind)] for route in routes for kind in (route.query, *_parts(route.body))],
        components,
    )
    for name, component in components.items():
        _tidy(component, in_request=name in in_requests)
    queries = {kind: components[kind.__name__] for kind in {route.query for route in routes}}
    components |= types.NAMED | {"CloudEvent": _EVENT}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, schema_of, queries[route.query])
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    used = _referenced([paths], components)  # queries are described by their parameters
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tickwheel",
            "version": __version__,
            "description": "Tasks that are delivered when they are due, at least once."
            " Errors are application/problem+json; their codes are listed in"
            " docs/protocol.md. Times are milliseconds since 1970, ids are text.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "The daemon that sent this document."}],
        "security": [{}, {"token": []}],
        "tags": [{"name": tag, "description": text} for tag, text in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in components.items() if name in used},
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token of the daemon's tokens file, required if the daemon has"
                    " such a file.",
                }
            },
        },
    }


def _referenced(schemas: Iterable[Any], components: dict[str, Any]) -> set[str]:
    """Return the names of the components to which schemas refer, directly or indirectly."""
    names: set[str] = set()
    pending = list(schemas)
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
            reference = value.get("$ref", "")
            name = reference.removeprefix(_REF.format(name=""))
            if reference and name not in names:
                names.add(name)
                pending.append(components.get(name, {}))
    return names


def _tidy(component: dict[str, Any], *, in_request: bool) -> None:
    """Adapt a component's fields to client generators. An optional field of a request does not
    allow null, unless null removes a setting."""
    if "description" in component:
        component["description"] = types.as_document_text(component["description"])
    required = component.get("required", ())
    for name, schema in component.get("properties", {}).items():
        tidied = _field(schema, may_be_null=not in_request or name in required)
        default = tidied.pop("default", None)
        text = tidied.get("description", "")
        if in_request and default is not None and "default" not in text:
            # Client generators would treat a field with ``default`` as always present.
            tidied["description"] = f"{text} Default: {json.dumps(default)}."
        component["properties"][name] = tidied


def _field(schema: dict[str, Any], *, may_be_null: bool) -> dict[str, Any]:
    """Return the schema of a field with the ``_OUTERMOST`` properties at the top level and all its
    types in one union."""
    outer: dict[str, Any] = {}
    options: list[dict[str, Any]] = []
    pending = [schema]
    while pending:
        option = dict(pending.pop(0))
        inner = option.pop("anyOf", None)
        outer = {k: option.pop(k) for k in _OUTERMOST if k in option} | outer
        if "$ref" in option:  # a named union
            options.append({"$ref": option["$ref"]})
        elif inner is not None:
            pending = [*({**option, **part} for part in inner), *pending]
        elif option not in options:
            options.append(option)
    for option in options:
        for part in ("items", "additionalProperties"):
            if isinstance(option.get(part), dict):
                option[part] = _field(option[part], may_be_null=True)
    is_null = _NULL in options and (outer.pop(types.NULL_REMOVES_SETTING, False) or may_be_null)
    outer.pop(types.NULL_REMOVES_SETTING, None)
    options = [option for option in options if option != _NULL]
    if len(options) > 1:
        return outer | {"anyOf": [*options, *([_NULL] if is_null else ())]}
    [member] = options or [{}]
    if is_null and "$ref" in member:
        return outer | {"anyOf": [member, _NULL]}
    if is_null and "type" in member:
        member = member | {"type": [member["type"], "null"]}
        if "enum" in member:
            member = member | {"enum": [*member["enum"], None]}
    return outer | member


def _kinds(routes: Sequence[Route]) -> list[Any]:
    """Return all types that the routes use."""
    by_name: dict[str, Any] = {repr(types.Problem): types.Problem}
    for route in routes:
        for kind in (route.query, *_parts(route.body), *_parts(route.answer)):
            other = by_name.setdefault(repr(kind), kind)
            assert other == kind, f"two types have one name in the document: {kind!r}"
    return list(by_name.values())


def _parts(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, which msgspec may be unable to decode itself."""
    if kind is None:
        return ()
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _operation(route: Route, schema_of: dict[str, Any], query: dict[str, Any]) -> dict[str, Any]:
    rights = {VERBS[name].need for name in route.operations}
    needs = sorted({need.right for need in rights if need is not None})
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "description": f"Right: {', '.join(needs)}." if needs else "No right is required.",
        "tags": [route.tag],
        "parameters": [
            *_path_parameters(route),
            *_query_parameters(query),
            *_header_parameters(route),
        ],
        "responses": _responses(route, schema_of),
    }
    if route.public:
        operation["security"] = []
    if route.body is not None or route.raw:
        operation["requestBody"] = _request_body(route, schema_of)
    return operation


_IN_PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "id": ("The id.", {"pattern": "^[0-9]{1,19}$"}),
    "key": ("The key of the tasks.", {"maxLength": 255}),
    "topic": ("The topic.", {}),
    "group": ("The group.", {}),
    "name": ("The name of the schedule.", {}),
    "transaction": ("The name of the transaction.", {}),
    "bulk": ("The id of the bulk operation.", {}),
    "node": ("The name of the node.", {}),
    "token": ("The last segment of the callback URL of a delivery.", {}),
}
"""Path parameter → (description, schema properties that replace the pattern of a name)."""


def _path_parameters(route: Route) -> Iterable[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", route.path):
        text, bounds = _IN_PATHS[name]
        schema = {"type": "string", "minLength": 1} | (bounds or {"pattern": NAME_PATTERN})
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "description": text,
            "schema": schema,
        }


def _query_parameters(query: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for name, schema in query["properties"].items():
        parameter = {"name": name, "in": "query", "required": name in query.get("required", ())}
        plain = dict(schema)
        text = plain.pop("description", "")
        yield parameter | {"description": text, "schema": plain}


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
        content[JSON] = {"schema": _one_of(route.body, schema_of)}
    for kind in route.raw:
        content[kind] = {"schema": _RAW[kind]}
    return {"required": route.body is not None, "content": content}


def _responses(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    if route.answer is not None:
        content = {JSON: {"schema": _one_of(route.answer, schema_of)}}
        text = "Created." if route.status == 201 else "Done."
        responses[str(route.status)] = {"description": text, "content": content}
        if route.method == "PUT":
            responses["200"] = {"description": "It already existed.", "content": content}
    if route.streams:
        content = {
            kind: {"schema": {"description": _STREAMED[kind], "type": "string"}}
            for kind in route.streams
        }
        responses["200"] = {
            "description": "The answer as a stream.",
            "content": content,
        }
    has_body = route.body is not None or route.raw
    codes: dict[str, list[str]] = {}
    for code in (*ALWAYS, *(WITH_BODY if has_body else ()), *route.codes):
        codes.setdefault(str(BY_CODE[code].http_status), []).append(code)
    for status, names in sorted(codes.items()):
        responses[status] = _error(status, tuple(dict.fromkeys(names)))
    return responses


_ERROR_HEADERS = {
    "401": ("WWW-Authenticate", "The authentication scheme: Bearer.", "string"),
    "405": ("Allow", "The methods of the path.", "string"),
    "429": ("Retry-After", "Seconds after which to retry.", "integer"),
    "503": ("Retry-After", "Seconds after which to retry.", "integer"),
}
"""Status of an error → (name, description, type) of its header."""


def _error(status: str, codes: tuple[str, ...]) -> dict[str, Any]:
    """Return the documentation of an error status, with the meaning of each code."""
    lines = (f"`{code}`: {(BY_CODE[code].__doc__ or '').partition(chr(10))[0]}" for code in codes)
    response: dict[str, Any] = {"description": "\n\n".join(lines)}
    if status in _ERROR_HEADERS:
        name, text, kind = _ERROR_HEADERS[status]
        response["headers"] = {name: {"description": text, "schema": {"type": kind}}}
    problem = {"schema": {"$ref": _REF.format(name="Problem")}}
    return response | {"content": {PROBLEM_TYPE.decode(): problem}}


def _one_of(kind: Any, schema_of: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type or union. ``oneOf`` suffices for a union, because each of its
    types has a required field that the others lack."""
    schemas = [schema_of[repr(part)] for part in _parts(kind)]
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
