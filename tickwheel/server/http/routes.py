"""Every path of the API (its handler, types, rights, and what the document says of it), and which
of them a request is for.

A path is compared segment by segment as it was sent, before its escapes are undone: a topic's name
may have a slash, which a client then sends as %2F.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from msgspec import defstruct

from tickwheel.api.daemon import GroupStats
from tickwheel.api.groups import GroupSettings
from tickwheel.api.kinds import PROPERTIES
from tickwheel.api.tasks import TaskFields, TaskInfo
from tickwheel.api.verbs import VERBS
from tickwheel.errors import BadRequest, MethodNotAllowed, NotFound, shown
from tickwheel.server.http import commands, deliveries, enqueue, new_tasks, sessions, types
from tickwheel.server.http.call import Route
from tickwheel.server.http.declared import (
    RESULT_TYPE,
    RESULTS_TYPE,
    WITHOUT_BODY,
    answer_type,
    handler_of,
    request_type,
)
from tickwheel.server.http.deliveries import SSE
from tickwheel.server.http.enqueue import NDJSON


@dataclass(slots=True)
class _Node:
    """The routes whose paths begin with the same segments."""

    fixed: dict[str, _Node] = field(default_factory=dict)
    named: tuple[str, _Node] | None = None
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
                if node.named is None:
                    node.named = (name, _Node())
                assert node.named[0] == name, route.path
                node = node.named[1]
            else:
                node = node.fixed.setdefault(segment, _Node())
        assert route.method not in node.methods, route.path
        node.methods[route.method] = route

    def find(self, method: str, raw_path: bytes) -> tuple[Route, dict[str, str]]:
        """The route and what its path names. Raises NotFound, MethodNotAllowed, BadRequest."""
        node, named = self._root, {}
        for segment in raw_path.decode("ascii").strip("/").split("/"):
            following = node.fixed.get(segment)
            if following is None:
                if node.named is None or not segment:
                    raise self._unknown(raw_path)
                name, following = node.named
                named[name] = _text(segment)
            node = following
        if not node.methods:
            raise self._unknown(raw_path)
        route = node.methods.get(method)
        if route is None:
            raise _NotAllowed(method, tuple(node.methods))
        return route, named

    @staticmethod
    def _unknown(raw_path: bytes) -> NotFound:
        return NotFound(f"there is no {shown(raw_path.decode('ascii'))} here")


class _NotAllowed(MethodNotAllowed):
    """The path is known, but not with this method."""

    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        super().__init__(f"{shown(method)} is not allowed here; allowed: {', '.join(allowed)}")
        self.allowed = allowed


def allowed_by(error: Exception) -> bytes | None:
    """The header Allow, if the error has one."""
    return ", ".join(error.allowed).encode() if isinstance(error, _NotAllowed) else None


def _text(segment: str) -> str:
    try:
        return unquote_to_bytes(segment).decode()
    except UnicodeDecodeError:
        raise BadRequest(f"the path has a segment that is no UTF-8: {shown(segment)}") from None


# --- all paths -----------------------------------------------------------------------------------


GROUPS_TYPE = defstruct("Groups", [("groups", dict[str, answer_type(GroupStats)])])  # type: ignore[misc]
SESSIONS_PATH = "/v1/sessions"
_ENDED = ("not_found", "gone", "conflict")
_NEW = ("due_too_far", "store_full")
_ENQUEUE = ("enqueue", "enqueue_once")
_RESENT = ("idempotency_key_reused", "request_forgotten")
_TOPIC, _KEY = "/v1/topics/{topic}", "/v1/topics/{topic}/keys/{key}"
_IDEMPOTENCY = ("Idempotency-Key", "The same key again is the same request, for 24 hours.")
_TASK_HEADERS = (
    ("Tickwheel-Delay-Ms", "Due after so many milliseconds."),
    ("Tickwheel-Due-Ms", "Due then, in milliseconds since 1970."),
    ("Tickwheel-At", "Due then, as RFC 3339."),
    *(
        (
            f"Tickwheel-{one.name.replace('_', '-').title()}",
            f"{one.text} A word, or JSON." if one.name in new_tasks.MAPS else one.text,
        )
        for one in TaskFields.fields()
        if one.kind is not PROPERTIES  # each has a header of its own
    ),
    _IDEMPOTENCY,
)
_TOPIC_HEADER = ("Tickwheel-Topic", "CloudEvents: the topic.")


def _declared() -> Iterator[Route]:
    """A route for each verb that is declared with its path."""
    for verb in VERBS.values():
        request: Any = verb.request
        if not verb.path or request is None:
            continue
        method, _, path = verb.path.partition(" ")
        named = frozenset(re.findall(r"{(\w+)}", path))
        given = request_type(request, named)
        has_fields = bool(given.__struct_fields__)
        in_query = method in WITHOUT_BODY
        yield Route(
            method, path, handler_of(verb, named), verb.tag, verb.summary, (verb.name,),
            answer_type(verb.answer), verb.status,
            body=given if has_fields and not in_query else None,
            query=given if has_fields and in_query else types.NoQuery,
            codes=verb.errors, standby=verb.standby, public=verb.public,
        )  # fmt: skip


def _changing() -> Iterator[Route]:
    """The commands on a task that a path names, and on the tasks of a key."""
    for what, tag, path, of, answer in (
        ("task", "tasks", "/v1/tasks/{id}", "a task", RESULT_TYPE),
        ("key", "keys", _KEY, "the tasks of a key", RESULTS_TYPE),
    ):
        yield Route(
            "DELETE",
            path,
            commands.changing("cancel", what),
            tag,
            f"Cancel {of}",
            ("cancel",),
            answer,
            codes=_ENDED,
        )
        yield Route(
            "PATCH",
            path,
            commands.changing("reschedule", what),
            tag,
            f"Reschedule {of}",
            ("reschedule",),
            answer,
            body=types.Move,
            codes=(*_ENDED, *_NEW),
        )
        yield Route("POST", f"{path}/run", commands.changing("run_now", what), tag,
                    f"Run {of} now", ("run_now",), answer, codes=_ENDED)  # fmt: skip


def _settling() -> Iterator[Route]:
    for path, verb, body, usual, summary in (
        ("/v1/acks", "ack", types.AckIn, "acked", "Ack: done"),
        ("/v1/nacks", "nack", types.NackIn, "retrying", "Nack: failed, try again"),
        ("/v1/rejections", "reject", types.RejectIn, "dead", "Reject: never again"),
        ("/v1/snoozes", "snooze", types.SnoozeIn, "snoozed", "Snooze: later, and no failure"),
        ("/v1/extensions", "extend", types.ExtendIn, "extended", "Extend leases"),
        ("/v1/releases", "release", types.AckIn, "released", "Give back what was not started"),
    ):
        handler = deliveries.settling(verb, body, usual)
        yield Route("POST", path, handler, "deliveries", summary, (verb,), types.Settled, body=body)


ROUTES: Final = (
    Route("POST", "/v1/tasks", enqueue.enqueue, "tasks",
          "Enqueue one task or several; as NDJSON a stream of them, answered line by line",
          (*_ENQUEUE, "prepare"), types.Accepted | types.AcceptedMany | types.Prepared, 201,
          body=types.NewTask | types.NewTasks, headers=(_IDEMPOTENCY, _TOPIC_HEADER),
          raw=(NDJSON,), streams=(NDJSON,),
          codes=(*_NEW, *_RESENT, "conflict", "transaction_committed", "transaction_rolled_back")),
    Route("POST", "/v1/topics/{topic}/tasks", enqueue.enqueue_raw, "tasks",
          "Enqueue a task whose body is the request's; CloudEvents, too, also in batches",
          _ENQUEUE, types.Accepted | types.AcceptedMany, 201, headers=_TASK_HEADERS,
          # Batches are taken, too. Generated clients stumble over lists among other bodies.
          raw=("application/octet-stream", "text/plain", new_tasks.STRUCTURED),
          codes=(*_NEW, *_RESENT)),
    Route("GET", "/v1/tasks/{id}", commands.look_up, "tasks", "Look a task up", ("look_up",),
          answer_type(TaskInfo), codes=_ENDED),
    Route("POST", "/v1/lookups", commands.look_up_many, "tasks", "Look several tasks up",
          ("look_up",), commands.TASKS_TYPE, body=commands.IDS_TYPE),
    Route("POST", "/v1/reschedules", commands.reschedule_many, "tasks", "Reschedule several tasks",
          ("reschedule",), RESULTS_TYPE, body=types.RescheduleIn, codes=_NEW),
    Route("GET", _KEY, commands.look_up_key, "keys", "Look up the tasks of a key", ("look_up",),
          commands.TASKS_TYPE, query=commands.KEY_QUERY_TYPE, codes=_ENDED),
    *_changing(),
    Route("POST", "/v1/topics/{topic}/pull", deliveries.pull, "deliveries",
          "Get deliveries, waiting for them if need be", ("pull",), types.Deliveries,
          body=types.PullIn, codes=("not_found", "conflict")),
    Route("GET", "/v1/topics/{topic}/deliveries", deliveries.stream, "deliveries",
          "A stream of deliveries", ("subscribe",), query=types.StreamQuery,
          streams=(SSE, NDJSON), codes=("conflict",)),
    *_settling(),
    Route("PATCH", _TOPIC, commands.configure_topic, "topics",
          "Set a topic's pause, rate or retry policy", ("configure",),
          answer_type(GroupSettings), body=commands.SETTINGS_TYPE, codes=("conflict",)),
    Route("GET", f"{_TOPIC}/groups", commands.list_groups, "topics", "The groups of a topic",
          ("show_topic",), GROUPS_TYPE, codes=("not_found",)),
    Route("GET", f"{_TOPIC}/groups/{{group}}", commands.show_group, "topics", "One group",
          ("show_topic",), answer_type(GroupStats), codes=("not_found",)),
    *_declared(),
    Route("POST", "/v1/dead-letters/requeue", commands.on_dead("requeue_dead"), "dead letters",
          "Requeue dead letters", ("requeue_dead",), RESULTS_TYPE, body=types.DeadIn),
    Route("POST", "/v1/dead-letters/delete", commands.on_dead("delete_dead"), "dead letters",
          "Delete dead letters", ("delete_dead",), RESULTS_TYPE, body=types.DeadIn),
    Route("GET", "/v1/limits", commands.limits, "daemon", "What the daemon accepts", ("status",),
          dict[str, int], standby=True),
    Route("GET", "/v1/overview/stream", commands.watch_overview, "console",
          "The same again and again", ("overview",), query=types.WatchQuery, streams=(SSE,)),
    Route("GET", "/v1/report", commands.last_report, "console", "The page of the last report",
          ("report",), streams=(commands.HTML,), codes=("not_found",), page=True),
    # By these browsers log in and out; they tell nothing of the daemon's data.
    Route("POST", SESSIONS_PATH, sessions.log_in, "console",
          "Log in: a session in a cookie for the token that is shown", ("status",),
          types.Session, 201, standby=True),
    Route("GET", "/v1/session", sessions.who_am_i, "console", "Who asks, and what it may do",
          ("status",), types.Session, standby=True, public=True),
    Route("DELETE", "/v1/session", sessions.log_out, "console", "Log out", ("status",),
          types.Session, standby=True, public=True),
    Route("POST", "/v1/session-links", sessions.session_link, "console",
          "A code that logs a browser in as the caller, once", ("status",), types.SessionLink, 201,
          standby=True),
)  # fmt: skip
"""Every route, in the order of the document."""
