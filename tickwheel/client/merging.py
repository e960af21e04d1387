"""Rules that merge the answers of several shards into one.

Answers are in wire form. Connections and clients are not known here. An answer is merged from all
shards that were asked, in the order of the shards.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from tickwheel.api.daemon import RESTORE_STEPS, UNKNOWN, UNREACHABLE
from tickwheel.client.requests import raise_first
from tickwheel.errors import TickwheelError
from tickwheel.protocol import encode

if TYPE_CHECKING:
    from tickwheel.api.verb import Verb

Raw = Mapping[str, Any]
"""An answer of a daemon, or a part of it, in wire form."""
ABSENT = ("unknown", "not_held", "gone")
"""Answers about a task that a shard does not have, from the least to the most informative."""


def informativeness(answer: Any) -> int:
    """Rank a shard's answer about one task: lowest if it does not know the task, highest for nil,
    which means the usual answer."""
    if answer is None:
        return len(ABSENT) + 1
    word = answer
    if not isinstance(answer, str):
        word = answer.get("state") if isinstance(answer, Mapping) else answer[1]
    return ABSENT.index(word) if word in ABSENT else len(ABSENT)


async def ask_in_parts(
    parts: Mapping[int, Sequence[int]],
    ask: Callable[[int, Sequence[int]], Awaitable[Sequence[Any]]],
) -> list[Any]:
    """Return the answer for each item. ``parts`` maps shards to indexes of items; ``ask`` gets a
    shard and its indexes, and returns an answer for each. If there are several answers for an item,
    the most informative is returned. Raise the first error."""
    best: dict[int, Any] = {}

    async def ask_shard(shard: int, indexes: Sequence[int]) -> None:
        for index, answer in zip(indexes, await ask(shard, indexes), strict=True):
            if index not in best or informativeness(answer) > informativeness(best[index]):
                best[index] = answer

    calls = (ask_shard(*part) for part in parts.items())
    raise_first(await asyncio.gather(*calls, return_exceptions=True))
    return [best[index] for index in range(len(best))]


# --- merging rules ------------------------------------------------------------------------------

ADDED = frozenset((
    "scheduled", "ready", "in_flight", "waiting", "dead", "delivered", "acked", "enqueued",
    "cancelled", "nacked", "snoozed", "deaths", "expired", "filtered", "retrying", "held",
    "paused_keys", "in_lines", "dead_total", "dead_expired", "dropped_once", "retried",
    "leases_over", "early", "kept", "replaced", "rejected", "schedules", "wheel_bytes",
    "resident_bytes", "batches", "connections", "sessions", "open", "parked", "half_tasks", "bytes",
    "count", "looked_at", "given", "sent", "failed", "tasks", "lost", "incomplete", "scheduled",
    "matched", "changed", "groups_held",
))  # fmt: skip
"""Fields that are added over all shards."""
MOST = frozenset((
    "oldest_ready_ms", "subscribers", "broadcasters", "since_ms", "p50_ms", "p99_ms", "max_ms",
    "topics_left_out", "partial", "created", "deleting", "last_ms", "until_ms", "ended_ms",
    "paused",
))  # fmt: skip
"""Fields with the maximum over all shards. A subscriber of all shards has a subscription on each;
percentiles cannot be added."""
LEAST = frozenset((
    "store_ok", "share", "first_ms", "from_ms", "unused_ms", "exact", "made_ms", "paused_ms",
    "uptime_s",
))  # fmt: skip
"""Fields with the minimum over all shards."""
NESTED = frozenset(("transactions", "lateness", "replay"))
"""Fields with a map of such fields."""
BY_NAME = frozenset(("topics", "groups"))
"""Fields with maps of such maps by name, if they are maps."""


def _counts(answers: Sequence[Raw], options: Raw | None = None) -> dict[str, Any]:
    """Merge maps of counts and settings; any other field is taken from the first."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for answer in answers for name in answer):
        values = [answer[name] for answer in answers if answer.get(name) is not None]
        if not values:
            merged[name] = None
        elif name in BY_NAME and isinstance(values[0], Mapping):
            keys = dict.fromkeys(key for value in values for key in value)
            merged[name] = {k: _counts([v[k] for v in values if k in v]) for k in sorted(keys)}
        elif name in NESTED and isinstance(values[0], Mapping):
            merged[name] = _counts(values)
        elif isinstance(values[0], (list, tuple)):
            merged[name] = values[0]
        elif name in ADDED:
            merged[name] = sum(values)
        elif name in MOST:
            merged[name] = max(values)
        elif name in LEAST:
            merged[name] = min(values)
        else:
            merged[name] = values[0]
    return merged


def _as_home(answers: Sequence[Raw], options: Raw) -> Raw:
    """Merge settings. The first answer is the home's, which alone knows whether it created them."""
    merged = _counts(answers)
    return merged | {"created": answers[0]["created"]} if "created" in merged else merged


def _first(answers: Sequence[Any], options: Raw) -> Any:
    return answers[0]


def _load(answers: Sequence[Raw], options: Raw) -> Raw:
    columns = zip(*(answer["counts"] for answer in answers), strict=True)
    return {**_counts(answers), "counts": tuple(map(sum, columns))}


def _backup(answers: Sequence[Raw], options: Raw) -> Raw:
    return {**_counts(answers), "path": ", ".join(answer["path"] for answer in answers)}


def _outcomes(answers: Sequence[tuple[Any, ...]], options: Raw) -> tuple[Any, ...]:
    """Merge the outcomes for a key's tasks, without shards that have no such task."""
    outcomes = sorted((row for answer in answers for row in answer), key=lambda row: row[0] or 0)
    done = [row for row in outcomes if row[0] is not None and row[1] not in NOTHING]
    if done:
        return tuple(done)
    ended = [row for row in outcomes if row[0] is not None]
    return tuple(ended[-1:] or outcomes[:1])


NOTHING = frozenset((
    "unknown", "not_held", "acked", "already_cancelled", "expired", "deleted", "gone",
))  # fmt: skip
"""Outcomes of a shard that has no unfinished task with the key."""


def _look_up(answers: Sequence[tuple[Any, ...]], options: Raw) -> tuple[Any, ...]:
    """Merge the tasks with a key: the unfinished tasks of all shards, the newest first, or else the
    newest finished task."""
    tasks = sorted((task for answer in answers for task in answer), key=lambda task: -task["id"])
    live = [task for task in tasks if task.get("topic") is not None]
    return tuple((live[:1] if options.get("newest") else live) or tasks[:1])


ENDED = frozenset(("acked", "filtered", "expired", "cancelled", "deleted"))
NOWHERE = frozenset(("gone", "not_found"))
"""Causes of a task that has ended, and of an unknown task."""


def explanation_of(task_id: int | None, ends: Mapping[int, Any]) -> Raw:
    """Return the explanation of the shard that has the task; of several tasks with a key, that of
    the newest. ``ends`` maps each shard to its answer, or to the error of an unreachable shard."""
    answers = [end for end in ends.values() if not isinstance(end, BaseException)]
    known = [answer for answer in answers if answer["cause"] not in NOWHERE]
    away = {shard: end for shard, end in ends.items() if isinstance(end, BaseException)}
    is_unfinished = any(answer["cause"] not in ENDED for answer in known)
    if away and not is_unfinished and (task_id is None or not known):
        names = ", ".join(map(str, away))
        noun = "shard" if len(away) == 1 else "shards"
        why = str(next(iter(away.values())))
        unknown: Raw = {
            "id": task_id, "topic": None, "cause": "shard_away",
            "detail": f"The task may be in {noun} {names}, which cannot be reached: {why}.",
            "command": "tickwheel shards", "group": None, "behind": None, "next_ms": None,
            "others": (), "others_left_out": 0,
        }  # fmt: skip
        return unknown
    return max(
        answers,
        key=lambda answer: (
            answer["cause"] not in NOWHERE, answer["cause"] not in ENDED, answer["cause"] == "gone",
            answer["id"] or 0,
        ),
    )  # fmt: skip


def _grouped(parts: Iterable[Sequence[Raw]], *names: str) -> dict[Any, list[Raw]]:
    """Group the items of all lists by these fields."""
    groups: dict[Any, list[Raw]] = {}
    key = itemgetter(*names)
    for item in chain.from_iterable(parts):
        groups.setdefault(key(item), []).append(item)
    return groups


def _held_keys(answers: Sequence[Raw], options: Raw) -> Raw:
    limit = options.get("limit", 100)
    keys = sorted((k for a in answers for k in a["keys"]), key=lambda held: held["since_ms"])
    paused = _grouped((answer["paused"] for answer in answers), "kind", "value")
    pauses = [{**_counts(rows), "since_ms": min(row["since_ms"] for row in rows)}
              for rows in paused.values()]  # fmt: skip
    pauses.sort(key=lambda row: row["since_ms"])
    return {**_counts(answers), "keys": keys[:limit], "paused": pauses[:limit]}


def _key_lines(answers: Sequence[Raw], options: Raw) -> Raw:
    lines = _grouped((answer["lines"] for answer in answers), "kind", "value")
    merged = sorted(map(_counts, lines.values()), key=lambda line: -line["waiting"])
    return {**_counts(answers), "lines": merged[: options.get("limit", 100)]}


def _key_pause(answers: Sequence[Raw], options: Raw) -> Raw:
    paused, changed = (any(a[name] for a in answers) for name in ("paused", "changed"))
    since_ms = min((a["since_ms"] for a in answers if a.get("since_ms")), default=None)
    return {**_counts(answers), "paused": paused, "changed": changed, "since_ms": since_ms}


def _bulk(answers: Sequence[Raw], options: Raw) -> Raw:
    """Merge the parts of a bulk operation: it runs if a part runs, else has failed if a part
    has."""
    states = [answer["state"] for answer in answers]
    refused = sum((Counter(answer["refused"]) for answer in answers), Counter[str]())
    state = next(s for s in ("running", "failed", "cancelled", "done") if s in states)
    notes = "; ".join(answer["note"] for answer in answers if answer["note"])
    merged = {**_counts(answers), "state": state, "refused": dict(refused), "note": notes}
    return {**merged, "ended_ms": None} if state == "running" else merged


TARGET_STATES = ("ended", "open", "failing", "starting", "stopped", "sending")
"""States of a target; of its states in all shards the first in this list is reported."""


def _targets(answers: Sequence[Raw], options: Raw) -> Raw:
    groups = _grouped((answer["targets"] for answer in answers), "topic", "group")

    def rank(target: Raw) -> int:
        state = target["state"]
        return TARGET_STATES.index(state) if state in TARGET_STATES else 0

    ranked = (sorted(groups[names], key=rank) for names in sorted(groups))
    return {**answers[0], "targets": [_counts(rows) for rows in ranked]}


TROUBLES_MAX = 20
"""Maximum troubles of an overview, as of a single daemon."""
LEVELS = ("error", "warning", "note")
OF_EACH = frozenset(("oldest_ready_ms", "topics", "groups", "subscribers", "bulk"))
"""Counts of an overview for objects that can be in every shard: the maximum is exact, or close."""


def _overview(answers: Sequence[Raw], options: Raw) -> Raw:
    """Merge overviews, with the troubles of all shards."""
    worst = next((answer for answer in answers if answer["state"] != "ready"), answers[0])
    rings = [answer["ring"] for answer in answers]
    ring = {
        **rings[0],
        **{name: [*map(sum, zip(*(r[name] for r in rings), strict=True))]
           for name in ("this", "next")},
        "exact": all(r["exact"] for r in rings), "later": sum(r["later"] for r in rings),
    }  # fmt: skip
    counts, totals, lateness = (
        {name: (max if name in maxima else sum)(answer[part][name] for answer in answers)
         for name in answers[0][part]}
        for part, maxima in (
            ("counts", OF_EACH), ("totals", ()),
            ("lateness", [n for n in answers[0]["lateness"] if not n.endswith("count")]),
        )
    )  # fmt: skip
    troubles = [
        {**trouble, "text": f"Shard {shard}: {trouble['text']}"}
        for shard, answer in enumerate(answers)
        for trouble in answer["troubles"]
    ]
    troubles.sort(key=lambda trouble: LEVELS.index(trouble["level"]))
    left_out = sum(answer["troubles_left_out"] for answer in answers)
    return {
        **worst, "ring": ring, "counts": counts, "totals": totals, "lateness": lateness,
        "uptime_s": min(answer["uptime_s"] for answer in answers),
        "troubles": troubles[:TROUBLES_MAX],
        "troubles_left_out": left_out + max(0, len(troubles) - TROUBLES_MAX),
    }  # fmt: skip


def _lag(answers: Sequence[Raw], options: Raw) -> Raw:
    """Add samples of all shards that were taken at about the same time, aligned at the newest."""
    longest = max(answers, key=lambda answer: len(answer["taken_ms"]))
    samples: dict[str, list[int | None]] = {"ready": [], "oldest_ready_ms": []}
    for index in range(-len(longest["taken_ms"]), 0):
        for name, add in (("ready", sum), ("oldest_ready_ms", max)):
            values = [answer[name][index] for answer in answers if -index <= len(answer[name])]
            numbers = [value for value in values if value is not None]
            samples[name].append(add(numbers) if numbers else None)
    return {**longest, **samples}


def _events(answers: Sequence[Raw], options: Raw) -> Raw:
    """Merge the events of a task; shards of the same machine all return the same."""
    events = {encode(event): event for answer in answers for event in answer["events"]}
    return _history(answers, "events", sorted(events.values(), key=itemgetter("time_ms")))


def _outlines(answers: Sequence[Raw], options: Raw) -> Raw:
    """Merge tasks of the history, the newest first, preferring a shard that knows the task's
    end."""
    by_id: dict[int, Raw] = {}
    for task in (task for answer in answers for task in answer["tasks"]):
        other = by_id.get(task["id"])
        if other is None or other["ended_ms"] is None:
            by_id[task["id"]] = task
    tasks = sorted(by_id.values(), key=lambda task: -task["id"])
    limit = options.get("limit", 100)
    merged = _history(answers, "tasks", tasks[:limit])
    return merged if len(tasks) <= limit else {**merged, "complete": False}


def _history(answers: Sequence[Raw], name: str, rows: Sequence[Raw]) -> dict[str, Any]:
    is_kept = any(answer["is_kept"] for answer in answers)
    return {
        name: rows,
        "is_kept": is_kept,
        "complete": all(answer["complete"] for answer in answers),
    }


def numbered(answer: Raw, shard: int, count: int) -> Raw:
    """Return a log with request numbers that include the shard, of ``count`` shards."""
    requests = [{**request, "number": request["number"] and request["number"] * count + shard}
                for request in answer["requests"]]  # fmt: skip
    return {**answer, "requests": requests}


def _push_log(answers: Sequence[Raw], options: Raw) -> Raw:
    requests = sorted(
        (r for a in answers for r in a["requests"]), key=lambda request: -request["at_ms"]
    )
    return {**answers[0], "requests": requests[: options.get("limit", 50)]}


# --- restores ------------------------------------------------------------------------------------

RESTORE_STATES = ("running", "failed", "refused", "cancelled", "done")
"""States of a restore; of its states in all shards the first in this list is that of the whole."""
NAMED_MAX = 100
"""Maximum tasks and names of a kind in a report, as of a single daemon."""
OF_ALL = frozenset(("exact", "clean_stop", "reaches_back", "history"))
"""Fields of a restore's report that are true if they are true in each shard."""
EARLIEST = frozenset(("backup_ms", "first_event_ms"))
LATEST = frozenset(("last_event_ms", "tail_ms", "groups", "targets_lost"))
"""Fields with the maximum over all shards; a group, with its target, is in every shard."""
NOTES = ("gaps", "branches")
"""Fields with sentences on why a restore is not exact."""
OF_A_STORE = ("shard", "epoch", "id_mark")
"""Fields about the new store of a single shard."""


def _restore(parts: Sequence[Raw | None], options: Raw) -> Raw:
    """Merge the parts of a restore; a part is None for a shard without a restore of this id."""
    by_shard = {shard: part for shard, part in enumerate(parts) if part is not None}
    known = [*by_shard.values()]
    errors = [
        (part["error"]["code"], f"shard {shard}: {part['error']['message']}")
        for shard, part in by_shard.items()
        if part["error"]
    ]
    states = {part["state"] for part in known}
    lost = max(part["of_shards"] for part in known) - len(known)
    if lost > 0:
        states.add("failed")
        without = [str(shard) for shard, part in enumerate(parts) if part is None]
        some_of = f"{lost} of " if lost < len(without) else ""
        why = f"{some_of}shards {', '.join(without)}: no restore of this id, or forgotten"
        errors.append(("not_found", why))
    state = next(name for name in RESTORE_STATES if name in states)
    is_over = state != "running"
    reports = {shard: part["report"] for shard, part in by_shard.items() if part["report"]}
    backups = [part["backup"] for part in known if part["backup"] is not None]
    names = ("state", "into", "backup", "ended_ms", "progress", "report", "error")
    return {
        **known[0],
        "state": state,
        "into": ", ".join(part["into"] for part in known),
        "backup": ", ".join(backups) or None,
        "began_ms": min(part["began_ms"] for part in known),
        "ended_ms": max(part["ended_ms"] for part in known) if is_over else None,
        "progress": _progress(known),
        "report": _reports(reports) if is_over and reports else None,
        "error": {"code": errors[0][0], "message": "; ".join(e[1] for e in errors)}
        if is_over and errors else None,
        "shards": [
            {"shard": shard, **{name: part[name] for name in names}}
            for shard, part in by_shard.items()
        ],
    }  # fmt: skip


def _progress(parts: Sequence[Raw]) -> Raw:
    """Merge the progress of a restore: add that of the shards at the earliest step."""
    working = [part["progress"] for part in parts if part["state"] == "running"]
    progress = working or [part["progress"] for part in parts]
    step = min((part["step"] for part in progress), key=RESTORE_STEPS.index)
    current = [part for part in progress if part["step"] == step]
    totals = [part["total"] for part in current]
    total = None if None in totals else sum(totals)
    return {"step": step, "done": sum(part["done"] for part in current), "total": total}


def _reports(reports: Mapping[int, Raw]) -> Raw:
    """Merge reports of some shards: counts are added, and notes name their shard."""
    merged: dict[str, Any] = {}
    for name in next(iter(reports.values())):
        values = [report[name] for report in reports.values() if report[name] is not None]
        if name in OF_A_STORE:
            continue
        if not values:
            merged[name] = None
        elif name in NOTES:
            notes = ((n, note) for n, report in reports.items() for note in report[name])
            merged[name] = [f"shard {n}: {note}" for n, note in notes]
        elif name == "backup":
            merged[name] = ", ".join(values)
        elif isinstance(values[0], Mapping):  # the number, and the first ids or names
            (key,) = values[0].keys() - {"count"}
            listed = [*dict.fromkeys(chain.from_iterable(value[key] for value in values))]
            count = (max if name in LATEST else sum)(value["count"] for value in values)
            merged[name] = {"count": max(count, len(listed)), key: listed[:NAMED_MAX]}
        elif isinstance(values[0], bool):
            merged[name] = (all if name in OF_ALL else any)(values)
        else:
            add = min if name in EARLIEST else max if name in LATEST else sum
            merged[name] = add(values)
    return merged


def _restores(answers: Sequence[Raw], options: Raw) -> Raw:
    """Merge all restores, the newest first, each from its parts in all shards."""
    by_id: dict[int, list[Raw | None]] = {}
    for shard, answer in enumerate(answers):
        for restore in answer["restores"]:
            by_id.setdefault(restore["id"], [None] * len(answers))[shard] = restore
    restores = [_restore(parts, options) for parts in by_id.values()]
    return {"restores": sorted(restores, key=lambda restore: -restore["began_ms"])}


# --- status --------------------------------------------------------------------------------------

STATES = (
    "store_trouble", "rows_missing", "store_full", "clock_held", "draining", "recovering",
    "standby", UNKNOWN, "loading", "ready",
)  # fmt: skip
"""States of daemons that answer, the worst first."""


def status_of(ends: Sequence[Raw | TickwheelError], urls: Sequence[str]) -> Raw:
    """Merge the statuses of all shards, of which at least one has answered."""
    answers = [end for end in ends if not isinstance(end, TickwheelError)]
    worst = min(answers, key=lambda a: STATES.index(a["state"]) if a["state"] in STATES else 0)
    shards: list[dict[str, Any]] = []
    for shard, (end, url) in enumerate(zip(ends, urls, strict=True)):
        status = {"shard": shard, "url": url, "reachable": not isinstance(end, TickwheelError)}
        if isinstance(end, TickwheelError):
            status |= {"state": UNREACHABLE, "error": end.code, "message": end.message}
        else:
            status = {**end, **status}
        shards.append(status)
    troubles = [_trouble(status) for status in shards if status["state"] != "ready"]

    def merged(name: str, add: Callable[[Any], Any]) -> Any:
        values = [answer[name] for answer in answers if answer.get(name) is not None]
        return add(values) if values else None

    standbys = [
        {**standby, "shard": answer["shard"]}
        for answer in answers
        for standby in answer["standbys"]
    ]
    return {
        **worst,
        "state": worst["state"] if len(answers) == len(ends) else UNREACHABLE,
        "detail": "; ".join(troubles) or None, "standbys": standbys,
        "store_ok": all(answer["store_ok"] for answer in answers),
        "uptime_s": min(answer["uptime_s"] for answer in answers),
        "loaded": merged("loaded", sum), "memory_bytes": merged("memory_bytes", sum),
        "disk_used": merged("disk_used", max), "disk_free_bytes": merged("disk_free_bytes", min),
        "statuses": shards,
    }  # fmt: skip


def _trouble(status: Raw) -> str:
    """Describe a shard that is not ready."""
    why = status.get("message") or status.get("detail")
    return f"shard {status['shard']}: {status['state']}" + (f" ({why})" if why else "")


MERGED: Mapping[str, Callable[[Sequence[Any], Raw], Any]] = {
    **dict.fromkeys(("stats", "delete_group", "preview_reset", "set_push", "set_forward"), _counts),
    **dict.fromkeys(("configure", "create_group"), _as_home),
    "delete_topic": lambda answers, options: {
        **_counts(answers), "groups": max(answer["groups"] for answer in answers)
    },
    **dict.fromkeys(("cancel", "reschedule", "spread", "run_now"), _outcomes),
    **dict.fromkeys(("release_key", "skip_key"), _outcomes),
    **dict.fromkeys(("make_bulk", "show_bulk", "cancel_bulk", "reset_group"), _bulk),
    "look_up": _look_up, "load": _load, "held_keys": _held_keys, "key_lines": _key_lines,
    "pause_key": _key_pause, "resume_key": _key_pause, "remove_target": _first,
    "targets": _targets, "push_log": _push_log, "backup": _backup, "show_topic": _counts,
    "list_restores": _restores, **dict.fromkeys(("show_restore", "cancel_restore"), _restore),
    "overview": _overview, "group_lag": _lag, "task_history": _events, "history_tasks": _outlines,
}  # fmt: skip
"""Name of a verb asked at all shards → the rule that merges the answers, given the verb's
options."""
BY_SHARD = frozenset(("show_restore", "cancel_restore"))
"""Verbs in ``MERGED`` with a rule that gets an entry for each shard: None if it has no such
object."""


# --- lists ---------------------------------------------------------------------------------------

LISTS: Mapping[str, tuple[str, ...]] = {
    "list_tasks": ("id",), "peek": ("id",), "list_dead": ("id", "group"),
    "list_schedules": ("name",), "list_transactions": ("id",), "consumers": ("since_ms",),
    "list_bulk": ("made_ms",), "list_topics": ("topic",),
}  # fmt: skip
"""Name of a listing verb → the fields that sort its items. In a page merged from all shards, their
values in the last item are ``next``."""


def limit_of(verb: Verb, asked: Raw) -> int:
    limit: int = asked.get("limit", verb.request_type.field("limit").default)
    return limit


def page_of(verb: Verb, asked: Raw, answers: Sequence[Raw]) -> Raw:
    """Merge a page of all shards. It ends where the first page ends whose shard has more items:
    after that, the items of this shard are unknown."""
    reverse = bool(asked.get("newest"))
    by_position = _grouped((answer[verb.pages] for answer in answers), *LISTS[verb.name])
    ends = [answer["next"] for answer in answers if answer["next"] is not None]
    last = (max if reverse else min)(ends, default=None)
    positions = sorted(by_position, reverse=reverse)
    if last is not None:
        positions = [p for p in positions if (p >= last if reverse else p <= last)]
    limit = limit_of(verb, asked)
    if len(positions) > limit:
        positions = positions[:limit]
        last = positions[-1]
    is_in_all = verb.name == "list_topics"
    items = [_counts(by_position[p]) if is_in_all else by_position[p][0] for p in positions]
    return {**answers[0], verb.pages: items, "next": last}


async def in_order(
    verb: Verb, lists: Sequence[AsyncGenerator[Any, None]], *, reverse: bool
) -> AsyncGenerator[Any, None]:
    """Merge sorted lists, reading each only as far as needed."""
    nothing = object()
    key: Callable[[Any], Any] = attrgetter(*LISTS[verb.name])

    async def push(index: int) -> None:
        item = await anext(lists[index], nothing)
        if item is not nothing:
            rank = -key(item) if reverse else key(item)
            heapq.heappush(heads, (rank, index, item))

    heads: list[tuple[Any, int, Any]] = []
    try:
        raise_first(await asyncio.gather(*map(push, range(len(lists))), return_exceptions=True))
        while heads:
            _, index, item = heapq.heappop(heads)
            yield item
            await push(index)
    finally:
        for items in lists:
            await items.aclose()


async def once(items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Remove repeated ids from sorted items: after a change of the number of shards, all shards
    know the earlier decisions."""
    last_id = None
    async with aclosing(items):
        async for item in items:
            if item.id != last_id:
                yield item
            last_id = item.id


async def bulks_of(
    lists: Sequence[AsyncGenerator[Any, None]], state: str | None
) -> AsyncGenerator[Any, None]:
    """Yield bulk operations in this state (None: in any), the newest first, each merged from its
    parts in all shards."""
    parts: dict[str, list[Any]] = {}
    for items in lists:
        async for item in items:
            parts.setdefault(item.id, []).append(item)
    merged = [type(rows[0]).of(_bulk([row.raw for row in rows], {})) for rows in parts.values()]
    for item in sorted(merged, key=attrgetter("made_ms"), reverse=True):
        if state in (None, item.state):
            yield item
