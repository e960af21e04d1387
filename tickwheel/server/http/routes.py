"""Every path of the API (its handler, types, rights, and what the document says of it), and which
of them a request is for.

A path is compared segment by segment as it was sent, before its escapes are undone: a topic's name
may have a slash, which a client then sends as %2F.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from msgspec import defstruct

from tickwheel.api.daemon import GroupStats
from tickwheel.api.groups import GroupSettings, Settings
from tickwheel.api.kinds import PROPERTIES
from tickwheel.api.tasks import TaskFields, TaskInfo, TaskOutcome
from tickwheel.api.verbs import VERBS
from tickwheel.errors import BadRequest, MethodNotAllowed, NotFound, shown
from tickwheel.server.http import new_tasks, types
from tickwheel.server.http.call import Route
from tickwheel.server.http.commands import (
    HTML,
    IDS_TYPE,
    KEY_QUERY_TYPE,
    TASKS_TYPE,
    Controlling,
    Listing,
    Watching,
    changing,
)
from tickwheel.server.http.declared import (
    RESULT_TYPE,
    WITHOUT_BODY,
    answer_type,
    handler_of,
    request_type,
)
from tickwheel.server.http.deliveries import SSE, Consuming, Settling, Streams
from tickwheel.server.http.enqueue import NDJSON, Producing
from tickwheel.server.http.sessions import Login, Sessions


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


SETTINGS_TYPE = request_type(Settings, frozenset(("topic", "group")))
RESULTS_TYPE = answer_type(list[TaskOutcome])
GROUPS_TYPE = defstruct("Groups", [("groups", dict[str, answer_type(GroupStats)])])  # type: ignore[misc]
KEEP_ALIVE_S_MAX = 15.0
"""How often, in seconds, a stream says something at least."""
SESSIONS_PATH = "/v1/sessions"
_ENDED = ("not_found", "gone", "conflict")
_NEW = ("due_too_far", "store_full")
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


def routes(delay_levels_ms: Sequence[int], heartbeat_interval_s: float) -> list[Route]:
    """All routes that call operations, in the order of the document."""
    streams = Streams()
    keep_alive_s = min(KEEP_ALIVE_S_MAX, heartbeat_interval_s)
    consume = Consuming(streams, keep_alive_s=keep_alive_s)
    return [
        *_producing(Producing(delay_levels_ms)),
        *_tasks(Controlling()),
        *_keys(Controlling()),
        *_consuming(consume, Settling(streams)),
        *_topics(Listing()),
        *declared_routes(),
        *_dead(Controlling()),
        *_daemon(Listing()),
        *_watching(Watching(keep_alive_s=keep_alive_s)),
    ]


def declared_routes() -> list[Route]:
    """A route for each verb that is declared with its path."""
    found = []
    for verb in VERBS.values():
        if not verb.path or verb.request is None:
            continue
        method, _, path = verb.path.partition(" ")
        named = frozenset(re.findall(r"{(\w+)}", path))
        given = request_type(verb.request, named)
        has_fields = bool(given.__struct_fields__)
        in_query = method in WITHOUT_BODY
        found.append(
            Route(
                method, path, handler_of(verb, named), verb.tag, verb.summary, (verb.name,),
                answer_type(verb.answer), verb.status,
                body=given if has_fields and not in_query else None,
                query=given if has_fields and in_query else types.NoQuery,
                codes=verb.errors, standby=verb.standby, public=verb.public,
            )
        )  # fmt: skip
    return found


def _producing(produce: Producing) -> list[Route]:
    operations = ("enqueue", "enqueue_once")
    codes = (*_NEW, "idempotency_key_reused", "request_forgotten")
    decided = ("conflict", "transaction_committed", "transaction_rolled_back")
    return [
        Route(
            "POST", "/v1/tasks", produce.enqueue, "tasks",
            "Enqueue one task or several; as NDJSON a stream of them, answered line by line",
            (*operations, "prepare"), types.Accepted | types.AcceptedMany | types.Prepared, 201,
            body=types.NewTask | types.NewTasks,
            headers=(_IDEMPOTENCY, _TOPIC_HEADER),
            raw=(NDJSON,), streams=(NDJSON,),
            codes=(*codes, *decided),
        ),
        Route(
            "POST", "/v1/topics/{topic}/tasks", produce.enqueue_raw, "tasks",
            "Enqueue a task whose body is the request's; CloudEvents, too, also in batches",
            operations, types.Accepted | types.AcceptedMany, 201,
            headers=_TASK_HEADERS,
            # Batches are taken, too. Generated clients stumble over lists among other bodies.
            raw=("application/octet-stream", "text/plain", new_tasks.STRUCTURED),
            codes=codes,
        ),
    ]  # fmt: skip


def _tasks(control: Controlling) -> list[Route]:
    tag = "tasks"
    return [
        Route("GET", "/v1/tasks/{id}", control.look_up, tag, "Look a task up",
              ("look_up",), answer_type(TaskInfo), codes=_ENDED),
        Route("DELETE", "/v1/tasks/{id}", changing("cancel", "task"), tag,
              "Cancel a task", ("cancel",), RESULT_TYPE, codes=_ENDED),
        Route("PATCH", "/v1/tasks/{id}", changing("reschedule", "task"), tag,
              "Reschedule a task", ("reschedule",), RESULT_TYPE, body=types.Move,
              codes=(*_ENDED, *_NEW)),
        Route("POST", "/v1/tasks/{id}/run", changing("run_now", "task"), tag,
              "Run a task now", ("run_now",), RESULT_TYPE, codes=_ENDED),
        Route("POST", "/v1/lookups", control.look_up_many, tag, "Look several tasks up",
              ("look_up",), TASKS_TYPE, body=IDS_TYPE),
        Route("POST", "/v1/reschedules", control.reschedule_many, tag,
              "Reschedule several tasks", ("reschedule",), RESULTS_TYPE,
              body=types.RescheduleIn, codes=_NEW),
    ]  # fmt: skip


def _keys(control: Controlling) -> list[Route]:
    path, tag = "/v1/topics/{topic}/keys/{key}", "keys"
    return [
        Route("GET", path, control.look_up_key, tag, "Look up the tasks of a key",
              ("look_up",), TASKS_TYPE, query=KEY_QUERY_TYPE, codes=_ENDED),
        Route("DELETE", path, changing("cancel", "key"), tag,
              "Cancel the tasks of a key", ("cancel",), RESULTS_TYPE, codes=_ENDED),
        Route("PATCH", path, changing("reschedule", "key"), tag,
              "Reschedule the tasks of a key", ("reschedule",), RESULTS_TYPE,
              body=types.Move, codes=(*_ENDED, *_NEW)),
        Route("POST", f"{path}/run", changing("run_now", "key"), tag,
              "Run the tasks of a key now", ("run_now",), RESULTS_TYPE, codes=_ENDED),
    ]  # fmt: skip


def _consuming(consume: Consuming, settle: Settling) -> list[Route]:
    tag = "deliveries"
    return [
        Route("POST", "/v1/topics/{topic}/pull", consume.pull, tag,
              "Get deliveries, waiting for them if need be", ("pull",), types.Deliveries,
              body=types.PullIn, codes=("not_found", "conflict")),
        Route("GET", "/v1/topics/{topic}/deliveries", consume.stream, tag,
              "A stream of deliveries", ("subscribe",), None, query=types.StreamQuery,
              streams=(SSE, NDJSON), codes=("conflict",)),
        Route("POST", "/v1/acks", settle.ack, tag, "Ack: done",
              ("ack",), types.Settled, body=types.AckIn),
        Route("POST", "/v1/nacks", settle.nack, tag, "Nack: failed, try again",
              ("nack",), types.Settled, body=types.NackIn),
        Route("POST", "/v1/rejections", settle.reject, tag, "Reject: never again",
              ("reject",), types.Settled, body=types.RejectIn),
        Route("POST", "/v1/snoozes", settle.snooze, tag, "Snooze: later, and no failure",
              ("snooze",), types.Settled, body=types.SnoozeIn),
        Route("POST", "/v1/extensions", settle.extend, tag, "Extend leases",
              ("extend",), types.Settled, body=types.ExtendIn),
        Route("POST", "/v1/releases", settle.release, tag, "Give back what was not started",
              ("release",), types.Settled, body=types.AckIn),
    ]  # fmt: skip


def _topics(show: Listing) -> list[Route]:
    tag, topic, group = "topics", "/v1/topics/{topic}", "/v1/topics/{topic}/groups/{group}"
    return [
        Route("PATCH", topic, show.configure_topic, tag,
              "Set a topic's pause, rate or retry policy", ("configure",),
              answer_type(GroupSettings), body=SETTINGS_TYPE,
              codes=("conflict",)),
        Route("GET", f"{topic}/groups", show.list_groups, tag, "The groups of a topic",
              ("show_topic",), GROUPS_TYPE, codes=("not_found",)),
        Route("GET", group, show.show_group, tag, "One group", ("show_topic",),
              answer_type(GroupStats), codes=("not_found",)),
    ]  # fmt: skip


def _dead(control: Controlling) -> list[Route]:
    tag = "dead letters"
    return [
        Route("POST", "/v1/dead-letters/requeue", control.requeue_dead, tag,
              "Requeue dead letters", ("requeue_dead",), RESULTS_TYPE, body=types.DeadIn),
        Route("POST", "/v1/dead-letters/delete", control.delete_dead, tag,
              "Delete dead letters", ("delete_dead",), RESULTS_TYPE, body=types.DeadIn),
    ]  # fmt: skip


def _daemon(show: Listing) -> list[Route]:
    tag = "daemon"
    return [
        Route("GET", "/v1/limits", show.limits, tag, "What the daemon accepts", ("status",),
              dict[str, int], standby=True),
    ]  # fmt: skip


def _watching(watch: Watching) -> list[Route]:
    tag = "console"
    return [
        Route("GET", "/v1/overview/stream", watch.watch_overview, tag, "The same again and again",
              ("overview",), None, query=types.WatchQuery, streams=(SSE,)),
        Route("GET", "/v1/report", watch.last_report, tag, "The page of the last report",
              ("report",), None, streams=(HTML,), codes=("not_found",), page=True),
    ]  # fmt: skip


def session_routes(sessions: Sessions) -> list[Route]:
    """The routes by which browsers log in and out; they tell nothing of the daemon's data."""
    login, tag = Login(sessions), "console"
    return [
        Route("POST", SESSIONS_PATH, login.log_in, tag,
              "Log in: a session in a cookie for the token that is shown", ("status",),
              types.Session, 201, standby=True),
        Route("GET", "/v1/session", login.who_am_i, tag, "Who asks, and what it may do",
              ("status",), types.Session, standby=True, public=True),
        Route("DELETE", "/v1/session", login.log_out, tag, "Log out", ("status",), types.Session,
              standby=True, public=True),
        Route("POST", "/v1/session-links", login.session_link, tag,
              "A code that logs a browser in as the caller, once", ("status",),
              types.SessionLink, 201, standby=True),
    ]  # fmt: skip
