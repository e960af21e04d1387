"""Commands for a daemon and its store: ``serve``, ``init``, ``check``, ``status``, ``backup``,
``reshard``, tokens, ``demo``, and ``bench`` to measure a daemon (`make bench` compares products).

``status``, ``backup`` and ``bench`` ask running daemons. The other commands import the daemon's
packages when they run, so operating a remote daemon needs only the extra ``cli``.

``token`` changes a file; a running daemon notices the change by itself.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

from tickwheel import disk
from tickwheel.cli.call import (
    CLIENT_NAME,
    EXIT_FAILED,
    EXIT_UNREACHABLE,
    Call,
    confirmed,
    given,
    offline,
)
from tickwheel.cli.declared import declared
from tickwheel.cli.options import YesOption, argument, duration, flag, option
from tickwheel.cli.output import (
    Column,
    Listing,
    column,
    facts_grid,
    fields_of,
    format_duration,
    format_time,
    iso_time,
    printable,
    text_columns,
    trouble_lines,
)
from tickwheel.client import Backup, Status, statuses
from tickwheel.errors import (
    BadRequest,
    Conflict,
    ConnectionLost,
    SendTimeout,
    TickwheelError,
    Unreachable,
    shown,
)
from tickwheel.limits import SHARDS_MAX
from tickwheel.log_writer import unblock_stderr
from tickwheel.model.policies import duration_ms

if TYPE_CHECKING:
    from tickwheel.server.access.tokens import Token
    from tickwheel.server.settings import Settings

STORE_HELP = (
    "memory:, sqlite:///relative.db, sqlite:////absolute.db, redis://HOST:PORT/DB"
    ", redis+sentinel://HOST:PORT,…/DB?master=NAME, redis+cluster://HOST:PORT,…/"
    ", postgresql://USER@HOST:PORT/DB?schema=NAME."
    " Default: tickwheel.db in this folder."
)
JSON_HERE = "JSON on stdout."

StoreOption = Annotated[str | None, option(STORE_HELP, "URL")]
ConfigOption = Annotated[
    str | None, option("File of settings; environment and options take precedence.", "FILE.toml")
]
SETTINGS = {
    "store": option(STORE_HELP, "URL"),
    "listen": option("Default: tcp://127.0.0.1:7355. Port 0: any free port.", "URL"),
    "processes": option(
        "Number of shards, each with a daemon, for --store sqlite:///DIR/; auto: one for each"
        " processor. Default: 1.", "N|auto"),
    "http": option("Address of the HTTP API, /healthz and /metrics. Default: off.", "HOST:PORT"),
    "http_all": option(
        "With --processes and --http: address of the HTTP API of all shards together."
        " Default: off.", "HOST:PORT"),
    "node": option("Name in statistics and logs. Default: the host name.", "NAME"),
    "serve_token": option(
        "A token with all rights. (--token is the token of a client.)", "TOKEN"),
    "advertise": option(
        "Address announced to clients and daemons. Default: the --listen address.", "URL"),
    "leader_ttl_s": option(
        "With Redis and PostgreSQL: seconds without a sign of life of the active daemon after"
        " which another takes over. Default: 3.", "SECONDS", "--leader-ttl"),
    "allow_volatile_store": flag("Accept a server that may lose its data."),
    "resident_bytes_max": option(
        "Maximum bytes of task bodies in memory. Default: 256 MiB, with Redis 2 GiB.", "BYTES"),
    "accept_clock": flag("Trust the clock even after a long downtime, and deliver due tasks."),
    "history_dir": option("Folder for the history of every task. Default: no history.", "DIR"),
    "tokens_file": option(
        "File of tokens with restricted rights; see `tickwheel token`.", "FILE"),
    "tls_cert": option("Certificate for tls:// and https:// (PEM).", "FILE"),
    "tls_key": option("Its key. Default: in the same file.", "FILE"),
    "tls_client_ca": option("Authorities that sign client certificates (PEM).", "FILE"),
    "push_allow": option("A private network that pushes may reach; can be repeated.", "CIDR"),
    "inbox": option("Database with an inbox: postgresql://… or sqlite:///PATH.", "URL"),
    "insecure": flag("Allow listening beyond this machine without tokens or without TLS."),
    "ready_file": option("File to write once it serves: addresses as JSON.", "FILE"),
    "log_format": option("Log format. Default: console.", "console|json"),
    "log_level": option("Minimum log level. Default: info.", "debug|info|warning|error"),
}  # fmt: skip
"""The settings that have an option, in the order of the help. The others are given by ``--set``."""
TYPES: dict[str, Any] = {"SECONDS": float, "BYTES": int, "CIDR": list[str]}
"""Placeholder → type of the value; other values are texts, which the daemon's settings parse."""


class SettingsOptions(TypedDict, total=False):
    """The options of ``SETTINGS``."""


SettingsOptions.__annotations__ |= {
    name: Annotated[TYPES.get(info.metavar, str) | None if info.metavar else bool, info]
    for name, info in SETTINGS.items()
}


@offline(json_help=None)
def serve(
    call: Call,
    config: ConfigOption = None,
    set_: Annotated[list[str] | None, option("Any setting; can be repeated.", "NAME=VALUE")] = None,
    **options: Unpack[SettingsOptions],
) -> int:
    """Run a daemon until SIGTERM or Ctrl-C. Exit code 0 after a clean stop.

    Every setting can also be given in a TOML file (name = value) or in the environment
    (TICKWHEEL_NAME). Options take precedence over the environment, the environment over the file.
    """
    # A TICKWHEEL_TOKEN in the environment is the client's, and is ignored.
    if call.has_token_option:
        raise BadRequest("--token is for clients; use --serve-token for the daemon's token")
    settings = _load_settings(config, {**_assignments(set_ or []), **options})
    _import_parts(settings)
    unblock_stderr()
    from tickwheel.persistence import shard_count, shard_folder

    if shard_count(settings.store) is not None:
        from tickwheel.server.fleet import nodes

        return nodes.run(settings)
    if settings.processes == 1 and shard_folder(settings.store) is None:
        from tickwheel.server.daemon import run

        return run(settings)
    from tickwheel.server.fleet import processes

    return processes.run(settings)


def _import_parts(settings: Settings) -> None:
    """Import the packages that these settings need, to report missing ones before the start."""
    if settings.http is not None:
        import tickwheel.server.http.app
        import tickwheel.server.metrics.exposition
    if settings.otlp_endpoint is not None:
        import tickwheel.server.metrics.otlp  # noqa: F401
    _import_databases(settings.store, settings.inbox)


def _import_databases(store: str | None, inbox: str | None) -> None:
    """Import the packages that a store and an inbox need. Raise StoreUnusable or BadRequest for an
    invalid URL, and ModuleNotFoundError or StoreUnusable if a package is missing."""
    from tickwheel.persistence import check_packages

    if inbox is not None:
        from tickwheel.inbox import open_inbox

        if inbox.startswith("postgres"):
            import tickwheel.inbox.postgresql  # noqa: F401
        open_inbox(inbox)
    if store is not None:
        check_packages(store)


def _assignments(texts: list[str]) -> dict[str, str]:
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise BadRequest(f"--set must be NAME=VALUE, not {text!r}")
        settings[name] = value
    return settings


def _load_settings(config: str | None, overrides: Mapping[str, Any]) -> Settings:
    """Load the settings of a daemon, and apply their ``file_mode`` to this process."""
    from tickwheel.server import settings

    loaded = settings.load(config, dict(overrides))
    disk.withhold(loaded.file_mode)
    return loaded


@offline(JSON_HERE)
def demo(
    call: Call,
    seconds: Annotated[int, option("Seconds in which tasks are enqueued.", min=5, max=600)] = 20,
    tasks: Annotated[
        int, option("Number of tasks, spread evenly over that time.", min=100, max=1_000_000)
    ] = 20_000,
    store: Annotated[
        str | None,
        option("An empty store. Default: a SQLite file in a temporary folder.", "URL"),
    ] = None,
    inbox: Annotated[
        str | None,
        option(
            "An empty database in PostgreSQL: show also tasks that an application enqueues in its"
            " transactions.",
            "URL",
        ),
    ] = None,
    plain: Annotated[bool, flag("Print lines instead of a live view.")] = False,
) -> int:
    """Demonstrate a daemon with 20,000 tasks and a kill -9 half way: nothing is lost or early.

    Needs no running daemon and works in a temporary folder. Exit code 1 if a task was lost or
    early, or the delivered tasks of transactions are not those of the committed ones.
    """
    # Report missing packages and an invalid URL here, not in a child.
    import tickwheel.server.daemon  # noqa: F401
    from tickwheel.demo.demonstration import run_demo
    from tickwheel.persistence import parse

    if store is not None:
        parse(store)
    if inbox is not None and not inbox.startswith("postgres"):
        raise BadRequest(f"--inbox must be postgresql://USER@HOST/DATABASE, not {shown(inbox)}")
    _import_databases(store, inbox)
    return run_demo(seconds, tasks, store, inbox, plain=plain, json=call.out.as_json)


@offline(JSON_HERE)
def check(call: Call, store: StoreOption = None, config: ConfigOption = None) -> int:
    """Check a store that no daemon has open: read every row, compare counts with a full scan.

    Changes nothing. Exit code 1 if something is wrong.
    """
    settings = _load_settings(config, given({"store": store}))
    from tickwheel.persistence import audit

    report = audit.check(settings.store)
    counts = {name: getattr(report, name) for name in ("tasks", "progress", "dead", "sessions")}
    problems = list(report.problems)
    fields = {"store": settings.store, **counts, "problems": problems}
    table = facts_grid(("rows", "found"), counts, f"Store {settings.store}", right=True)
    verdict = f"{len(problems)} problems" if problems else "all rows agree"
    call.out.result(fields, table, *(f"WRONG: {problem}" for problem in problems), verdict)
    return EXIT_FAILED if problems else 0


# --- init ----------------------------------------------------------------------------------------


@offline(JSON_HERE)
def init(
    call: Call,
    store: StoreOption = None,
    force: Annotated[
        bool,
        flag(
            "Start over after a store was lost. Redis, PostgreSQL: even with data, which is deleted"
            " for good."
        ),
    ] = False,
    branch: Annotated[
        bool,
        flag("Continue with a store that is older than its history, for example an older copy."),
    ] = False,
    yes: YesOption = False,
    allow_volatile_store: Annotated[bool, SETTINGS["allow_volatile_store"]] = False,
    processes: Annotated[
        str | None, option("Number of shards of a folder (sqlite:///DIR/).", "N|auto")
    ] = None,
    config: ConfigOption = None,
) -> int:
    """Create a store without serving: a SQLite file, a folder of shards (--processes), or an empty
    shard in Redis or PostgreSQL.

    Refuses an existing store with exit code 1. A daemon does not start with a store that was lost
    or set back, according to its history or the files next to it; two options resolve this.
    --force starts over: a SQLite file that is missing, empty or was never used; a shard on a
    server even with data, which is deleted, and no daemon that used it before can write to it.
    --branch keeps the store's data, and its next start begins a new branch. No daemon may have the
    store open.
    """
    if force and branch:
        raise BadRequest("give either --force or --branch")
    overrides = {"store": store, "allow_volatile_store": allow_volatile_store}
    settings = _load_settings(config, given({**overrides, "processes": processes}))
    from tickwheel.persistence import (
        open_administration,
        parse,
        shard_folder,
        with_setting,
        without_secrets,
    )

    if settings.processes != 1 or shard_folder(settings.store) is not None:
        from tickwheel.server.fleet import processes as folders

        if force or branch:
            raise BadRequest(
                "--force and --branch apply to a single shard: give its database, --store"
                " sqlite:///DIR/shard-1.db"
            )
        shards = folders.init(settings)
        _show_laid_out(call, settings.store, f"was created with {shards} shards", shards=shards)
        return 0
    url, kind = settings.store, parse(settings.store).kind
    if kind == "memory":
        raise BadRequest("the store memory: is empty at every start and needs no init")
    if kind == "sqlite":
        path = os.path.realpath(parse(url).path)
        if branch:
            from tickwheel.persistence.sqlite import database

            meta = database.begin_branch(path)
            return _show_branch(call, url, f"{path}, which ends with epoch {meta.last.epoch},")
        return _lay_out_sqlite(call, url, path, force=force)
    if settings.allow_volatile_store:
        url = with_setting(url, "allow_volatile_store", "1")
    if branch:
        asyncio.run(open_administration(url).begin_branch())
        return _show_branch(call, url, without_secrets(url))
    return _lay_out_on_server(call, url, force=force, yes=yes)


def _show_branch(call: Call, url: str, subject: str) -> int:
    from tickwheel.persistence import without_secrets

    fields = {"store": without_secrets(url), "created": False, "branch": True}
    call.out.result(fields, f"{subject} begins a new branch with its next start")
    return 0


def _lay_out_sqlite(call: Call, url: str, path: str, *, force: bool) -> int:
    from tickwheel.clock import sources
    from tickwheel.persistence import layout_around, open_url
    from tickwheel.persistence.identity import NEW
    from tickwheel.persistence.sqlite import database

    if force:
        database.begin_anew(path)
    elif os.path.exists(path):
        raise Conflict(f"{path} already exists")
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
    _show_laid_out(call, url, "was created")
    return 0


def _lay_out_on_server(call: Call, url: str, *, force: bool, yes: bool) -> int:
    from tickwheel.clock import sources
    from tickwheel.persistence import open_administration

    administration = open_administration(url)
    existing = asyncio.run(administration.look())
    if existing.exists:
        subject = f"{existing.shard} in {existing.store} is {existing.state}"
        if not force:
            raise Conflict(f"{subject}. It already exists; --force deletes it and creates it again")
        call.out.remark(subject)
        question = "Delete all of it for good, and create the shard again?"
        if not yes and not confirmed(call, "all of it would be deleted for good", question):
            return EXIT_FAILED
    incarnation = asyncio.run(
        administration.lay_out(existing, sources().wall_ms(), is_branch=force)
    )
    fields = {
        "shard": existing.shard, "incarnation": incarnation,
        "removed": existing.counts if existing.exists else None,
    }  # fmt: skip
    outcome = "was created again" if existing.exists else "was created"
    _show_laid_out(call, existing.store, outcome, **fields)
    return 0


def _show_laid_out(call: Call, store: str, what: str, **more: object) -> None:
    shard = f"{more['shard']} in " if "shard" in more else ""
    call.out.result({"store": store, "created": True, **more}, f"{shard}{store} {what}")


# --- files ---------------------------------------------------------------------------------------


@offline(JSON_HERE)
def deploy_files(
    call: Call,
    directory: Annotated[str, argument("DIR", "Folder for the files; created if necessary.")],
    force: Annotated[bool, flag("Overwrite existing files.")] = False,
) -> None:
    """Write the files that run and monitor a daemon: systemd units, compose files and their
    Dockerfile, manifests for Kubernetes, rules for Prometheus and dashboards for Grafana.

    Writes nothing, with exit code 1, if one of them already exists.
    """
    from tickwheel import deployment

    folder, contents = Path(directory), deployment.files()
    existing = [name for name in contents if (folder / name).exists()]
    if existing and not force:
        raise Conflict(
            f"{folder} already has {len(existing)} of these files, for example {existing[0]};"
            " --force overwrites them"
        )
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    fields = {"dir": str(folder), "files": sorted(contents)}
    call.out.result(
        fields, f"{len(contents)} files in {folder}; begin with {folder}/deploy/README.md"
    )


# --- reshard -------------------------------------------------------------------------------------


@offline("The report as JSON.")
def reshard(
    call: Call,
    to: Annotated[int, option("New number of shards.", "N", "--to", min=1, max=SHARDS_MAX)],
    store: StoreOption = None,
    into: Annotated[
        str | None,
        option("The new folder, if --store is a single database.", "sqlite:///DIR/", "--into"),
    ] = None,
    dry_run: Annotated[bool, flag("Check everything and print what would move; write nothing.")] = (
        False
    ),
    config: ConfigOption = None,
) -> None:
    """Change the number of shards of a folder (--store sqlite:///DIR/), or turn a single database
    into a folder (--store sqlite:///FILE.db --into sqlite:///DIR/), while no daemon serves.

    Ids do not change; tasks with a key go to the shard of the key. New databases are written next
    to the old ones, verified, and put into use at one moment; the old ones are kept, but never
    opened again. Anything that cannot be moved exactly is refused before any change. After an
    interruption, run the command again.
    """
    settings = _load_settings(config, given({"store": store}))
    from tickwheel.server.fleet import reshard as resharding

    plan = resharding.Plan(settings.store, to, into, dry_run)
    report = resharding.reshard(plan, int(time.time() * 1000))
    if report.already:
        call.out.result(report.fields(), f"{report.into} already has {to} shards")
        return
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
    call.out.result(report.fields(), facts_grid(("count", "value"), facts, title))
    if report.kept and not call.out.as_json:
        call.out.remark(f"kept, but no longer used: {', '.join(report.kept)}")


# --- status --------------------------------------------------------------------------------------

_MIRROR = {
    True: "yes: a Redis that returns empty or older gets everything again from memory",
    False: "no: a Redis that returns slightly older gets the newest batches again; one that returns"
    " empty stops the daemon, and needs `tickwheel restore`",
}
"""``Status.mirror`` for people."""
STATUS = (
    *text_columns("address", "node", "role", "state"), column("epoch", right=True),
    *text_columns("since", "store"),
)  # fmt: skip


async def status(call: Call) -> int:
    """Show every daemon of --url, the active daemon that a standby names, and all shards: role,
    state and start.

    Exit code 0 if an active daemon is ready (or still loading), for every shard; 1 if not, 3 if no
    address can be reached.
    """
    by_url = await statuses(call.url, token=call.token, name=CLIENT_NAME)
    answers = [answer for answer in by_url.values() if isinstance(answer, Status)]
    serving = {answer.shard for answer in answers if answer.serves}
    rows = map(status_row, by_url.items())
    Listing(call.out, STATUS, lambda row: row["fields"]).show(rows)
    if not call.out.as_json:
        lines = dict.fromkeys(line for answer in answers for line in _store_lines(answer))
        for line in (*lines, *(await _troubles(call) if serving else ())):
            call.out.line(line)
    if serving and len(serving) >= max(len(answer.shards) for answer in answers):
        return 0
    silent = all(isinstance(answer, (Unreachable, ConnectionLost)) for answer in by_url.values())
    return EXIT_UNREACHABLE if silent else EXIT_FAILED


async def _troubles(call: Call) -> list[str]:
    """Return the daemon's current troubles; empty if it does not answer or refuses."""
    try:
        async with call.client(retries=0) as client:
            return trouble_lines((await client.overview(timeout=TROUBLES_S)).raw)
    except TickwheelError:
        return []


TROUBLES_S = 3.0
"""Maximum seconds that ``status`` waits for the current troubles."""


def _store_lines(answer: Status) -> Iterator[str]:
    """Yield lines about a daemon's store, most of which all shards share."""
    if answer.store_at and "+" in answer.store:
        yield f"the master of the store: {printable(answer.store_at)}"
    if answer.durability:
        yield f"durability: {printable(answer.durability)}"
    if answer.mirror is not None:
        yield f"mirror: {_MIRROR[answer.mirror]}"


Answered = tuple[str, Status | TickwheelError]
"""A URL and its daemon's answer."""


def status_row(answered: Answered) -> dict[str, Any]:
    """Return the cells of a URL's daemon by column, and in ``fields`` its answer for ``--json``,
    whose ``address`` is the one that the daemon announces."""
    url, answer = answered
    address = short_address(url)
    if not isinstance(answer, Status):
        reachable = not isinstance(answer, (Unreachable, ConnectionLost))
        return {
            "address": address,
            "role": answer.code if reachable else "unreachable",
            "state": answer.message.removeprefix(address).lstrip(": "),
            "fields": {
                "url": url, "reachable": False, "error": answer.code, "message": answer.message,
            },
        }  # fmt: skip
    details = [answer.detail] if answer.detail else []
    if answer.state == "loading":
        total = "" if answer.to_load is None else f" of {answer.to_load:,}"
        details.append(f"{answer.loaded:,}{total} loaded")
    state, since = answer.state.replace("_", " "), None
    if answer.since_ms:
        lasting = format_duration((answer.now_ms - answer.since_ms) / 1000)
        since = f"{short_time(answer.since_ms)} ({lasting})"
    return {
        "address": address, "node": answer.node, "role": answer.role,
        "state": f"{state} ({', '.join(details)})" if details else state,
        "epoch": answer.epoch or None, "since": since,
        "store": answer.store + ("" if answer.store_ok else " (NOT OK)"),
        "fields": {"url": url, "reachable": True, **answer.raw},
    }  # fmt: skip


def short_address(url: str) -> str:
    return printable(url.removeprefix("tcp://").removeprefix("tls://"))


def short_time(at_ms: int) -> str:
    return format_time(at_ms, "seconds")


# --- backup and bench ----------------------------------------------------------------------------


def _show_backup(call: Call, request: Mapping[str, Any], made: Backup) -> None:
    call.out.result(fields_of(made), f"{made.path}  {made.bytes:,} bytes")


backup = declared("backup", _show_backup)
BENCH_S_MAX = 300.0


async def bench(
    call: Call,
    tasks: Annotated[int, option("Tasks for each way to enqueue.", min=1, max=1_000_000)] = 20_000,
    rate: Annotated[
        int, option("Tasks per second during the measurement of lateness.", min=0, max=50_000)
    ] = 2_000,
    seconds: Annotated[int, option("Seconds of that measurement.", min=1, max=60)] = 5,
    body_bytes: Annotated[
        int, option("Size of a body.", "BYTES", "--body", min=0, max=1 << 20)
    ] = 100,
) -> int:
    """Measure a running daemon: enqueues, deliveries with acks, lateness. Uses a separate topic.

    All work is durable in the daemon's store; nothing is left there afterwards.
    """
    from tickwheel.demo.demonstration import Bench, percentile

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
            raise SendTimeout(f"the run took over {BENCH_S_MAX:g} s; use fewer --tasks") from None
        finally:
            await run.clear()
    result = run.result
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
    labels = {
        name.replace("_per_s", " per second").replace("_ms", " ms").replace("_", " "): value
        for name, value in fields.items()
    }
    call.out.result(fields, facts_grid(("measured", "value"), labels, right=True))
    return EXIT_FAILED if result.early else 0


# --- tokens --------------------------------------------------------------------------------------

TokensOption = Annotated[
    str, option("The daemon's tokens_file.", "FILE", "--file", envvar="TICKWHEEL_TOKENS_FILE")
]


@offline(JSON_HERE)
def create_token(
    call: Call,
    name: Annotated[str, argument("NAME", "The owner of the token.")],
    file: TokensOption,
    scope: Annotated[
        list[str] | None,
        option(
            "produce, consume, read, operate, admin or all, for topics such as orders or orders.*;"
            " for all topics without a pattern. Can be repeated.",
            "RIGHT[=PATTERN,...]",
        ),
    ] = None,
    expires: Annotated[float | None, duration("Lifetime: 90d, 12h. Default: unlimited.")] = None,
    certificate: Annotated[
        str | None,
        option(
            "Instead of a secret: the required content of a client's certificate, for example"
            " CN=billing, or URI=spiffe://shop/billing.",
            "CN=NAME,...",
        ),
    ] = None,
    quota: Annotated[
        list[str] | None,
        option(
            "Upper limits: tasks_per_s, bytes_per_s, pending, connections, subscriptions,"
            " transactions. Can be repeated. Default: the daemon's quota_… settings.",
            "NAME=NUMBER",
        ),
    ] = None,
) -> None:
    """Create a token and show it once: the file contains only a hash.

    Other tokens of the same name stay valid: create the new one, distribute it, revoke the old one.
    """
    from tickwheel.server.access import tokens

    now_ms = time.time_ns() // 1_000_000
    expires_ms = None if expires is None else now_ms + duration_ms(expires)
    grants = tokens.parse_scopes(scope or [])
    quotas = tokens.parse_quotas(quota or [])
    token, text = tokens.create(Path(file), name, grants, now_ms, expires_ms, certificate, quotas)
    call.out.result({"token": text or None, **_token_fields(token, None)}, text or token.id)
    if not call.out.as_json:
        opens = "this is shown once" if text else f"certificate required: {certificate}"
        call.out.remark(f"token {token.id} of {name}: {_scopes(token)}; {opens}")


@offline(JSON_HERE)
def list_tokens(call: Call, file: TokensOption) -> None:
    """List the tokens of the file with their rights, expiry and last use, never their secrets."""
    from tickwheel.server.access import tokens

    path = Path(file)
    tokens_by_id, used = tokens.read(path), tokens.read_used(path)
    now_ms = time.time_ns() // 1_000_000

    def fields(token: Token) -> dict[str, Any]:
        return {**_token_fields(token, used.get(token.id)), "expired": token.is_over(now_ms)}

    columns = token_columns(used, now_ms)
    Listing(call.out, columns, fields, spare=TOKENS_SPARE).show(tokens_by_id.values())


TOKENS_SPARE = ("created",)


def token_columns(used_ms: Mapping[str, int], now_ms: int) -> Sequence[Column[Any]]:
    """Return the columns of a table of tokens. ``used_ms``: id → time of the last use."""

    def expires(token: Token) -> str:
        if token.expires_ms is None:
            return "never"
        return format_time(token.expires_ms) + (" (expired)" if token.is_over(now_ms) else "")

    return (
        *text_columns("id", "name"), Column("scopes", _scopes),
        column("created", "created_ms", format_time), Column("expires", expires, is_time=True),
        Column("last used", lambda token: format_time(used_ms.get(token.id)), is_time=True),
    )  # fmt: skip


@offline(JSON_HERE)
def revoke_token(
    call: Call,
    which: Annotated[str, argument("ID|NAME", "The token's id or name.")],
    file: TokensOption,
    every: Annotated[bool, flag("All tokens with this name.", "--all")] = False,
) -> None:
    """Revoke a token: its connections end within seconds, and it is no longer accepted."""
    from tickwheel.server.access import tokens

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
