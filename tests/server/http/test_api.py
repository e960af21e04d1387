"""Whatever the request is about: paths, tokens, origins, limits, roles, the document."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.contextvars import get_contextvars

from server.http.rig import HttpRig
from support.shard_rig import started
from support.traces import TRACE
from support.vectors import vectors
from tickwheel import errors
from tickwheel.api.groups import Settings
from tickwheel.api.verbs import VERBS
from tickwheel.limits import Limits
from tickwheel.server.http.call import problem
from tickwheel.server.http.pages import document, document_bytes
from tickwheel.server.http.routes import ROUTES
from tickwheel.server.shard.operations import StandbyOperations

ON_TCP_ONLY = {
    "enqueue_plain", "enqueue_columns", "enqueue_unanswered", "ping", "set_prefetch",
    "unsubscribe", "leave", "answer_checks", "claim_schedule", "claim_transaction",
}  # fmt: skip
"""What TCP needs for its speed or its conversation; over HTTP each has another form."""


locked = started(lambda: HttpRig(serve_token="secret"))


# --- what every request goes through -------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/", 404),
        ("GET", "/v1/tasks/5/nothing", 404),
        ("GET", "/v1/topics//keys/k", 404),
        ("GET", "/v1/topics/%FF", 400),
        ("PUT", "/v1/tasks", 405),
        ("OPTIONS", "/v1/tasks", 405),
        ("GET", "/v1/acks", 405),
    ],
)
async def test_an_unknown_path_or_method_is_a_problem(
    rig: HttpRig, method: str, path: str, status: int
) -> None:
    response = await rig.call(method, path)
    assert response.status == status
    assert response.headers["content-type"] == "application/problem+json"
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("path", ["/v1/topics", "/v1/schedules"])
async def test_a_trailing_slash_is_ignored(rig: HttpRig, path: str) -> None:
    assert (await rig.call("GET", f"{path}/")).status == 200


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer wrong", "Basic secret", "secret", "Bearer sécret"]
)
async def test_requests_without_the_token_are_refused(locked: HttpRig, given: str) -> None:
    headers = {"authorization": given} if given else {}
    public = [route.path for route in ROUTES if route.public]
    assert public == ["/v1/callbacks/{token}", "/v1/session", "/v1/session"]
    callback = await locked.call("POST", "/v1/callbacks/5", {"result": "ack"})
    assert callback.status == 404, "its path is the proof, and this one is none"
    for route in ROUTES:
        if route.public:
            continue
        path = re.sub(r"{\w+}", "5", route.path)
        response = await locked.call(route.method, path, {"topic": "t"}, **headers)
        assert response.status == 401 and response.json["code"] == "unauthorized"
        assert response.headers["www-authenticate"].startswith("Bearer")
        assert response.headers["connection"] == "close"
    assert locked.core.tasks == 0 and not locked.core.topics


@pytest.mark.parametrize("given", ["Bearer secret", "bearer   secret "])
async def test_requests_with_the_token_are_served(locked: HttpRig, given: str) -> None:
    response = await locked.call("POST", "/v1/tasks", {"topic": "t"}, authorization=given)
    assert response.status == 201


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("null", 403),
        ("http://localhost:1", 403),
        ("http://[", 403),
        ("http://localhost:8080", 201),
    ],
)
async def test_requests_from_another_site_are_refused(
    rig: HttpRig, origin: str, status: int
) -> None:
    headers = {"origin": origin, "host": "localhost:8080", "content-type": "text/plain"}
    response = await rig.call("POST", "/v1/topics/t/tasks", b"x", **headers)
    assert response.status == status


async def test_an_unsupported_content_type_is_named(rig: HttpRig) -> None:
    for path in ("/v1/tasks", "/v1/acks"):
        response = await rig.call("POST", path, b"a=b", content_type="text/plain")
        assert response.status == 415 and "'text/plain'" in response.json["detail"]
    fine = await rig.call(
        "POST", "/v1/tasks", b'{"topic":"t"}', content_type="Application/JSON; charset=utf-8"
    )
    assert fine.status == 201


async def test_unknown_query_parameters_are_refused(rig: HttpRig) -> None:
    response = await rig.call("GET", "/v1/stats?all=true")
    assert response.status == 400 and "unknown field `all`" in response.json["detail"]
    many = "&".join(f"a{n}=1" for n in range(100))
    assert (await rig.call("GET", f"/v1/tasks?{many}")).status == 400


# --- limits --------------------------------------------------------------------------------------


async def test_a_body_is_refused_by_its_length_before_it_is_read(rig: HttpRig) -> None:
    limit = rig.settings.http_body_bytes
    asked = rig.begin(
        "POST", "/v1/tasks", b"", whole=False,
        content_type="application/json", content_length=str(limit + 1),
    )  # fmt: skip
    response = await asked.done()
    assert (response.status, response.json["code"]) == (413, "body_too_large")
    assert f"the limit is {limit}" in response.json["detail"]
    assert asked._messages.qsize() == 0
    huge = await rig.begin("POST", "/v1/tasks", b"", whole=False, content_length="9" * 4_000).done()
    assert huge.status == 413


async def test_a_chunked_body_over_the_limit_is_refused(rig: HttpRig) -> None:
    limit = rig.settings.http_body_bytes
    for size, status in ((limit, 400), (limit + 1, 413)):
        asked = rig.begin("POST", "/v1/tasks", b"", whole=False, content_type="application/json")
        for start in range(0, size, 100_000):
            asked.send(b" " * min(100_000, size - start))
        if status == 400:
            asked.send(b"", more=False)
        assert (await asked.done()).status == status
    assert rig.api._room.bytes == 0


async def test_all_bodies_together_have_a_limit() -> None:
    rig = await HttpRig(http_bodies_bytes_max=100).start()
    asked = rig.begin("POST", "/v1/tasks", b" " * 60, whole=False)
    await rig.settle()
    second = rig.begin("POST", "/v1/tasks", b" " * 41, whole=False)
    response = await second.done()
    assert (response.status, response.headers["retry-after"]) == (429, "1")
    assert "http_bodies_bytes_max" in response.json["detail"]
    asked.send(b'{"topic":"t"}', more=False)
    assert (await asked.done()).status == 201
    assert rig.api._room.bytes == 0
    await rig.stop()


async def test_a_body_that_stalls_times_out() -> None:
    """By a real clock: the time-out is asyncio's."""
    rig = await HttpRig(http_body_timeout_s=0.05).start()
    asked = rig.begin("POST", "/v1/tasks", b"{", whole=False)
    stream = rig.begin("POST", "/v1/tasks", b"{", whole=False, content_type="application/x-ndjson")
    await asyncio.wait([asked.task, stream.task], timeout=10)
    assert (asked.response.status, asked.response.json["code"]) == (408, "request_timeout")
    assert stream.response.lines[-1]["error"]["code"] == "request_timeout"
    await rig.stop()


async def test_ids_of_a_request_are_limited(rig: HttpRig) -> None:
    limit = Limits().ids_per_frame_max
    fine = await rig.post("/v1/cancellations", {"ids": ["5"] * limit})
    assert len(fine["results"]) == limit
    more = await rig.call("POST", "/v1/cancellations", {"ids": ["5"] * (limit + 1)})
    assert (more.status, more.json["code"]) == (400, "limit_exceeded")


async def test_a_refusal_over_a_shards_limit_has_retry_after() -> None:
    rig = await HttpRig(scheduled_max=1).start()
    await rig.post("/v1/tasks", {"topic": "t", "delay_ms": 9_000})
    response = await rig.call("POST", "/v1/tasks", {"topic": "t"})
    assert (response.status, response.json["code"]) == (429, "backlog_full")
    assert response.headers["retry-after"] == "1" and response.json["retryable"]
    await rig.stop()


# --- errors and roles ----------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
def test_every_code_has_a_status_and_its_problem(code: str) -> None:
    kind = errors.BY_CODE[code]
    status, headers, body = problem(kind("what happened"))
    assert 400 <= status <= 599 and status == kind.http_status
    assert f'"code":"{code}"'.encode() in body and b"what happened" in body
    assert (b"retry-after" in dict(headers)) == (
        kind.retryable and code not in ("connection_lost", "send_timeout")
    )


@pytest.mark.one_shard("it looks at the shard's callers, and the API of all keeps its client")
async def test_an_internal_error_is_answered_and_logged(
    rig: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(rig.operations.verbs, "look_up", broken)
    response = await rig.call("GET", "/v1/tasks/5")
    assert (response.status, response.json["code"]) == (500, "internal")
    assert any("on purpose" in text for _, text in rig.notices)
    assert not rig.shard.callers and not rig.shard.failed.done()


@pytest.mark.parametrize(
    ("header", "logged"),
    [
        (TRACE, {"trace_id": TRACE.split("-")[1], "span_id": TRACE.split("-")[2]}),
        *((wrong, {}) for wrong in ("", "x", TRACE.upper(), TRACE + "-00")),
    ],
)
async def test_log_lines_of_a_traced_request_have_its_ids(
    rig: HttpRig, monkeypatch: pytest.MonkeyPatch, header: str, logged: dict[str, str]
) -> None:
    seen: list[dict[str, Any]] = []

    def look(*_: Any) -> None:
        seen.append(get_contextvars())
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(rig.operations.verbs, "look_up", look)
    await rig.call("GET", "/v1/tasks/5", traceparent=header)
    await rig.call("GET", "/v1/tasks/5")
    assert seen == [logged, {}]


FUTURE = "-what-the-future-will-be-like"


@pytest.mark.parametrize(("headers", "trace_id"), vectors("trace_context")["headers"])
async def test_trace_headers_follow_the_w3c_tests(
    rig: HttpRig,
    monkeypatch: pytest.MonkeyPatch,
    headers: list[tuple[str, str]],
    trace_id: str | None,
) -> None:
    """What a request logs, and the place of an event, which is a task's."""
    seen: list[str | None] = []

    def look(*_: Any) -> None:
        seen.append(get_contextvars().get("trace_id"))
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(rig.operations.verbs, "look_up", look)
    # The server strips blanks around a value. Names of two cases are one name, sent twice.
    stripped = [(name, value.strip(" \t")) for name, value in headers]
    named = {name.title() if n else name: value for n, (name, value) in enumerate(stripped)}
    assert len(named) == len(headers)
    await rig.call("GET", "/v1/tasks/5", **named)
    assert seen == [trace_id]
    event = {"ce-specversion": "1.0", "ce-id": "7", "ce-source": "/shop", "ce-type": "made"}
    event |= {f"ce-{name}": value for name, value in named.items()}
    answer = await rig.call("POST", "/v1/topics/t/tasks", b"", **event)
    if len(headers) == 2 or not headers[0][0].isalpha():
        assert answer.status == 400  # twice, or no name of an attribute
        return
    assert answer.status == 201
    (task,) = (await rig.call("GET", "/v1/tasks?topic=t")).json["tasks"]
    # A task's trace has 55 characters: a consumer need not know what a later version adds.
    is_place = trace_id is not None and not stripped[0][1].endswith(FUTURE)
    assert task["trace"] == (stripped[0][1] if is_place else None)
    assert task["properties"]["ce-traceparent"] == stripped[0][1]


@pytest.mark.one_shard("the daemon changes its role, or ends")
async def test_a_standby_names_the_leader(rig: HttpRig) -> None:
    asked = rig.begin("POST", "/v1/topics/t/pull", {"wait_ms": 60_000})
    stream = rig.begin("GET", "/v1/topics/t/deliveries", accept="application/x-ndjson")
    await stream.until(lambda response: response.body)
    rig.store.stall()
    enqueue = rig.begin("POST", "/v1/tasks", {"topic": "t"})
    await rig.settle()
    rig.api.stand_by()
    response = await asked.done()
    assert (response.status, response.json["code"]) == (503, "not_active")
    assert response.json["active"] == "tcp://127.0.0.1:1"
    assert (await stream.done()).lines[-1]["error"]["code"] == "not_active"
    assert (await enqueue.done()).json["code"] == "outcome_unknown"
    refused = await rig.call("POST", "/v1/tasks", {"topic": "t"})
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert (await rig.call("GET", "/v1/status")).json == {"role": "standby"}
    assert not rig.shard.callers


@pytest.mark.one_shard("the daemon changes its role, or ends")
async def test_a_drain_ends_only_requests_that_wait_for_tasks(rig: HttpRig) -> None:
    asked = rig.begin("POST", "/v1/topics/t/pull", {"wait_ms": 60_000})
    await rig.settle()
    rig.store.stall()
    enqueue = rig.begin("POST", "/v1/tasks", {"topic": "t"})
    await rig.settle()
    rig.api.drain()
    assert (await asked.done()).json["code"] == "draining"
    assert (await rig.call("POST", "/v1/tasks", {"topic": "t"})).json["code"] == "draining"
    rig.store.go_on()
    assert (await enqueue.done()).status == 201


# --- the document --------------------------------------------------------------------------------


def test_every_operation_has_a_path() -> None:
    called = {name for route in ROUTES for name in route.operations}
    assert called | ON_TCP_ONLY == set(VERBS)
    assert not called & ON_TCP_ONLY


def test_each_operation_of_the_document_has_a_name_of_its_own() -> None:
    results = [
        operation["operationId"]
        for path in document(ROUTES)["paths"].values()
        for operation in path.values()
    ]
    assert len(set(results)) == len(results) == len(ROUTES)


def _parts(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every part of the document, with where it is."""
    yield at, value
    if isinstance(value, list):
        value = dict(enumerate(value))
    for name, one in value.items() if isinstance(value, dict) else ():
        yield from _parts(one, (*at, str(name)))


PARTS = list(_parts(json.loads(document_bytes(60_000)[0])))


def _at(path: str) -> Any:
    return dict(PARTS)[tuple(path.split("/"))]


def test_each_reference_of_the_document_leads_somewhere() -> None:
    places = {at for at, _ in PARTS}
    parts = [part for at, part in PARTS if at[-1:] == ("$ref",)]
    parts += [part for at, part in PARTS if at[-2:-1] == ("mapping",)]
    assert parts and {tuple(item.removeprefix("#/").split("/")) for item in parts} <= places
    named = {item.removeprefix("#/components/schemas/") for item in parts}
    assert named == set(_at("components/schemas"))


BY_THEMSELVES = re.compile(r"(In milliseconds|Up to \d|At least \d|From \d|Default:).*")
"""What a kind of values says of each field: alone, it says nothing of this one."""


DESCRIBED = ("properties", "parameters", "headers", "responses", "schemas", "tags")
"""The entries of a part of the document with this name have descriptions."""


def test_each_field_of_the_document_is_described() -> None:
    fields = [
        (at, part)
        for at, part in PARTS
        if len(at) > 1
        and at[-2] in DESCRIBED
        and at[-3:-2] != ("properties",)
        and isinstance(part, dict)
    ]
    assert len(fields) > 1_500
    answer = {"/".join(at): part.get("description", "") for at, part in fields}
    assert [at for at, text in answer.items() if not text or BY_THEMSELVES.match(text)] == []
    assert [at for at, text in answer.items() if "``" in text or "None" in text] == []


def _is_null(option: Any) -> bool:
    kind = option.get("type")
    return "null" in kind if isinstance(kind, list) else kind == "null"


def test_a_field_that_may_be_left_out_is_not_null_by_default() -> None:
    assert [at for at, part in PARTS if at[-1:] == ("default",) and part is None] == []


def test_null_unsets_a_setting_or_counts_as_absent() -> None:
    asked, left = (
        set[str](),
        [
            part["requestBody"]
            for at, part in PARTS
            if isinstance(part, dict) and "requestBody" in part
        ],
    )
    while left:
        for at, part in _parts(left.pop()):
            name = part.rpartition("/")[2] if at[-1:] == ("$ref",) else ""
            if name and name not in asked:
                asked.add(name)
                left.append(_at("components/schemas")[name])
    fields = [
        (name, field, part)
        for name in asked
        for field, part in _at("components/schemas")[name].get("properties", {}).items()
    ]
    nulls = {
        (name, field)
        for name, field, part in fields
        if _is_null(part) or any(map(_is_null, part.get("anyOf", ())))
    }
    own = {field.name for field in Settings.fields() if field.kind.none_removes}
    assert nulls == {("Settings", field) for field in own - {"topic", "group"}}


def test_unions_of_the_document_are_flat_and_named() -> None:
    """An object in a union has a schema of its own, and what tells it from the others."""
    unions = [(at, part) for at, part in PARTS if at[-1:] in (("anyOf",), ("oneOf",))]
    assert unions
    for at, union in unions:
        for option in union:
            assert not option.keys() & {"anyOf", "oneOf", "properties", "additionalProperties"}, at
    for at, part in unions:
        objects = [option["$ref"].rpartition("/")[2] for option in part if "$ref" in option]
        schemas = [_at("components/schemas")[name] for name in objects]
        needed = [
            frozenset(schema.get("required", ())) for schema in schemas if "properties" in schema
        ]
        if at[-1] == "oneOf" and at[0] == "paths":
            assert len(set(needed)) == len(needed), at


def test_standby_operations_cover_the_standby_routes() -> None:
    for route in ROUTES:
        if route.standby:
            assert all(hasattr(StandbyOperations, name) for name in route.operations)


@pytest.mark.one_shard("it counts the turns of the loop until an answer or an end is there")
async def test_requests_are_counted(rig: HttpRig) -> None:
    seen = rig.api._observed
    waiting = rig.begin("POST", "/v1/topics/t/pull", {"wait_ms": 60_000})
    await rig.settle()
    await rig.call("GET", "/v1/stats")
    await rig.call("GET", "/v1/tasks/x")
    rig.api.drain()
    await waiting.done()
    counted = (seen.http_requests, seen.http_client_errors, seen.http_server_errors)
    assert counted == (3, 1, 1) and seen.http_under_way == 0
