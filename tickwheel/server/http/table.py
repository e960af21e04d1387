"""Every path of the API: handler, types, rights, and what the document says of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tickwheel.api.groups import GroupSettings, Settings
from tickwheel.api.verbs import VERBS
from tickwheel.server.http import cloudevents, types
from tickwheel.server.http.bulk import NDJSON
from tickwheel.server.http.declared import WITHOUT_BODY, answer_type, handler_of, request_type
from tickwheel.server.http.handlers.bulk import Bulks
from tickwheel.server.http.handlers.consuming import SSE, Consuming, Streams
from tickwheel.server.http.handlers.controlling import Controlling
from tickwheel.server.http.handlers.listing import Listing
from tickwheel.server.http.handlers.producing import Producing
from tickwheel.server.http.handlers.restoring import Restoring
from tickwheel.server.http.handlers.scheduling import Scheduling
from tickwheel.server.http.handlers.sessions import Login
from tickwheel.server.http.handlers.settling import Settling
from tickwheel.server.http.handlers.transacting import Transacting
from tickwheel.server.http.handlers.watching import HTML, Watching
from tickwheel.server.http.routes import Route
from tickwheel.server.http.sessions import Sessions
from tickwheel.server.shard.callers import ASKED

SETTINGS_TYPE = request_type(Settings, frozenset(("topic", "group")))
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
    ("Tickwheel-Delay-Level", "Instead of a delay: a level."),
    ("Tickwheel-Key", "The producer's own name for the task."),
    ("Tickwheel-Tag", "The task's tag."),
    ("Tickwheel-Priority", "0 to 255, higher first."),
    ("Tickwheel-Ttl-Ms", "How long after it is due it is worth delivering."),
    ("Tickwheel-Within-Ms", "Due up to so much later, where there is room."),
    ("Tickwheel-Order-Key", "The tasks of one are handed out one at a time, in order."),
    ("Tickwheel-Retry", "A named policy, or one as JSON."),
    ("Tickwheel-If-Pending", "When its key is pending: a word, or a rule as JSON."),
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
        *_tasks(Controlling(), Listing()),
        *_keys(Controlling()),
        *_consuming(consume, Settling(streams)),
        *_topics(Listing()),
        *declared_routes(),
        *_dead(Controlling()),
        *_schedules(Scheduling()),
        *_transactions(Transacting()),
        *_bulks(Bulks()),
        *_daemon(Listing()),
        *_restores(Restoring()),
        *_watching(Watching(keep_alive_s=keep_alive_s)),
    ]


def declared_routes() -> list[Route]:
    """A route for each verb that is declared with its path."""
    found = []
    for verb in VERBS.values():
        if not verb.path or verb.name not in ASKED or verb.request is None:
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
                codes=verb.errors,
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
            raw=("application/octet-stream", "text/plain", cloudevents.STRUCTURED),
            codes=codes,
        ),
    ]  # fmt: skip


def _tasks(control: Controlling, show: Listing) -> list[Route]:
    tag = "tasks"
    return [
        Route("GET", "/v1/tasks", show.list_tasks, tag, "List tasks that have not ended",
              ("list_tasks",), types.Tasks, query=types.TasksQuery),
        Route("GET", "/v1/tasks/{id}", control.look_up, tag, "Look a task up",
              ("look_up",), types.Task, codes=_ENDED),
        Route("DELETE", "/v1/tasks/{id}", control.cancel, tag, "Cancel a task",
              ("cancel",), types.Result, codes=_ENDED),
        Route("PATCH", "/v1/tasks/{id}", control.reschedule, tag, "Reschedule a task",
              ("reschedule",), types.Result, body=types.When, codes=(*_ENDED, *_NEW)),
        Route("POST", "/v1/tasks/{id}/run", control.run_now, tag, "Run a task now",
              ("run_now",), types.Result, codes=_ENDED),
        Route("POST", "/v1/lookups", control.look_up_many, tag, "Look several tasks up",
              ("look_up",), types.TaskList, body=types.IdsIn),
        Route("POST", "/v1/cancellations", control.cancel_many, tag, "Cancel several tasks",
              ("cancel",), types.Results, body=types.IdsIn),
        Route("POST", "/v1/reschedules", control.reschedule_many, tag,
              "Reschedule several tasks", ("reschedule",), types.Results,
              body=types.RescheduleIn, codes=_NEW),
        Route("POST", "/v1/runs", control.run_now_many, tag, "Run several tasks now",
              ("run_now",), types.Results, body=types.IdsIn),
    ]  # fmt: skip


def _keys(control: Controlling) -> list[Route]:
    path, tag = "/v1/topics/{topic}/keys/{key}", "keys"
    return [
        Route("GET", path, control.look_up_key, tag, "Look up the tasks of a key",
              ("look_up_key",), types.TaskList, query=types.KeyQuery, codes=_ENDED),
        Route("DELETE", path, control.cancel_key, tag, "Cancel the tasks of a key",
              ("cancel_key",), types.Results, codes=_ENDED),
        Route("PATCH", path, control.reschedule_key, tag, "Reschedule the tasks of a key",
              ("reschedule_key",), types.Results, body=types.When, codes=(*_ENDED, *_NEW)),
        Route("POST", f"{path}/run", control.run_now_key, tag, "Run the tasks of a key now",
              ("run_now_key",), types.Results, codes=_ENDED),
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
        Route("GET", "/v1/topics", show.list_topics, tag, "List topics with their counts",
              ("list_topics",), types.Topics, query=types.NamePage),
        Route("GET", topic, show.show_topic, tag, "One topic", ("show_topic",), types.Topic,
              codes=("not_found",)),
        Route("PATCH", topic, show.configure_topic, tag,
              "Set a topic's pause, rate or retry policy", ("configure",),
              answer_type(GroupSettings), body=SETTINGS_TYPE,
              codes=("conflict",)),
        Route("GET", f"{topic}/groups", show.list_groups, tag, "The groups of a topic",
              ("show_topic",), types.Groups, codes=("not_found",)),
        Route("GET", group, show.show_group, tag, "One group", ("show_topic",), types.Group,
              codes=("not_found",)),
        Route("POST", f"{group}/reset", show.reset_group, tag,
              "Give a group again what came due since a moment", ("reset_group",), types.Bulk, 201,
              body=types.ResetIn, codes=("not_found", "conflict")),
        Route("POST", f"{group}/reset-preview", show.preview_reset, tag,
              "What a reset would give; gives nothing", ("preview_reset",), types.ResetPreview,
              body=types.ResetTrial, codes=("not_found",)),
    ]  # fmt: skip


def _dead(control: Controlling) -> list[Route]:
    tag = "dead letters"
    return [
        Route("GET", "/v1/dead-letters", control.list_dead, tag, "List dead letters",
              ("list_dead",), types.DeadLetters, query=types.DeadQuery),
        Route("POST", "/v1/dead-letters/requeue", control.requeue_dead, tag,
              "Requeue dead letters", ("requeue_dead",), types.Results, body=types.DeadIn),
        Route("POST", "/v1/dead-letters/delete", control.delete_dead, tag,
              "Delete dead letters", ("delete_dead",), types.Results, body=types.DeadIn),
    ]  # fmt: skip


def _transactions(transact: Transacting) -> list[Route]:
    tag, path = "transactions", "/v1/transactions/{name}"
    unknown, decided = (
        ("unknown_transaction",),
        ("transaction_committed", "transaction_rolled_back"),
    )
    return [
        Route("GET", "/v1/transactions", transact.list_transactions, tag,
              "List transactions that are not decided", ("list_transactions",), types.Transactions,
              query=types.TransactionPage),
        Route("GET", path, transact.show_transaction, tag, "One transaction and its half tasks",
              ("show_transaction",), types.Transaction, codes=unknown),
        Route("POST", f"{path}/commit", transact.commit_transaction, tag,
              "Commit: its half tasks are tasks", ("commit_transaction",), types.AcceptedIds,
              codes=(*unknown, decided[1], *_NEW)),
        Route("POST", f"{path}/rollback", transact.rollback_transaction, tag,
              "Roll back: none of its tasks ever was", ("rollback_transaction",),
              types.AcceptedIds, codes=(*unknown, decided[0])),
    ]  # fmt: skip


def _bulks(bulks: Bulks) -> list[Route]:
    tag, path, unknown = "bulk", "/v1/bulk/{bulk}", ("not_found",)
    return [
        Route("GET", "/v1/bulk", bulks.list_bulk, tag, "List bulk operations, the newest first",
              ("list_bulk",), types.Bulks, query=types.BulkPage, codes=unknown),
        Route("POST", "/v1/bulk", bulks.make_bulk, tag,
              "Do something to everything of a topic that matches", ("make_bulk",), types.Bulk, 201,
              body=types.BulkIn, codes=(*unknown, "conflict", "due_too_far")),
        Route("POST", "/v1/bulk-previews", bulks.preview_bulk, tag,
              "What a bulk operation would do; changes nothing", ("preview_bulk",),
              types.BulkPreview, body=types.BulkTrial, codes=(*unknown, "due_too_far")),
        Route("GET", path, bulks.show_bulk, tag, "One bulk operation, and how far it is",
              ("show_bulk",), types.Bulk, codes=unknown),
        Route("DELETE", path, bulks.cancel_bulk, tag,
              "Cancel a bulk operation: it changes nothing more", ("cancel_bulk",), types.Bulk,
              codes=unknown),
    ]  # fmt: skip


def _schedules(schedule: Scheduling) -> list[Route]:
    tag, path, unknown = "schedules", "/v1/schedules/{name}", ("not_found",)
    return [
        Route("GET", "/v1/schedules", schedule.list_schedules, tag, "List schedules",
              ("list_schedules",), types.Schedules, query=types.NamePage),
        Route("GET", path, schedule.show_schedule, tag,
              "One schedule, its next times and newest runs",
              ("show_schedule",), types.Schedule, query=types.NextQuery, codes=unknown),
        Route("PUT", path, schedule.put_schedule, tag, "Make a schedule, or make it so",
              ("put_schedule",), types.Schedule, 201, body=types.ScheduleIn),
        Route("DELETE", path, schedule.delete_schedule, tag, "Delete a schedule; its tasks stay",
              ("delete_schedule",), types.Schedule, codes=unknown),
        Route("POST", f"{path}/pause", schedule.pause_schedule, tag, "Pause", ("pause_schedule",),
              types.Schedule, codes=unknown),
        Route("POST", f"{path}/resume", schedule.resume_schedule, tag, "Resume",
              ("pause_schedule",),
              types.Schedule, codes=unknown),
        Route("POST", f"{path}/run", schedule.run_schedule, tag, "A task of it at once",
              ("run_schedule",), types.AcceptedIds, 201, codes=(*unknown, *_NEW)),
        Route("POST", f"{path}/backfill", schedule.backfill_schedule, tag,
              "A task for each occurrence of a time", ("backfill_schedule",),
              types.AcceptedIds, 201, body=types.BackfillIn, codes=(*unknown, *_NEW)),
    ]  # fmt: skip


def _daemon(show: Listing) -> list[Route]:
    tag = "daemon"
    return [
        Route("GET", "/v1/stats", show.stats, tag, "Counts", ("stats",), types.Stats),
        Route("GET", "/v1/load", show.load, tag, "How many tasks are due when", ("load",),
              types.Load, query=types.LoadQuery),
        Route("GET", "/v1/status", show.status, tag, "Role, state, store", ("status",),
              types.Status, standby=True),
        Route("GET", "/v1/limits", show.limits, tag, "What the daemon accepts", ("status",),
              dict[str, int], standby=True),
        Route("POST", "/v1/backups", show.backup, tag, "Copy the store to a new file",
              ("backup",), types.Backup, 201, body=types.BackupIn, codes=("conflict",)),
    ]  # fmt: skip


def _restores(restores: Restoring) -> list[Route]:
    tag, path, unknown = "daemon", "/v1/restores/{id}", ("not_found",)
    return [
        Route("POST", "/v1/restores", restores.restore, tag,
              "Restore a backup and the history since into a new file", ("restore",),
              types.Restore, 202, body=types.RestoreIn, codes=("not_found", "conflict")),
        Route("GET", "/v1/restores", restores.list_restores, tag, "The newest restores",
              ("list_restores",), types.RestoreList),
        Route("GET", path, restores.show_restore, tag, "How far a restore is",
              ("show_restore",), types.Restore, codes=unknown),
        Route("DELETE", path, restores.cancel_restore, tag,
              "Cancel a restore: nothing of it stays", ("cancel_restore",), types.Restore,
              codes=unknown),
    ]  # fmt: skip


def _watching(watch: Watching) -> list[Route]:
    tag = "console"
    return [
        Route("GET", "/v1/overview", watch.overview_now, tag,
              "The wheel, counts and what is wrong right now", ("overview",), types.Overview),
        Route("GET", "/v1/overview/stream", watch.watch_overview, tag, "The same again and again",
              ("overview",), None, query=types.WatchQuery, streams=(SSE,)),
        Route("GET", "/v1/consumers", watch.consumers, tag, "Who is connected and takes tasks",
              ("consumers",), types.Consumers, query=types.ConsumersQuery),
        Route("GET", "/v1/topics/{topic}/groups/{group}/lag", watch.group_lag, tag,
              "How far a group was behind in the last hour", ("group_lag",), types.GroupLag,
              codes=("not_found",)),
        Route("GET", "/v1/tasks/{id}/history", watch.task_history, tag,
              "What the history has of a task", ("task_history",), types.TaskHistory),
        Route("GET", "/v1/history/tasks", watch.history_tasks, tag,
              "Tasks of the history by key, topic and time, finished ones too", ("history_tasks",),
              types.FoundTasks, query=types.HistoryQuery),
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
