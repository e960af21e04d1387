"""Every path of the API with its handler, types, rights and documentation, and the router. This
module also contains the handlers that are not derived from a declaration: some for tasks, keys,
dead letters, topics and groups, the overview stream, and the page of the last report.

Paths are compared segment by segment before they are unescaped, because a topic's name can contain
a slash, which clients send as %2F.

The status of a request about one task depends on its outcome. A request about several tasks is
answered with 200 and an outcome for each.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Meta

from tickwheel.api.daemon import GroupStats
from tickwheel.api.groups import GroupSettings, Settings
from tickwheel.api.kinds import PROPERTIES
from tickwheel.api.tasks import LookUp, TaskFields, TaskInfo, success_outcomes
from tickwheel.api.verb import Right
from tickwheel.api.verbs import VERBS
from tickwheel.errors import (
    BadRequest,
    Conflict,
    MethodNotAllowed,
    NotFound,
    SlowReader,
    TaskGone,
    TickwheelError,
    shown,
)
from tickwheel.server import checks
from tickwheel.server.access.logins import SESSION_S, cookie_name, cookie_of
from tickwheel.server.http import deliveries, enqueue, types
from tickwheel.server.http.call import ClientGone, Route, as_json
from tickwheel.server.http.call import line as problem_line
from tickwheel.server.http.declared import (
    RESULT_TYPE,
    RESULTS_TYPE,
    WITHOUT_BODY,
    answer_type,
    from_json,
    handler_of,
    read_id,
    read_ids,
    request_type,
    results,
    set_fields,
    to_json,
)
from tickwheel.server.http.deliveries import SSE
from tickwheel.server.http.enqueue import NDJSON
from tickwheel.server.http.types import due_of
from tickwheel.server.shard.callers import ALL_TOPICS, NOBODY

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call, Handler
    from tickwheel.server.shard.callers import Principal


@dataclass(slots=True)
class _Node:
    """Routes whose paths begin with the same segments."""

    fixed: dict[str, _Node] = field(default_factory=dict)
    parameter: tuple[str, _Node] | None = None
    methods: dict[str, Route] = field(default_factory=dict)


class Router:
    """Finds the route of a request."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = routes
        self._root = _Node()
        for route in routes:
            self._add(route)

    def _add(self, route: Route) -> None:
        node = self._root
        for segment in route.path.strip("/").split("/"):
            if segment.startswith("{"):
                name = segment[1:-1]
                if node.parameter is None:
                    node.parameter = (name, _Node())
                assert node.parameter[0] == name, route.path
                node = node.parameter[1]
            else:
                node = node.fixed.setdefault(segment, _Node())
        assert route.method not in node.methods, route.path
        node.methods[route.method] = route

    def find(self, method: str, raw_path: bytes) -> tuple[Route, dict[str, str]]:
        """Return the route and the values that the path contains. Raise NotFound, MethodNotAllowed
        or BadRequest."""
        node, path_values = self._root, {}
        for segment in raw_path.decode("ascii").strip("/").split("/"):
            child = node.fixed.get(segment)
            if child is None:
                if node.parameter is None or not segment:
                    raise self._unknown(raw_path)
                name, child = node.parameter
                path_values[name] = _unescaped(segment)
            node = child
        if not node.methods:
            raise self._unknown(raw_path)
        route = node.methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = [*node.methods, *(["HEAD"] if "GET" in node.methods else [])]
            raise _NotAllowed(method, tuple(allowed))
        return route, path_values

    @staticmethod
    def _unknown(raw_path: bytes) -> NotFound:
        return NotFound(f"the API has no path {shown(raw_path.decode('ascii'))}")


class _NotAllowed(MethodNotAllowed):
    """The path exists, but not with this method."""

    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        super().__init__(f"the method must be one of {', '.join(allowed)}, not {shown(method)}")
        self.allowed = allowed


def allowed_by(error: Exception) -> bytes | None:
    """Return the header Allow for the error, or None."""
    return ", ".join(error.allowed).encode() if isinstance(error, _NotAllowed) else None


def _unescaped(segment: str) -> str:
    try:
        return unquote_to_bytes(segment).decode()
    except UnicodeDecodeError:
        raise BadRequest(f"the path has a segment that is not UTF-8: {shown(segment)}") from None


# --- tasks, keys, dead letters -------------------------------------------------------------------

IDS_TYPE = request_type(LookUp, frozenset(("topic", "key", "newest", "until_ms")))
KEY_QUERY_TYPE = request_type(LookUp, frozenset(("ids", "topic", "key")), "KeyQuery")
TASKS_TYPE = msgspec.defstruct(
    "TaskList",
    [
        (
            "tasks",
            Annotated[
                list[answer_type(TaskInfo)],  # type: ignore[misc]
                Meta(description="The requested tasks."),
            ],
        )
    ],
    namespace={"__doc__": "The requested tasks."},
)
_ids = msgspec.json.Decoder(IDS_TYPE)
_reschedule = msgspec.json.Decoder(types.RescheduleIn)
_move = msgspec.json.Decoder(types.Move)
_dead, _requeue = msgspec.json.Decoder(types.DeadIn), msgspec.json.Decoder(types.RequeueIn)


def _check_outcome(name: str, outcome: str, successes: Sequence[str]) -> None:
    """Raise the error for an unsuccessful outcome of a request about one task."""
    if outcome in successes:
        return
    if outcome == "unknown":
        raise NotFound(f"there is no {name}")
    if outcome == "gone":
        raise TaskGone(f"{name} finished so long ago that its outcome is forgotten")
    raise Conflict(f"{name} is {outcome}")


async def look_up(call: Call) -> None:
    """Answer with one task."""
    ids = _path_ids(call)
    [task] = await call.ask("look_up", {"ids": ids})
    if task["state"] in ("unknown", "gone"):
        _check_outcome(f"task {ids[0]}", task["state"], ())
    await call.answer(to_json(TaskInfo, task))


async def look_up_many(call: Call) -> None:
    """Answer with several tasks."""
    values = {"ids": read_ids((await call.json(_ids)).ids)}  # type: ignore[attr-defined]
    await call.answer(await call.ask("look_up", values, _tasks))


async def look_up_key(call: Call) -> None:
    """Answer with the tasks that have a key."""
    tasks = await call.ask("look_up", call.path_values | set_fields(call.query(KEY_QUERY_TYPE)))
    if not tasks:
        raise _no_task(call)
    await call.answer(_tasks(tasks))


async def reschedule_many(call: Call) -> None:
    """Move several tasks."""
    body = await call.json(_reschedule)
    values = {"ids": read_ids(body.ids), **_move_values(body)}
    await call.answer(results(await call.ask("reschedule", values)))


def dead_letter_handler(verb: str) -> Handler:
    """Return the handler of a command on dead letters."""

    decoder: msgspec.json.Decoder[Any] = _requeue if verb == "requeue_dead" else _dead

    async def handle(call: Call) -> None:
        request: types.DeadIn = await call.json(decoder)
        items, values = request.items, dict[str, Any]()
        if isinstance(request, types.RequeueIn) and request.ttl_ms is not None:
            values["ttl_ms"] = request.ttl_ms
        if not items:
            raise BadRequest("items has 0 elements; the minimum is 1")
        pairs = tuple(
            (read_id(item.id, f"items[{index}].id"), item.group) for index, item in enumerate(items)
        )
        outcomes = await call.ask(verb, {"pairs": pairs, **values})
        ids = (pair[0] for pair in pairs)
        await call.answer(results(list(zip(ids, outcomes, strict=True))))

    handle.__name__ = verb
    return handle


def change_handler(verb: str, selector: str) -> Handler:
    """Return the handler of a command on the "task", or the tasks of the "key", in the path."""

    async def handle(call: Call) -> None:
        values = _move_values(await call.json(_move)) if verb == "reschedule" else {}
        if selector == "key":
            outcomes = await call.ask(verb, call.path_values | values)
            if outcomes[0][0] is None:
                raise _no_task(call)
            await call.answer(results(outcomes))
            return
        [outcome] = await call.ask(verb, {"ids": _path_ids(call), **values})
        _check_outcome(f"task {outcome[0]}", outcome[1], success_outcomes(verb))
        await call.answer(results([outcome])["results"][0])

    handle.__name__ = f"{verb}_{selector}"
    return handle


def _path_ids(call: Call) -> tuple[int]:
    return (read_id(call.path_values["id"], "id"),)


def _move_values(move: types.Move) -> dict[str, Any]:
    delay_ms, due_ms = due_of(move, "reschedule")
    return {"delay_ms": delay_ms, "due_ms": due_ms, "shift_ms": move.shift_ms}


def _tasks(tasks: Any) -> bytes:
    return as_json({"tasks": to_json(list[TaskInfo], tasks)})


def _no_task(call: Call) -> NotFound:
    return NotFound(f"there is no task with the key {shown(call.path_values['key'])}")


# --- topics, groups and limits -------------------------------------------------------------------


SETTINGS_TYPE = request_type(Settings, frozenset(("topic", "group")))
_settings = msgspec.json.Decoder(SETTINGS_TYPE)


async def limits(call: Call) -> None:
    """Answer with the daemon's limits, which HELLO announces over TCP."""
    await call.answer(call.exchange.limits.to_wire())


async def list_groups(call: Call) -> None:
    """Answer with the groups of a topic."""
    topic = await call.ask("show_topic", call.path_values)
    await call.answer({"groups": topic["groups"]})


async def show_group(call: Call) -> None:
    """Answer with one group."""
    topic, group = call.path_values["topic"], call.path_values["group"]
    groups = (await call.ask("show_topic", {"topic": topic}))["groups"]
    if group not in groups:
        raise NotFound(f"topic {topic} has no group {group}")
    await call.answer(groups[group])


async def configure_topic(call: Call) -> None:
    """Change the settings of a topic."""
    values = set_fields(await call.json(_settings))
    settings = {n: from_json(Settings.field(n).kind, v, n) for n, v in values.items()}
    await call.answer(await call.ask("configure", {**call.path_values, **settings}))


# --- the console's overview and report -----------------------------------------------------------


HTML = "text/html"
EVERY_MS_MIN, EVERY_MS_MAX = 500, 60_000
REPORT_POLICY = (
    b"sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline';"
    b" style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'"
)
"""Content security policy of a report's page, which has inline code and runs without an origin."""
REPORT_HEADERS = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", REPORT_POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


async def watch_overview(call: Call) -> None:
    """Send the overview as server-sent events until the client disconnects or loses its rights."""
    every_ms = call.query(types.WatchQuery).every_ms
    checks.integer(every_ms, "every_ms", EVERY_MS_MIN, EVERY_MS_MAX)
    overview = await _overview(call)  # an error here is answered with its own status
    await call.begin(SSE)
    ended = asyncio.Event()
    call.exchange.on_end = lambda error: ended.set()
    disconnected = call.client.disconnection()
    disconnected.add_done_callback(lambda _: ended.set())
    try:
        while not disconnected.done():
            await call.piece_in_time(b"event: overview\ndata: %b\n\n" % overview)
            await _pause(call, ended, every_ms / 1000)
            if not disconnected.done():
                overview = await _overview(call)
    except SlowReader:
        raise
    except TickwheelError as error:
        last = as_json({"error": problem_line(error)})
        await call.piece(b"event: end\ndata: %b\n\n" % last, more=False)
        return
    raise ClientGone("the client has disconnected")


async def _pause(call: Call, ended: asyncio.Event, left_s: float) -> None:
    while left_s > 0 and not ended.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, call.common.keep_alive_s)):
                await ended.wait()
        left_s -= call.common.keep_alive_s
        if left_s > 0 and not ended.is_set():
            await call.piece_in_time(b": still here\n\n")


async def _overview(call: Call) -> bytes:
    page: bytes = await call.ask("overview", {}, as_json)
    return page


async def last_report(call: Call) -> None:
    """Answer with the page of the last report, unchanged."""
    report: dict[str, Any] = await call.ask("report", {})
    await call.reply(200, list(REPORT_HEADERS), report["page"])


# --- logins of browsers --------------------------------------------------------------------------


COOKIE_PATH = "/v1"


async def log_in(call: Call) -> None:
    """Begin a session for the caller, unless the daemon needs no login."""
    sessions, principal = call.common.sessions, call.exchange.caller.principal
    if not sessions.are_needed:
        await call.answer(_session_view(call, principal, None))
        return
    text, session = sessions.begin(principal)
    sessions.audit(call.exchange.caller, "console_login")
    fields = _session_view(call, principal, session.until_ms)
    await call.answer(fields, headers={b"set-cookie": _cookie(call, text, SESSION_S)})


async def who_am_i(call: Call) -> None:
    """Answer with the caller, whom a session or token identifies."""
    session = call.common.sessions.find(cookie_of(call.headers))
    until_ms = session.until_ms if session is not None else None
    await call.answer(_session_view(call, call.exchange.caller.principal, until_ms))


async def log_out(call: Call) -> None:
    """Log out. Callers that are not logged in get the same answer."""
    sessions, principal = call.common.sessions, call.exchange.caller.principal
    if principal is not NOBODY:
        sessions.end(cookie_of(call.headers))
        sessions.audit(call.exchange.caller, "console_logout")
    remaining = NOBODY if sessions.are_needed else principal
    cookie = _cookie(call, "", 0)
    await call.answer(_session_view(call, remaining, None), headers={b"set-cookie": cookie})


async def session_link(call: Call) -> None:
    """Create a login link for ``tickwheel console``."""
    sessions = call.common.sessions
    if not sessions.are_needed:
        await call.answer({"code": None, "until_ms": None})
        return
    code, session = sessions.link(call.exchange.caller.principal)
    sessions.audit(call.exchange.caller, "console_link")
    await call.answer({"code": code, "until_ms": session.until_ms})


def _session_view(call: Call, principal: Principal, until_ms: int | None) -> dict[str, Any]:
    return {
        "name": None if principal is NOBODY else principal.name,
        "is_login_needed": call.common.sessions.are_needed,
        "until_ms": until_ms,
        "rights": _rights(principal),
    }


def _rights(principal: Principal) -> dict[str, list[str]]:
    if principal.grants is None:
        return {right.value: [ALL_TOPICS] for right in Right}
    return {right.value: list(patterns) for right, patterns in principal.grants}


def _cookie(call: Call, text: str, lasts_s: int) -> bytes:
    name = cookie_name(call.headers.get(b"host", b""))
    parts = [f"{name}={text}", f"Path={COOKIE_PATH}", f"Max-Age={lasts_s}"]
    parts += ["HttpOnly", "SameSite=Strict", *(["Secure"] if call.is_encrypted else [])]
    return "; ".join(parts).encode("latin-1")


# --- all paths -----------------------------------------------------------------------------------


GROUPS_TYPE = msgspec.defstruct(
    "GroupMap",
    [
        (
            "groups",
            Annotated[
                dict[str, answer_type(GroupStats)],  # type: ignore[misc]
                Meta(description="The groups, by name."),
            ],
        )
    ],
    namespace={"__doc__": "The groups of a topic."},
)
SESSIONS_PATH = "/v1/sessions"
LINKS_PATH = "/v1/session-links"
_ENDED = ("not_found", "gone", "conflict")
_NEW = ("due_too_far", "store_full")
_ENQUEUE = ("enqueue", "enqueue_once")
_RESENT = ("idempotency_key_reused", "request_forgotten")
_TOPIC, _KEY = "/v1/topics/{topic}", "/v1/topics/{topic}/keys/{key}"
_IDEMPOTENCY = (
    "Idempotency-Key",
    "A key that identifies the request for 24 hours: a repeated request is not executed again.",
)
_TASK_HEADERS = (
    ("Tickwheel-Delay-Ms", "The delay from now, in milliseconds."),
    ("Tickwheel-Due-Ms", "The due time, in milliseconds since 1970."),
    ("Tickwheel-At", "The due time in RFC 3339."),
    *(
        (
            f"Tickwheel-{field.name.replace('_', '-').title()}",
            types.description_of(field) + (" Text or JSON." if field.name in types.MAPS else ""),
        )
        for field in TaskFields.fields()
        if field.kind is not PROPERTIES  # each property has a separate header
    ),
    _IDEMPOTENCY,
)
_TOPIC_HEADER = ("Tickwheel-Topic", "The topic of a CloudEvent sent to this path.")


def _declared_routes() -> Iterator[Route]:
    """Yield a route for each verb that is declared with its path."""
    for verb in VERBS.values():
        request: Any = verb.request
        if not verb.path or request is None:
            continue
        method, _, path = verb.path.partition(" ")
        path_fields = frozenset(re.findall(r"{(\w+)}", path))
        fields_type = request_type(request, path_fields)
        has_fields = bool(fields_type.__struct_fields__)
        in_query = method in WITHOUT_BODY
        yield Route(
            method, path, handler_of(verb, path_fields), verb.tag, verb.summary, (verb.name,),
            answer_type(verb.answer), verb.status,
            body=fields_type if has_fields and not in_query else None,
            query=fields_type if has_fields and in_query else types.NoQuery,
            codes=verb.errors, standby=verb.standby, public=verb.public,
        )  # fmt: skip


def _explain_routes() -> Iterator[Route]:
    """Yield the routes that explain a task's state, by its id or by its key."""
    verb = VERBS["explain"]
    fields = frozenset(field.name for field in verb.request_type.fields())
    paths = {"explain": "/v1/tasks/{id}/explanation", "explain_key": f"{_KEY}/explanation"}
    for name, path in paths.items():
        handler = handler_of(replace(verb, path=f"GET {path}"), fields)
        handler.__name__ = name
        yield Route(
            "GET", path, handler, "tasks", verb.summary, ("explain",), answer_type(verb.answer)
        )


def _change_routes() -> Iterator[Route]:
    """Yield the routes of commands on a task, and on the tasks of a key."""
    for selector, tag, path, target, answer in (
        ("task", "tasks", "/v1/tasks/{id}", "a task", RESULT_TYPE),
        ("key", "keys", _KEY, "the tasks of a key", RESULTS_TYPE),
    ):
        yield Route(
            "DELETE",
            path,
            change_handler("cancel", selector),
            tag,
            f"Cancel {target}",
            ("cancel",),
            answer,
            codes=_ENDED,
        )
        yield Route(
            "PATCH",
            path,
            change_handler("reschedule", selector),
            tag,
            f"Reschedule {target}",
            ("reschedule",),
            answer,
            body=types.Move,
            codes=(*_ENDED, *_NEW),
        )
        yield Route("POST", f"{path}/run", change_handler("run_now", selector), tag,
                    f"Run {target} now", ("run_now",), answer, codes=_ENDED)  # fmt: skip


def _settle_routes() -> Iterator[Route]:
    for path, verb, body, usual_outcome, summary in (
        ("/v1/acks", "ack", types.AckIn, "acked", "Acknowledge deliveries"),
        ("/v1/nacks", "nack", types.NackIn, "retrying", "Report failed deliveries for a retry"),
        ("/v1/rejections", "reject", types.RejectIn, "dead", "Reject deliveries without a retry"),
        ("/v1/snoozes", "snooze", types.SnoozeIn, "snoozed", "Postpone deliveries"),
        ("/v1/extensions", "extend", types.ExtendIn, "extended", "Extend leases"),
        ("/v1/releases", "release", types.AckIn, "released", "Release unstarted deliveries"),
    ):
        handler = deliveries.settlement_handler(verb, body, usual_outcome)
        yield Route("POST", path, handler, "deliveries", summary, (verb,), types.Settled, body=body)


ROUTES: Final = (
    Route("POST", "/v1/tasks", enqueue.enqueue, "tasks",
          "Enqueue one task, several tasks, or an NDJSON stream of tasks",
          (*_ENQUEUE, "prepare"), types.Accepted | types.AcceptedMany | types.Prepared, 201,
          body=types.NewTask | types.NewTasks, headers=(_IDEMPOTENCY, _TOPIC_HEADER),
          raw=(NDJSON,), streams=(NDJSON,),
          codes=(*_NEW, *_RESENT, "conflict", "transaction_committed", "transaction_rolled_back")),
    Route("POST", "/v1/topics/{topic}/tasks", enqueue.enqueue_raw, "tasks",
          "Enqueue a task with the request's body, a CloudEvent, or a batch of CloudEvents",
          _ENQUEUE, types.Accepted | types.AcceptedMany, 201, headers=_TASK_HEADERS,
          # Batches are accepted but not listed: client generators fail on lists in unions.
          raw=("application/octet-stream", "text/plain", enqueue.STRUCTURED),
          codes=(*_NEW, *_RESENT)),
    Route("GET", "/v1/tasks/{id}", look_up, "tasks", "Look up a task", ("look_up",),
          answer_type(TaskInfo), codes=_ENDED),
    Route("POST", "/v1/lookups", look_up_many, "tasks", "Look up several tasks",
          ("look_up",), TASKS_TYPE, body=IDS_TYPE),
    Route("POST", "/v1/reschedules", reschedule_many, "tasks", "Reschedule several tasks",
          ("reschedule",), RESULTS_TYPE, body=types.RescheduleIn, codes=_NEW),
    Route("GET", _KEY, look_up_key, "keys", "Look up the tasks of a key", ("look_up",),
          TASKS_TYPE, query=KEY_QUERY_TYPE, codes=_ENDED),
    *_change_routes(),
    Route("POST", "/v1/topics/{topic}/pull", deliveries.pull, "deliveries",
          "Pull deliveries, optionally waiting for the first", ("pull",), types.DeliveryList,
          body=types.PullIn, codes=("not_found", "conflict")),
    Route("GET", "/v1/topics/{topic}/deliveries", deliveries.stream, "deliveries",
          "Stream deliveries", ("subscribe",), query=types.StreamQuery,
          streams=(SSE, NDJSON), codes=("conflict",)),
    *_settle_routes(),
    Route("PATCH", _TOPIC, configure_topic, "topics",
          "Set a topic's pause, rate or retry policy", ("configure",),
          answer_type(GroupSettings), body=SETTINGS_TYPE, codes=("conflict",)),
    Route("GET", f"{_TOPIC}/groups", list_groups, "topics", "List the groups of a topic",
          ("show_topic",), GROUPS_TYPE, codes=("not_found",)),
    Route("GET", f"{_TOPIC}/groups/{{group}}", show_group, "topics", "Show a group",
          ("show_topic",), answer_type(GroupStats), codes=("not_found",)),
    *_declared_routes(),
    *_explain_routes(),
    Route("POST", "/v1/dead-letters/requeue", dead_letter_handler("requeue_dead"), "dead letters",
          "Requeue dead letters", ("requeue_dead",), RESULTS_TYPE, body=types.RequeueIn),
    Route("POST", "/v1/dead-letters/delete", dead_letter_handler("delete_dead"), "dead letters",
          "Delete dead letters", ("delete_dead",), RESULTS_TYPE, body=types.DeadIn),
    Route("GET", "/v1/limits", limits, "daemon", "Show the daemon's limits", ("status",),
          dict[str, int], standby=True),
    Route("GET", "/v1/overview/stream", watch_overview, "console",
          "Stream the overview", ("overview",), query=types.WatchQuery, streams=(SSE,)),
    Route("GET", "/v1/report", last_report, "console", "Show the page of the last report",
          ("report",), streams=(HTML,), codes=("not_found",), page=True),
    # Browsers log in and out with these routes, which reveal nothing about the daemon's data.
    Route("POST", SESSIONS_PATH, log_in, "console",
          "Log in with a token and get a session cookie", ("status",),
          types.Session, 201, standby=True),
    Route("GET", "/v1/session", who_am_i, "console", "Show the caller and its rights",
          ("status",), types.Session, standby=True, public=True),
    Route("DELETE", "/v1/session", log_out, "console", "Log out", ("status",),
          types.Session, standby=True, public=True),
    Route("POST", LINKS_PATH, session_link, "console",
          "Create a code for a single login as the caller", ("status",), types.SessionLink, 201,
          standby=True),
)  # fmt: skip
"""Every route, in the order of the OpenAPI document."""
