"""The rules by which the answers of several shards become one.

Answers are as they came, in the form of the wire. Knows no connection and no client; an answer is
made of those of all shards that were asked, in the order of the shards.
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
from tickwheel.errors import TickwheelError
from tickwheel.protocol import encode

if TYPE_CHECKING:
    from tickwheel.api.verb import Verb

Raw = Mapping[str, Any]
"""An answer of a daemon, or a part of one, as it came."""
ABSENT = ("unknown", "not_held", "gone")
"""Words about a task that a shard does not have; the last one says most."""


def raise_first(ends: Iterable[Any]) -> None:
    """Raise the first of what a ``gather`` returned that is an exception."""
    for end in ends:
        if isinstance(end, BaseException):
            raise end


def says(answer: Any) -> int:
    """How much a shard's answer about one task says: least, that it does not know the task; most,
    nil, which stands for the usual word."""
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
    """The answer for each of several items, of which ``parts`` has the places by shard; ``ask``
    gets a shard and the places of its items, and answers for each. Where several shards are asked
    about an item, the answer counts that says most. Raises what any of them raises."""
    found: dict[int, Any] = {}

    async def ask_one(shard: int, places: Sequence[int]) -> None:
        for place, answer in zip(places, await ask(shard, places), strict=True):
            if place not in found or says(answer) > says(found[place]):
                found[place] = answer

    asking = (ask_one(*part) for part in parts.items())
    raise_first(await asyncio.gather(*asking, return_exceptions=True))
    return [found[place] for place in range(len(found))]


# --- one answer of all ---------------------------------------------------------------------------

ADDED = frozenset((
    "scheduled", "ready", "in_flight", "waiting", "dead", "delivered", "acked", "enqueued",
    "cancelled", "nacked", "snoozed", "deaths", "expired", "filtered", "retrying", "held",
    "paused_keys", "in_lines", "dead_total", "dead_expired", "dropped_once", "retried",
    "leases_over", "early", "kept", "replaced", "rejected", "schedules", "wheel_bytes",
    "resident_bytes", "batches", "connections", "sessions", "open", "parked", "half_tasks", "bytes",
    "count", "looked_at", "given", "sent", "failed", "tasks", "lost", "incomplete", "scheduled",
    "matched", "changed", "groups_held",
))  # fmt: skip
"""Numbers that are those of all shards together."""
MOST = frozenset((
    "oldest_ready_ms", "subscribers", "broadcasters", "since_ms", "p50_ms", "p99_ms", "max_ms",
    "topics_left_out", "partial", "created", "deleting", "last_ms", "until_ms", "ended_ms",
    "paused",
))  # fmt: skip
"""The largest of all shards. A subscriber of all is one of each; percentiles cannot be added."""
LEAST = frozenset((
    "store_ok", "share", "first_ms", "from_ms", "unused_ms", "exact", "made_ms", "paused_ms",
))  # fmt: skip
"""The smallest of all shards."""
NESTED = frozenset(("transactions", "lateness", "replay"))
"""Maps of such numbers."""
BY_NAME = frozenset(("topics", "groups"))
"""Maps of such maps, by what they are of, where they are maps."""


def _counts(answers: Sequence[Raw], options: Raw | None = None) -> dict[str, Any]:
    """Maps of counts and settings as one: what is no count is that of the first."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for answer in answers for name in answer):
        values = [answer[name] for answer in answers if answer.get(name) is not None]
        if not values:
            found[name] = None
        elif name in BY_NAME and isinstance(values[0], Mapping):
            keys = dict.fromkeys(key for value in values for key in value)
            found[name] = {k: _counts([v[k] for v in values if k in v]) for k in sorted(keys)}
        elif name in NESTED and isinstance(values[0], Mapping):
            found[name] = _counts(values)
        elif isinstance(values[0], (list, tuple)):
            found[name] = values[0]
        elif name in ADDED:
            found[name] = sum(values)
        elif name in MOST:
            found[name] = max(values)
        elif name in LEAST:
            found[name] = min(values)
        else:
            found[name] = values[0]
    return found


def _as_home(answers: Sequence[Raw], options: Raw) -> Raw:
    """Settings of which the first answer is that of the home, which alone knows who was first."""
    found = _counts(answers)
    return found | {"created": answers[0]["created"]} if "created" in found else found


def _first(answers: Sequence[Any], options: Raw) -> Any:
    return answers[0]


def _load(answers: Sequence[Raw], options: Raw) -> Raw:
    columns = zip(*(answer["counts"] for answer in answers), strict=True)
    return {**_counts(answers), "counts": tuple(map(sum, columns))}


def _backup(answers: Sequence[Raw], options: Raw) -> Raw:
    return {**_counts(answers), "path": ", ".join(answer["path"] for answer in answers)}


def _outcomes(answers: Sequence[tuple[Any, ...]], options: Raw) -> tuple[Any, ...]:
    """What became of the tasks with a key: the words of all shards but those that know none."""
    every = sorted((outcome for answer in answers for outcome in answer), key=lambda it: it[0] or 0)
    done = [one for one in every if one[0] is not None and one[1] not in NOTHING]
    if done:
        return tuple(done)
    ended = [one for one in every if one[0] is not None]
    return tuple(ended[-1:] or every[:1])


NOTHING = frozenset((
    "unknown", "not_held", "acked", "already_cancelled", "expired", "deleted", "gone",
))  # fmt: skip
"""Words of a shard that has no unfinished task with the key."""


def _found(answers: Sequence[tuple[Any, ...]], options: Raw) -> tuple[Any, ...]:
    """The tasks with a key: the unfinished ones of all shards, the newest first, else the newest of
    those that have ended."""
    every = sorted((task for answer in answers for task in answer), key=lambda it: -it["id"])
    live = [task for task in every if task.get("topic") is not None]
    return tuple((live[:1] if options.get("newest") else live) or every[:1])


ENDED = frozenset(("acked", "filtered", "expired", "cancelled", "deleted"))
NOWHERE = frozenset(("gone", "not_found"))
"""Causes of a task that has ended, and of one of which nothing is known."""


def explanation_of(task_id: int | None, ends: Mapping[int, Any]) -> Raw:
    """The explanation of the shard that has the task, of those that may have it: of several tasks
    with a key that of the newest. ``ends``: shard → its answer, or the error of one that is
    away."""
    answers = [end for end in ends.values() if not isinstance(end, BaseException)]
    known = [one for one in answers if one["cause"] not in NOWHERE]
    away = {shard: end for shard, end in ends.items() if isinstance(end, BaseException)}
    is_found = any(one["cause"] not in ENDED for one in known)
    if away and not is_found and (task_id is None or not known):
        names = ", ".join(map(str, away))
        what = "shard" if len(away) == 1 else "shards"
        why = str(next(iter(away.values())))
        found: Raw = {
            "id": task_id, "topic": None, "cause": "shard_away",
            "detail": f"It may be in {what} {names}, which cannot be reached: {why}.",
            "command": "tickwheel shards", "group": None, "behind": None, "next_ms": None,
            "others": (), "others_left_out": 0,
        }  # fmt: skip
        return found
    return max(
        answers,
        key=lambda one: (
            one["cause"] not in NOWHERE, one["cause"] not in ENDED, one["cause"] == "gone",
            one["id"] or 0,
        ),
    )  # fmt: skip


def _grouped(parts: Iterable[Sequence[Raw]], *names: str) -> dict[Any, list[Raw]]:
    """The items of all lists, by these fields of them."""
    found: dict[Any, list[Raw]] = {}
    place = itemgetter(*names)
    for item in chain.from_iterable(parts):
        found.setdefault(place(item), []).append(item)
    return found


def _held_keys(answers: Sequence[Raw], options: Raw) -> Raw:
    limit = options.get("limit", 100)
    keys = sorted((k for a in answers for k in a["keys"]), key=lambda it: it["since_ms"])
    paused = _grouped((answer["paused"] for answer in answers), "kind", "value")
    each = [{**_counts(some), "since_ms": min(one["since_ms"] for one in some)}
            for some in paused.values()]  # fmt: skip
    each.sort(key=lambda it: it["since_ms"])
    return {**_counts(answers), "keys": keys[:limit], "paused": each[:limit]}


def _key_lines(answers: Sequence[Raw], options: Raw) -> Raw:
    lines = _grouped((answer["lines"] for answer in answers), "kind", "value")
    found = sorted(map(_counts, lines.values()), key=lambda it: -it["waiting"])
    return {**_counts(answers), "lines": found[: options.get("limit", 100)]}


def _key_pause(answers: Sequence[Raw], options: Raw) -> Raw:
    paused, changed = (any(a[name] for a in answers) for name in ("paused", "changed"))
    since_ms = min((a["since_ms"] for a in answers if a.get("since_ms")), default=None)
    return {**_counts(answers), "paused": paused, "changed": changed, "since_ms": since_ms}


def _bulk(answers: Sequence[Raw], options: Raw) -> Raw:
    """A bulk operation made of its parts: it runs while one does, and has failed where one has."""
    states = [answer["state"] for answer in answers]
    refused = sum((Counter(answer["refused"]) for answer in answers), Counter[str]())
    state = next(s for s in ("running", "failed", "cancelled", "done") if s in states)
    notes = "; ".join(answer["note"] for answer in answers if answer["note"])
    found = {**_counts(answers), "state": state, "refused": dict(refused), "note": notes}
    return {**found, "ended_ms": None} if state == "running" else found


TARGET_STATES = ("ended", "open", "failing", "starting", "stopped", "sending")
"""States of a target: the first one that it has in any shard is shown."""


def _targets(answers: Sequence[Raw], options: Raw) -> Raw:
    found = _grouped((answer["targets"] for answer in answers), "topic", "group")

    def rank(target: Raw) -> int:
        state = target["state"]
        return TARGET_STATES.index(state) if state in TARGET_STATES else 0

    ranked = (sorted(found[names], key=rank) for names in sorted(found))
    return {**answers[0], "targets": [_counts(some) for some in ranked]}


TROUBLES_MAX = 20
"""Troubles of an overview, as many as one daemon tells."""
LEVELS = ("error", "warning", "note")
OF_EACH = frozenset(("oldest_ready_ms", "topics", "groups", "subscribers", "bulk"))
"""Counts of an overview of what may be in every shard: the largest is that of all, or close."""


def _overview(answers: Sequence[Raw], options: Raw) -> Raw:
    """One wheel of all wheels, and what is wrong in each of them."""
    worst = next((one for one in answers if one["state"] != "ready"), answers[0])
    rings = [one["ring"] for one in answers]
    ring = {
        **rings[0],
        **{name: [*map(sum, zip(*(one[name] for one in rings), strict=True))]
           for name in ("this", "next")},
        "exact": all(one["exact"] for one in rings), "later": sum(one["later"] for one in rings),
    }  # fmt: skip
    counts, totals, lateness = (
        {name: (max if name in most else sum)(one[part][name] for one in answers)
         for name in answers[0][part]}
        for part, most in (
            ("counts", OF_EACH), ("totals", ()),
            ("lateness", [n for n in answers[0]["lateness"] if not n.endswith("count")]),
        )
    )  # fmt: skip
    troubles = [
        {**one, "text": f"Shard {shard}: {one['text']}"}
        for shard, answer in enumerate(answers)
        for one in answer["troubles"]
    ]
    troubles.sort(key=lambda one: LEVELS.index(one["level"]))
    left_out = sum(one["troubles_left_out"] for one in answers)
    return {
        **worst, "ring": ring, "counts": counts, "totals": totals, "lateness": lateness,
        "uptime_s": min(one["uptime_s"] for one in answers), "troubles": troubles[:TROUBLES_MAX],
        "troubles_left_out": left_out + max(0, len(troubles) - TROUBLES_MAX),
    }  # fmt: skip


def _lag(answers: Sequence[Raw], options: Raw) -> Raw:
    """Samples of all shards, each with those that were taken about when it was: they are counted
    from the newest."""
    longest = max(answers, key=lambda one: len(one["taken_ms"]))
    found: dict[str, list[int | None]] = {"ready": [], "oldest_ready_ms": []}
    for place in range(-len(longest["taken_ms"]), 0):
        for name, add in (("ready", sum), ("oldest_ready_ms", max)):
            of_all = [one[name][place] for one in answers if -place <= len(one[name])]
            known = [one for one in of_all if one is not None]
            found[name].append(add(known) if known else None)
    return {**longest, **found}


def _events(answers: Sequence[Raw], options: Raw) -> Raw:
    """The events of a task, of which shards of one machine have all the same."""
    found = {encode(event): event for answer in answers for event in answer["events"]}
    return _history(answers, "events", sorted(found.values(), key=itemgetter("time_ms")))


def _outlines(answers: Sequence[Raw], options: Raw) -> Raw:
    """Tasks of the history, the newest first, each as the shard has it that knows its end."""
    found: dict[int, Raw] = {}
    for task in (task for answer in answers for task in answer["tasks"]):
        known = found.get(task["id"])
        if known is None or known["ended_ms"] is None:
            found[task["id"]] = task
    tasks = sorted(found.values(), key=lambda it: -it["id"])
    limit = options.get("limit", 100)
    said = _history(answers, "tasks", tasks[:limit])
    return said if len(tasks) <= limit else {**said, "complete": False}


def _history(answers: Sequence[Raw], name: str, found: Sequence[Raw]) -> dict[str, Any]:
    is_kept = any(answer["is_kept"] for answer in answers)
    return {name: found, "is_kept": is_kept, "complete": all(one["complete"] for one in answers)}


def numbered(answer: Raw, shard: int, count: int) -> Raw:
    """A log whose requests have numbers that say which of ``count`` shards has sent them."""
    requests = [{**one, "number": one["number"] and one["number"] * count + shard}
                for one in answer["requests"]]  # fmt: skip
    return {**answer, "requests": requests}


def _push_log(answers: Sequence[Raw], options: Raw) -> Raw:
    every = sorted((r for a in answers for r in a["requests"]), key=lambda it: -it["at_ms"])
    return {**answers[0], "requests": every[: options.get("limit", 50)]}


# --- restores ------------------------------------------------------------------------------------

RESTORE_STATES = ("running", "failed", "refused", "cancelled", "done")
"""States of a restore: the first one that it has in any shard is that of the whole."""
NAMED_MAX = 100
"""Tasks and names of a kind that a report names, as many as one daemon does."""
OF_ALL = frozenset(("exact", "clean_stop", "reaches_back", "history"))
"""What is true of the report of a restore when it is true in each shard."""
EARLIEST = frozenset(("backup_ms", "first_event_ms"))
LATEST = frozenset(("last_event_ms", "tail_ms", "groups"))
"""A group is in every shard."""
NOTES = ("gaps", "branches")
"""Why a restore is not exact, in words."""
OF_A_STORE = ("shard", "epoch", "id_mark")
"""What a report says of the new store of one shard."""


def _restore(parts: Sequence[Raw | None], options: Raw) -> Raw:
    """A restore made of what each shard does, None for one that has none of this id."""
    found = {shard: part for shard, part in enumerate(parts) if part is not None}
    some = [*found.values()]
    errors = [
        (part["error"]["code"], f"shard {shard}: {part['error']['message']}")
        for shard, part in found.items()
        if part["error"]
    ]
    states = {part["state"] for part in some}
    lost = max(part["of_shards"] for part in some) - len(some)
    if lost > 0:
        states.add("failed")
        without = [str(shard) for shard, part in enumerate(parts) if part is None]
        some_of = f"{lost} of " if lost < len(without) else ""
        why = (
            f"{some_of}shards {', '.join(without)}: no restore of this id: not begun, or forgotten"
        )
        errors.append(("not_found", why))
    state = next(one for one in RESTORE_STATES if one in states)
    is_over = state != "running"
    reports = {shard: part["report"] for shard, part in found.items() if part["report"]}
    backups = [part["backup"] for part in some if part["backup"] is not None]
    names = ("state", "into", "backup", "ended_ms", "progress", "report", "error")
    return {
        **some[0],
        "state": state,
        "into": ", ".join(part["into"] for part in some),
        "backup": ", ".join(backups) or None,
        "began_ms": min(part["began_ms"] for part in some),
        "ended_ms": max(part["ended_ms"] for part in some) if is_over else None,
        "progress": _progress(some),
        "report": _reports(reports) if is_over and reports else None,
        "error": {"code": errors[0][0], "message": "; ".join(e[1] for e in errors)}
        if is_over and errors else None,
        "shards": [
            {"shard": shard, **{name: part[name] for name in names}}
            for shard, part in found.items()
        ],
    }  # fmt: skip


def _progress(parts: Sequence[Raw]) -> Raw:
    """How far a restore is: the first step that a shard is at, and the sums of those at it."""
    working = [part["progress"] for part in parts if part["state"] == "running"]
    every = working or [part["progress"] for part in parts]
    step = min((one["step"] for one in every), key=RESTORE_STEPS.index)
    at_it = [one for one in every if one["step"] == step]
    totals = [one["total"] for one in at_it]
    total = None if None in totals else sum(totals)
    return {"step": step, "done": sum(one["done"] for one in at_it), "total": total}


def _reports(reports: Mapping[int, Raw]) -> Raw:
    """One report of those of some shards: counts are added, notes say their shard."""
    every = [*reports.values()]
    found: dict[str, Any] = {}
    for name in every[0]:
        values = [report[name] for report in every if report[name] is not None]
        if name in OF_A_STORE:
            continue
        if not values:
            found[name] = None
        elif name in NOTES:
            found[name] = [f"shard {n}: {note}" for n, one in reports.items() for note in one[name]]
        elif name == "backup":
            found[name] = ", ".join(values)
        elif isinstance(values[0], Mapping):  # how many, and ids or names of the first ones
            found[name] = {
                key: sum(one[key] for one in values) if key == "count"
                else [*chain.from_iterable(one[key] for one in values)][:NAMED_MAX]
                for key in values[0]
            }  # fmt: skip
        elif isinstance(values[0], bool):
            found[name] = (all if name in OF_ALL else any)(values)
        else:
            add = min if name in EARLIEST else max if name in LATEST else sum
            found[name] = add(values)
    return found


def _restores(answers: Sequence[Raw], options: Raw) -> Raw:
    """All restores, the newest first, each made of its parts in all shards."""
    found: dict[int, list[Raw | None]] = {}
    for shard, answer in enumerate(answers):
        for one in answer["restores"]:
            found.setdefault(one["id"], [None] * len(answers))[shard] = one
    every = [_restore(parts, options) for parts in found.values()]
    return {"restores": sorted(every, key=lambda one: -one["began_ms"])}


# --- status --------------------------------------------------------------------------------------

STATES = (
    "store_trouble", "rows_missing", "store_full", "clock_held", "draining", "recovering",
    "standby", UNKNOWN, "loading", "ready",
)  # fmt: skip
"""States of daemons that answer, the worst first."""


def status_of(ends: Sequence[Raw | TickwheelError], urls: Sequence[str]) -> Raw:
    """One status of those of all shards, of which one at least has answered."""
    answers = [end for end in ends if not isinstance(end, TickwheelError)]
    worst = min(
        answers, key=lambda one: STATES.index(one["state"]) if one["state"] in STATES else 0
    )
    each: list[dict[str, Any]] = []
    for shard, (end, url) in enumerate(zip(ends, urls, strict=True)):
        said = {"shard": shard, "url": url, "reachable": not isinstance(end, TickwheelError)}
        if isinstance(end, TickwheelError):
            said |= {"state": UNREACHABLE, "error": end.code, "message": end.message}
        else:
            said = {**end, **said}
        each.append(said)
    troubles = [_trouble(one) for one in each if one["state"] != "ready"]

    def of_all(name: str, add: Callable[[Any], Any]) -> Any:
        values = [one[name] for one in answers if one.get(name) is not None]
        return add(values) if values else None

    standbys = [
        {**one, "shard": answer["shard"]} for answer in answers for one in answer["standbys"]
    ]
    return {
        **worst,
        "state": worst["state"] if len(answers) == len(ends) else UNREACHABLE,
        "detail": "; ".join(troubles) or None, "standbys": standbys,
        "store_ok": all(one["store_ok"] for one in answers),
        "uptime_s": min(one["uptime_s"] for one in answers),
        "loaded": of_all("loaded", sum), "memory_bytes": of_all("memory_bytes", sum),
        "disk_used": of_all("disk_used", max), "disk_free_bytes": of_all("disk_free_bytes", min),
        "statuses": each,
    }  # fmt: skip


def _trouble(one: Raw) -> str:
    """What there is to say of a shard that is not ready."""
    why = one.get("message") or one.get("detail")
    return f"shard {one['shard']}: {one['state']}" + (f" ({why})" if why else "")


MERGED: Mapping[str, Callable[[Sequence[Any], Raw], Any]] = {
    **dict.fromkeys(("stats", "delete_group", "preview_reset", "set_push", "set_forward"), _counts),
    **dict.fromkeys(("configure", "create_group"), _as_home),
    "delete_topic": lambda answers, options: {
        **_counts(answers), "groups": max(answer["groups"] for answer in answers)
    },
    **dict.fromkeys(("cancel", "reschedule", "spread", "run_now"), _outcomes),
    **dict.fromkeys(("release_key", "skip_key"), _outcomes),
    **dict.fromkeys(("make_bulk", "show_bulk", "cancel_bulk", "reset_group"), _bulk),
    "look_up": _found, "load": _load, "held_keys": _held_keys, "key_lines": _key_lines,
    "pause_key": _key_pause, "resume_key": _key_pause, "remove_target": _first,
    "targets": _targets, "push_log": _push_log, "backup": _backup, "show_topic": _counts,
    "list_restores": _restores, **dict.fromkeys(("show_restore", "cancel_restore"), _restore),
    "overview": _overview, "group_lag": _lag, "task_history": _events, "history_tasks": _outlines,
}  # fmt: skip
"""Name of a verb that all shards are asked → how their answers become one, with the options that it
was asked with."""
BY_SHARD = frozenset(("show_restore", "cancel_restore"))
"""Those of them whose rule is given something of each shard: None, where it has not found it."""


# --- lists ---------------------------------------------------------------------------------------

LISTS: Mapping[str, tuple[str, ...]] = {
    "list_tasks": ("id",), "peek": ("id",), "list_dead": ("id", "group"),
    "list_schedules": ("name",), "list_transactions": ("id",), "consumers": ("since_ms",),
    "list_bulk": ("made_ms",), "list_topics": ("topic",),
}  # fmt: skip
"""Name of a verb that lists → what its items are sorted by; also their place, in the form of
``next``, where a page is made of pages of all shards."""


def limit_of(verb: Verb, asked: Raw) -> int:
    found: int = asked.get("limit", verb.asked.field("limit").default)
    return found


def page_of(verb: Verb, asked: Raw, answers: Sequence[Raw]) -> Raw:
    """One page of the pages of all shards. It ends where the first of them ends that has more: what
    lies behind that place is not known of all."""
    reverse = bool(asked.get("newest"))
    found = _grouped((answer[verb.pages] for answer in answers), *LISTS[verb.name])
    ends = [answer["next"] for answer in answers if answer["next"] is not None]
    last = (max if reverse else min)(ends, default=None)
    places = sorted(found, reverse=reverse)
    if last is not None:
        places = [one for one in places if (one >= last if reverse else one <= last)]
    limit = limit_of(verb, asked)
    if len(places) > limit:
        places = places[:limit]
        last = places[-1]
    is_in_all = verb.name == "list_topics"
    items = [_counts(found[one]) if is_in_all else found[one][0] for one in places]
    return {**answers[0], verb.pages: items, "next": last}


async def in_order(
    verb: Verb, lists: Sequence[AsyncGenerator[Any, None]], *, reverse: bool
) -> AsyncGenerator[Any, None]:
    """The items of sorted lists, sorted; each list is read as far as it has to be."""
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
        for one in lists:
            await one.aclose()


async def once(items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Sorted items, each id once: all shards know what was decided before their number changed."""
    last_id = None
    async with aclosing(items):
        async for item in items:
            if item.id != last_id:
                yield item
            last_id = item.id


async def bulks_of(lists: Sequence[AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
    """Bulk operations, the newest first, each made of its parts in all shards."""
    parts: dict[str, list[Any]] = {}
    for one in lists:
        async for item in one:
            parts.setdefault(item.id, []).append(item)
    found = [type(some[0]).of(_bulk([one.raw for one in some], {})) for some in parts.values()]
    for item in sorted(found, key=attrgetter("made_ms"), reverse=True):
        yield item
