"""A daemon as a whole, and its store: ``serve``, ``init``, ``check``, ``status``, ``backup``; its
tokens; ``demo``, and ``bench``, how fast it is from here (`make bench` compares with others).

``status``, ``backup`` and ``bench`` ask running daemons. The others know the daemon's packages, and
import them when the command runs: operating a remote daemon needs only the extra ``cli``.

``token`` changes a file that the daemon reads; one that runs notices the change by itself.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

from tickwheel import disk
from tickwheel.cli.call import EXIT_FAILED, EXIT_UNREACHABLE, Call, confirmed, given, offline
from tickwheel.cli.options import YesOption, argument, duration, flag, option
from tickwheel.cli.output import (
    Grid,
    Listing,
    facts_grid,
    format_duration,
    format_time,
    iso_time,
    printable,
    trouble_lines,
)
from tickwheel.client import Status, statuses
from tickwheel.errors import (
    BadRequest,
    Conflict,
    ConnectionLost,
    SendTimeout,
    TickwheelError,
    Unreachable,
)
from tickwheel.limits import SHARDS_MAX
from tickwheel.log_writer import unblock_stderr

if TYPE_CHECKING:
    from tickwheel.demo.demonstration import Result
    from tickwheel.persistence.redis.opening import Found
    from tickwheel.server.reshard import Report
    from tickwheel.server.settings import Settings
    from tickwheel.server.tokens import Token

STORE_HELP = (
    "memory:, sqlite:///relative.db, sqlite:////absolute.db, redis://HOST:PORT/DB"
    ", redis+sentinel://HOST:PORT,…/DB?master=NAME, redis+cluster://HOST:PORT,…/."
    " Default: tickwheel.db here."
)
JSON_HERE = "JSON on stdout."

StoreOption = Annotated[str | None, option(STORE_HELP, "URL")]
ConfigOption = Annotated[str | None, option("Settings; environment and flags win.", "FILE.toml")]
VolatileOption = Annotated[bool, flag("Use a Redis that may lose what it holds.")]


class SettingsOptions(TypedDict, total=False):
    """The settings of a daemon that have an option of their own, by their names."""

    store: StoreOption
    listen: Annotated[
        str | None, option("Default: tcp://127.0.0.1:7355. Port 0: any free one.", "URL")
    ]
    processes: Annotated[
        str | None,
        option(
            "A daemon for each of so many shards, with --store sqlite:///DIR/; auto: for each"
            " processor. Default: 1.",
            "N|auto",
        ),
    ]
    http: Annotated[
        str | None,
        option("Serve the HTTP API, /healthz and /metrics there. Default: off.", "HOST:PORT"),
    ]
    http_all: Annotated[
        str | None,
        option(
            "With --processes and --http: health, metrics and addresses of all shards together,"
            " there. Default: off.",
            "HOST:PORT",
        ),
    ]
    node: Annotated[str | None, option("Its name in stats and logs. Default: the host's.", "NAME")]
    serve_token: Annotated[
        str | None, option("Who shows it may do all. Not --token: a client shows that.", "TOKEN")
    ]
    advertise: Annotated[
        str | None, option("Where others are told to find it. Default: where it listens.", "URL")
    ]
    leader_ttl_s: Annotated[
        float | None,
        option(
            "With Redis: so long after the active daemon's last word another takes over."
            " Default: 3.",
            "SECONDS",
            "--leader-ttl",
        ),
    ]
    allow_volatile_store: VolatileOption
    resident_bytes_max: Annotated[
        int | None,
        option(
            "Task bodies kept in memory. Default: 256 MiB, with Redis (all of them) 2 GiB.", "BYTES"
        ),
    ]
    accept_clock: Annotated[
        bool, flag("The clock is right, however long nobody served: fire what is due.")
    ]
    history_dir: Annotated[
        str | None, option("Write there what happens to every task. Default: no history.", "DIR")
    ]
    tokens_file: Annotated[
        str | None, option("Tokens with rights of their own: `tickwheel token`.", "FILE")
    ]
    tls_cert: Annotated[
        str | None, option("The certificate for tls:// and https:// (PEM).", "FILE")
    ]
    tls_key: Annotated[str | None, option("Its key. Default: in the same file.", "FILE")]
    tls_client_ca: Annotated[str | None, option("Who signs the certificates of clients.", "FILE")]
    push_allow: Annotated[
        list[str] | None,
        option("A private network where tasks may be sent; may be repeated.", "CIDR"),
    ]
    insecure: Annotated[
        bool, flag("Listen beyond this machine without tokens or without TLS all the same.")
    ]
    ready_file: Annotated[
        str | None, option("Written once it serves: its addresses, as JSON.", "FILE")
    ]
    log_format: Annotated[str | None, option("Default: console.", "console|json")]
    log_level: Annotated[str | None, option("Default: info.", "debug|info|warning|error")]


@offline(json_help=None)
def serve(
    call: Call,
    config: ConfigOption = None,
    set_: Annotated[list[str] | None, option("Any setting; may be repeated.", "NAME=VALUE")] = None,
    **options: Unpack[SettingsOptions],
) -> int:
    """Run a daemon until SIGTERM or Ctrl-C. Exit code 0 after a clean stop.

    Every setting can also stand in the TOML file (name = value) or in the environment
    (TICKWHEEL_NAME). Flags win over the environment, the environment over the file.
    """
    # TICKWHEEL_TOKEN of a shell was not meant as the daemon's, and is not looked at.
    if call.has_written_token:
        raise BadRequest("--token is what a client shows; the daemon's own is --serve-token")
    settings = _load_settings(config, {**_assignments(set_ or []), **options})
    _import_parts(settings)
    unblock_stderr()
    from tickwheel.persistence import shard_count, shard_folder

    if shard_count(settings.store) is not None:
        from tickwheel.server import nodes

        return nodes.run(settings)
    if settings.processes == 1 and shard_folder(settings.store) is None:
        from tickwheel.server.daemon import run

        return run(settings)
    from tickwheel.server import processes

    return processes.run(settings)


def _import_parts(settings: Settings) -> None:
    """Import what these settings need, so that a missing package is reported before the start."""
    if settings.http is not None:
        import tickwheel.server.http.app
        import tickwheel.server.metrics.exposition
    if settings.otlp_endpoint is not None:
        import tickwheel.server.metrics.otlp
    if settings.store.startswith("redis"):
        import tickwheel.persistence.redis.driver_redis

        if "driver=asyncio-redis" in settings.store:
            import tickwheel.persistence.redis.driver_asyncio_redis  # noqa: F401


def _assignments(texts: list[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise BadRequest(f"--set {text!r}: write NAME=VALUE")
        found[name] = value
    return found


def _load_settings(config: str | None, overrides: Mapping[str, Any]) -> Settings:
    """The settings of a daemon, whose ``file_mode`` holds from now on in this process."""
    from tickwheel.server import settings

    loaded = settings.load(config, dict(overrides))
    disk.withhold(loaded.file_mode)
    return loaded


@offline(JSON_HERE)
def demo(
    call: Call,
    seconds: Annotated[int, option("How long tasks come in.", min=5, max=600)] = 20,
    tasks: Annotated[
        int, option("How many, evenly over that time.", min=100, max=1_000_000)
    ] = 20_000,
    plain: Annotated[bool, flag("Lines instead of a live view.")] = False,
) -> int:
    """See it work: a daemon, 20,000 tasks, a kill -9 half way; nothing lost, nothing early.

    Needs no running daemon; everything is made in a temporary folder. Exit code 1 when a task
    was lost or early.
    """
    import tickwheel.server.daemon  # noqa: F401  # what is missing is said here, not by a child
    from tickwheel.demo.demonstration import run_demo

    return run_demo(seconds=seconds, tasks=tasks, plain=plain, json=call.out.as_json)


@offline(JSON_HERE)
def check(call: Call, store: StoreOption = None, config: ConfigOption = None) -> int:
    """Check a store that no daemon has open: every row read, counts against a full scan.

    Nothing is changed. Exit code 1 when something is wrong.
    """
    settings = _load_settings(config, given({"store": store}))
    from tickwheel.persistence import audit

    found = audit.check(settings.store)
    counts = {name: getattr(found, name) for name in ("tasks", "progress", "dead", "sessions")}
    problems = list(found.problems)
    if call.out.as_json:
        call.out.record({"store": settings.store, **counts, "problems": problems})
    else:
        call.out.grid(facts_grid(("rows", "found"), counts, f"Store {settings.store}", right=True))
        for problem in problems:
            call.out.line(f"WRONG: {problem}")
        call.out.line(f"{len(problems)} problems" if problems else "all rows agree")
    return EXIT_FAILED if problems else 0


# --- init ----------------------------------------------------------------------------------------


@offline(JSON_HERE)
def init(
    call: Call,
    store: StoreOption = None,
    force: Annotated[
        bool,
        flag(
            "Begin anew where a store was lost. Redis: also when there is data, which is removed"
            " for good."
        ),
    ] = False,
    branch: Annotated[
        bool,
        flag("Go on with a store that lacks what its history knows: an older copy, for example."),
    ] = False,
    yes: YesOption = False,
    allow_volatile_store: VolatileOption = False,
    processes: Annotated[
        str | None, option("How many shards a folder (sqlite:///DIR/) gets.", "N|auto")
    ] = None,
    config: ConfigOption = None,
) -> int:
    """Lay a store out without serving: a new SQLite file, a folder of several (--processes), or an
    empty shard in Redis.

    What is there already is refused, with exit code 1. A daemon does not start with a store
    that was lost or set back, as its history or the files beside it say; two options decide. With
    --force a store begins anew: a SQLite file that is missing, empty or was never used; a shard
    in Redis also when there is data: everything in it is removed, and no daemon that used it before
    can write to it any more. With --branch a store keeps what it has, and its next start begins a
    new branch. Never done while a daemon has the store.
    """
    if force and branch:
        raise BadRequest("--force begins anew and --branch goes on; name one of them")
    overrides = {"store": store, "allow_volatile_store": allow_volatile_store}
    settings = _load_settings(config, given({**overrides, "processes": processes}))
    from tickwheel.persistence import parse, shard_folder, with_setting, without_secrets

    if settings.processes != 1 or shard_folder(settings.store) is not None:
        from tickwheel.server import processes as folders

        if force or branch:
            raise BadRequest(
                "--force and --branch are of one shard: name its database, --store"
                " sqlite:///DIR/shard-1.db"
            )
        shards = folders.init(settings)
        _show_laid_out(call, settings.store, f"was laid out with {shards} shards", shards=shards)
        return 0
    url, kind = settings.store, parse(settings.store).kind
    if kind == "memory":
        raise BadRequest("store memory: is empty at every start; there is nothing to lay out")
    if kind == "sqlite":
        path = os.path.realpath(parse(url).path)
        if branch:
            from tickwheel.persistence.sqlite import database

            held = database.begin_branch(path)
            return _show_branch(call, url, f"{path}, which ends with epoch {held.last.epoch},")
        return _lay_out_sqlite(call, url, path, force=force)
    if settings.allow_volatile_store:
        url = with_setting(url, "allow_volatile_store", "1")
    if branch:
        from tickwheel.persistence.redis import opening, options_from

        asyncio.run(opening.begin_branch(options_from(url)))
        return _show_branch(call, url, without_secrets(url))
    return _lay_out_redis(call, url, force=force, yes=yes)


def _show_branch(call: Call, url: str, what: str) -> int:
    from tickwheel.persistence import without_secrets

    said = {"store": without_secrets(url), "created": False, "branch": True}
    call.out.result(said, f"{what} begins a new branch with its next start")
    return 0


def _lay_out_sqlite(call: Call, url: str, path: str, *, force: bool) -> int:
    from tickwheel.clock import sources
    from tickwheel.persistence import layout_around, open_url
    from tickwheel.persistence.identity import NEW
    from tickwheel.persistence.sqlite import database

    if force:
        database.begin_anew(path)
    elif os.path.exists(path):
        raise Conflict(f"{path} exists already")
    layout = layout_around(path)

    async def lay_out() -> None:
        store = open_url(url)
        epoch_min = max(1, layout.epoch if layout is not None else 0)
        await store.open(f"init/{secrets.token_hex(6)}", sources().wall_ms(), epoch_min=epoch_min)
        await store.close(clean=True)

    asyncio.run(lay_out())
    if layout is not None and layout.epoch:
        database.write_meta(path, {database.SINCE_EPOCH: layout.epoch})
    if force:
        database.write_meta(path, {database.BRANCH: NEW})
    _show_laid_out(call, url, "was laid out")
    return 0


def _lay_out_redis(call: Call, url: str, *, force: bool, yes: bool) -> int:
    from tickwheel.clock import sources
    from tickwheel.persistence.redis import opening, options_from

    options = options_from(url)
    found = asyncio.run(opening.look(options))
    if found.exists and not _may_remove(call, found, force=force, yes=yes):
        return EXIT_FAILED
    incarnation = asyncio.run(opening.lay_out(options, found, sources().wall_ms(), is_branch=force))
    what = "was laid out anew" if found.exists else "was laid out"
    removed = found.counts if found.exists else None
    _show_laid_out(
        call, found.store, what, shard=found.shard, incarnation=incarnation, removed=removed
    )
    return 0


def _may_remove(call: Call, found: Found, *, force: bool, yes: bool) -> bool:
    """Show what there is; whether the operator confirms that it is removed."""
    what = f"{found.shard} in {found.store} is {found.state}"
    if not force:
        raise Conflict(f"{what}. Exists already; --force removes it and lays it out anew")
    call.out.remark(what)
    if yes:
        return True
    question = "Remove all of it for good, and lay the shard out anew?"
    return confirmed(call, "all of it would be removed for good", question)


def _show_laid_out(call: Call, store: str, what: str, **more: object) -> None:
    shard = f"{more['shard']} in " if "shard" in more else ""
    call.out.result({"store": store, "created": True, **more}, f"{shard}{store} {what}")


# --- files ---------------------------------------------------------------------------------------


@offline(JSON_HERE)
def deploy_files(
    call: Call,
    directory: Annotated[str, argument("DIR", "Where to write them; made if need be.")],
    force: Annotated[bool, flag("Overwrite what is there.")] = False,
) -> None:
    """Write out the files that run and watch a daemon: systemd units, compose files and their
    Dockerfile, manifests for Kubernetes, rules for Prometheus and dashboards for Grafana.

    Nothing is written, with exit code 1, if one of them is there already.
    """
    from tickwheel import deployment

    folder, found = Path(directory), deployment.files()
    there = [name for name in found if (folder / name).exists()]
    if there and not force:
        raise Conflict(
            f"{folder} has {len(there)} of these files already, {there[0]} for example;"
            " --force overwrites them"
        )
    for name, said in found.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(said)
    fields = {"dir": str(folder), "files": sorted(found)}
    call.out.result(fields, f"{len(found)} files in {folder}; begin with {folder}/deploy/README.md")


# --- reshard -------------------------------------------------------------------------------------


@offline("The report as JSON.")
def reshard(
    call: Call,
    to: Annotated[
        int, option("How many shards there shall be.", "N", "--to", min=1, max=SHARDS_MAX)
    ],
    store: StoreOption = None,
    into: Annotated[
        str | None,
        option("The folder to be made of a single database.", "sqlite:///DIR/", "--into"),
    ] = None,
    dry_run: Annotated[bool, flag("Check everything and say what would move; write nothing.")] = (
        False
    ),
    config: ConfigOption = None,
) -> int:
    """Change the number of shards of a folder (--store sqlite:///DIR/), or make a folder of a
    single database (--store sqlite:///FILE.db --into sqlite:///DIR/), while no daemon serves.

    Ids stay as they are; what has a key goes to the shard of its key. The new databases are
    written beside those there are, verified, and count from one moment on; the others are kept,
    and opened no more. What cannot be moved exactly is refused before anything is changed. If
    it was cut off, run it again.
    """
    settings = _load_settings(config, given({"store": store}))
    from tickwheel.server import reshard as resharding

    plan = resharding.Plan(settings.store, to, into, dry_run)
    report = resharding.reshard(plan, int(time.time() * 1000))
    if call.out.as_json:
        call.out.record(report.fields())
    elif report.already:
        call.out.line(f"{report.into} has {to} shards already")
    else:
        _show_resharded(call, report)
    return 0


def _show_resharded(call: Call, report: Report) -> None:
    facts: dict[str, str | int] = {
        "shards before": report.from_shards,
        "tasks": report.tasks,
        "in another shard than before": report.moved,
        "with progress": report.progress,
        "dead letters": report.dead,
        "ended for a group that was not owed them": report.done,
    }
    for shard in report.shards:
        facts[f"tasks of shard {shard['shard']}"] = shard["tasks"]
    would = "would have" if report.dry_run else "has"
    title = f"{report.into} {would} {report.to} shards"
    call.out.grid(facts_grid(("what", "value"), facts, title))
    if report.kept:
        call.out.remark(f"kept, and opened no more: {', '.join(report.kept)}")


# --- status --------------------------------------------------------------------------------------

_MIRROR = {
    True: "yes: a Redis that came back empty or older gets everything again from memory",
    False: "no: one that came back a little older gets the newest batches again; one that came back"
    " empty stops the daemon, and `tickwheel restore` is needed",
}
"""What ``Status.mirror`` promises, for people."""
_STATUS_COLUMNS = ("address", "node", "role", "state", "epoch", "since", "store")


async def status(call: Call) -> int:
    """Every daemon of --url, the active one that a standby names, and all shards: role, state,
    since when.

    Exit code 0 when an active one is ready (or still loading), with several shards one of each;
    1 when none is, 3 when no address can be reached.
    """
    found = await statuses(call.url, token=call.token, name="tickwheel-cli")
    grid = Grid(_STATUS_COLUMNS, right=("epoch",))
    Listing(call.out, grid, status_row, status_fields).show(found.items())
    if not call.out.as_json:
        answers = [answer for answer in found.values() if isinstance(answer, Status)]
        for line in dict.fromkeys(line for answer in answers for line in _store_lines(answer)):
            call.out.line(line)
        if any(answer.serves for answer in answers):
            for line in await _wrong_now(call):
                call.out.line(line)
    return _status_exit_code(found)


async def _wrong_now(call: Call) -> list[str]:
    """What is wrong with the daemon right now; nothing where it does not say, or may not."""
    try:
        async with call.client(retries=0) as client:
            return trouble_lines((await client.overview(timeout=WRONG_S)).raw)
    except TickwheelError:
        return []


WRONG_S = 3.0
"""How long, in seconds, ``status`` waits for what is wrong right now."""


def _store_lines(answer: Status) -> Iterator[str]:
    """What is to be known of the store of a daemon; shards have most of it in common."""
    if answer.store_at and "+" in answer.store:
        yield f"the master of the store: {printable(answer.store_at)}"
    if answer.durability:
        yield f"durability: {printable(answer.durability)}"
    if answer.mirror is not None:
        yield f"mirror: {_MIRROR[answer.mirror]}"


def _status_exit_code(found: dict[str, Status | TickwheelError]) -> int:
    """The exit code for scripts: 0 when an active daemon serves, of each shard."""
    answers = [answer for answer in found.values() if isinstance(answer, Status)]
    serving = {answer.shard for answer in answers if answer.serves}
    if serving and len(serving) >= max(len(answer.shards) for answer in answers):
        return 0
    silent = all(isinstance(answer, (Unreachable, ConnectionLost)) for answer in found.values())
    return EXIT_UNREACHABLE if silent else EXIT_FAILED


Answered = tuple[str, Status | TickwheelError]
"""The address that was asked, and what it answered."""


def status_fields(one: Answered) -> dict[str, Any]:
    """The answer of one address; ``address`` in it is what the daemon tells others."""
    url, answer = one
    if isinstance(answer, Status):
        return {"url": url, "reachable": True, **answer.raw}
    return {"url": url, "reachable": False, "error": answer.code, "message": answer.message}


def status_row(one: Answered) -> tuple[str, ...]:
    url, answer = one
    address = url.removeprefix("tcp://").removeprefix("tls://")
    if not isinstance(answer, Status):
        reachable = not isinstance(answer, (Unreachable, ConnectionLost))
        role = answer.code if reachable else "unreachable"
        why = answer.message.removeprefix(address).lstrip(": ")
        return address, "-", role, printable(why), "-", "-", "-"
    epoch = str(answer.epoch) if answer.epoch else "-"
    store = printable(answer.store) + ("" if answer.store_ok else " (NOT OK)")
    who = printable(answer.node), printable(answer.role)
    return address, *who, _state(answer), epoch, _since(answer), store


def _state(answer: Status) -> str:
    parts = [answer.detail] if answer.detail else []
    if answer.state == "loading":
        of = "" if answer.to_load is None else f" of {answer.to_load:,}"
        parts.append(f"{answer.loaded:,}{of} loaded")
    state = answer.state.replace("_", " ")
    return printable(f"{state} ({', '.join(parts)})" if parts else state)


def _since(answer: Status) -> str:
    if not answer.since_ms:
        return "-"
    lasting = format_duration((answer.now_ms - answer.since_ms) / 1000)
    return f"{format_time(answer.since_ms)[:-4]} ({lasting})"


# --- backup and bench ----------------------------------------------------------------------------


async def backup(
    call: Call,
    name: Annotated[
        str, argument("NAME", "A file name in the daemon's backup folder; must not exist.")
    ],
) -> None:
    """Copy the store while the daemon goes on. The copy is one moment's state."""
    done = await call.ask(lambda client: client.backup(name))
    path, size = done.path, done.bytes
    call.out.result({"path": path, "bytes": size}, f"{path}  {size:,} bytes")


BENCH_S_MAX = 300.0


async def bench(
    call: Call,
    tasks: Annotated[int, option("For each way to enqueue.", min=1, max=1_000_000)] = 20_000,
    rate: Annotated[
        int, option("Tasks a second while lateness is measured.", min=0, max=50_000)
    ] = 2_000,
    seconds: Annotated[int, option("How long that is done.", min=1, max=60)] = 5,
    body_bytes: Annotated[
        int, option("Size of a body.", "BYTES", "--body", min=0, max=1 << 20)
    ] = 100,
) -> int:
    """Measure a running daemon: enqueues, deliveries with acks, lateness. Uses its own topic.

    All of it is durable work on the daemon's real store; nothing is left there afterwards.
    """
    from tickwheel.demo.demonstration import Bench

    topic = f"tickwheel.bench.{secrets.token_hex(4)}"
    async with call.client(send_timeout=30.0) as client:
        run = Bench(client, topic, body_bytes)
        try:
            async with asyncio.timeout(BENCH_S_MAX):
                await run.enqueue_single(tasks)
                await run.enqueue_batched(tasks)
                await run.deliver(2 * tasks)
                if rate:
                    await run.lateness(rate, seconds)
        except TimeoutError:
            raise SendTimeout(f"not through after {BENCH_S_MAX:g} s; try fewer --tasks") from None
        finally:
            await run.clear()
    _show_bench(call, run.result, rate)
    return EXIT_FAILED if run.result.early else 0


def _show_bench(call: Call, result: Result, rate: int) -> None:
    from tickwheel.demo.demonstration import percentile

    fields: dict[str, str | int] = {
        "tasks": result.tasks,
        "enqueue_single_per_s": round(result.enqueue_single_per_s),
        "enqueue_batched_per_s": round(result.enqueue_batched_per_s),
        "delivery_per_s": round(result.delivery_per_s),
        "early": result.early,
    }
    if rate:
        fields |= {
            "late_p50_ms": percentile(result.late_ms, 0.50),
            "late_p99_ms": percentile(result.late_ms, 0.99),
            "late_max_ms": max(result.late_ms, default=0),
        }
    if call.out.as_json:
        call.out.record(fields)
        return
    named = {
        name.replace("_per_s", " a second").replace("_ms", " ms").replace("_", " "): value
        for name, value in fields.items()
    }
    call.out.grid(facts_grid(("measured", "value"), named, right=True))


# --- tokens --------------------------------------------------------------------------------------

TokensOption = Annotated[
    str, option("The daemon's tokens_file.", "FILE", "--file", envvar="TICKWHEEL_TOKENS_FILE")
]


@offline(JSON_HERE)
def create_token(
    call: Call,
    name: Annotated[str, argument("NAME", "Its owner.")],
    file: TokensOption,
    scope: Annotated[
        list[str] | None,
        option(
            "produce, consume, read, operate, admin or all; for topics such as orders or"
            " orders.*, without a pattern for all. May be repeated.",
            "RIGHT[=PATTERN,...]",
        ),
    ] = None,
    expires: Annotated[float | None, duration("From now: 90d, 12h. Default: never.")] = None,
    certificate: Annotated[
        str | None,
        option(
            "Instead of a secret: what a client's certificate must say, for example CN=billing,"
            " or URI=spiffe://shop/billing.",
            "CN=NAME,...",
        ),
    ] = None,
    quota: Annotated[
        list[str] | None,
        option(
            "Upper limits: tasks_per_s, bytes_per_s, pending, connections, subscriptions,"
            " transactions. May be repeated. Default: the daemon's quota_… settings.",
            "NAME=NUMBER",
        ),
    ] = None,
) -> None:
    """Make a token and show it, this once: what is kept is a hash.

    Others of the same name stay valid: make the new one, hand it out, revoke the old one.
    """
    from tickwheel.server import tokens

    now_ms = time.time_ns() // 1_000_000
    expires_ms = None if expires is None else now_ms + int(expires * 1000)
    grants = tokens.parse_scopes(scope or [])
    quotas = tokens.parse_quotas(quota or [])
    token, text = tokens.create(Path(file), name, grants, now_ms, expires_ms, certificate, quotas)
    call.out.result({"token": text or None, **_token_fields(token, None)}, text or token.id)
    if not call.out.as_json:
        opens = "this is shown once" if text else f"a certificate with {certificate} opens it"
        call.out.remark(f"token {token.id} of {name}: {_scopes(token)}; {opens}")


@offline(JSON_HERE)
def list_tokens(call: Call, file: TokensOption) -> None:
    """The tokens of the file, with their rights, ends and last use; never what they read."""
    from tickwheel.server import tokens

    path = Path(file)
    found, used = tokens.read(path), tokens.read_used(path)
    now_ms = time.time_ns() // 1_000_000

    def fields(token: Token) -> dict[str, Any]:
        return {**_token_fields(token, used.get(token.id)), "expired": token.is_over(now_ms)}

    def row(token: Token) -> tuple[str, ...]:
        over = " (expired)" if token.is_over(now_ms) else ""
        ends = "never" if token.expires_ms is None else format_time(token.expires_ms) + over
        created, last = format_time(token.created_ms), format_time(used.get(token.id))
        return token.id, token.name, _scopes(token), created, ends, last

    Listing(call.out, tokens_grid(), row, fields).show(found.values())


def tokens_grid() -> Grid:
    return Grid(
        ("id", "name", "scopes", "created", "expires", "last used"),
        times=("created", "expires", "last used"),
        spare=("created",),
    )


@offline(JSON_HERE)
def revoke_token(
    call: Call,
    which: Annotated[str, argument("ID|NAME", "Which one.")],
    file: TokensOption,
    every: Annotated[bool, flag("All with this name.", "--all")] = False,
) -> None:
    """Take a token out of the file: within seconds its connections end, and it opens nothing."""
    from tickwheel.server import tokens

    for token in tokens.revoke(Path(file), which, every=every):
        fields = {"id": token.id, "name": token.name, "revoked": True}
        call.out.result(fields, f"token {token.id} of {token.name} is revoked")


def _token_fields(token: Token, used_ms: int | None) -> dict[str, object]:
    return {
        "id": token.id,
        "name": token.name,
        "scopes": {str(right): list(patterns) for right, patterns in token.grants},
        "created": iso_time(token.created_ms),
        "expires": None if token.expires_ms is None else iso_time(token.expires_ms),
        **given({name: token.to_map().get(name) or None for name in ("certificate", "quotas")}),
        "last_used": None if used_ms is None else iso_time(used_ms),
    }


def _scopes(token: Token) -> str:
    return " ".join(f"{right}={','.join(patterns)}" for right, patterns in token.grants)
