"""The OpenAPI 3.1 document: made of the table of routes and their types, and nothing else."""

from __future__ import annotations

import re
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from tickwheel.api.verbs import VERBS
from tickwheel.errors import BY_CODE
from tickwheel.server.http import cloudevents, types
from tickwheel.server.http.encode import JSON
from tickwheel.server.http.problems import PROBLEM_TYPE
from tickwheel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tickwheel.server.http.routes import Route

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
    cloudevents.STRUCTURED: _EVENT,
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
            found[repr(kind)] = kind
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


def _path_parameters(route: Route) -> Iterable[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", route.path):
        schema: dict[str, Any] = {"type": "string", "minLength": 1}
        if name == "id":
            schema["pattern"] = "^[0-9]{1,19}$"
        elif name == "key":
            schema["maxLength"] = 255
        else:
            schema["pattern"] = types.NAME_PATTERN
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
        found[status] = {
            "description": ", ".join(dict.fromkeys(names)),
            "content": problem,
        }
    return found


def _any_of(kind: Any, schema_of: dict[str, Any]) -> dict[str, Any]:
    schemas = [schema_of[repr(part)] for part in _parts(kind)]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
