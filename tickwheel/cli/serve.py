"""``serve``, ``init``, ``check``, ``status``, ``backup``: a daemon as a whole, and its store.

``status`` and ``backup`` ask running daemons. The others know the daemon's packages, and import
them when the command runs: operating a remote daemon needs only the extra ``cli``.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tickwheel.cli.call import EXIT_FAILED, EXIT_UNREACHABLE, Call, ask, can_ask, merge, shared_of
from tickwheel.cli.output import Grid, Output, facts_grid
from tickwheel.cli.values import format_duration, format_time, printable
from tickwheel.client import Status, statuses
from tickwheel.errors import BadRequest, Conflict, ConnectionLost, TickwheelError, Unreachable

if TYPE_CHECKING:
    from tickwheel.persistence.redis.opening import Found
    from tickwheel.server.settings import Settings


STORE_HELP = (
    "memory:, sqlite:///relative.db, sqlite:////absolute.db, redis://HOST:PORT/DB."
    " Default: tickwheel.db here."
)

StoreOption = Annotated[str | None, typer.Option(metavar="URL", help=STORE_HELP)]
ConfigOption = Annotated[
    str | None, typer.Option(metavar="FILE.toml", help="Settings; environment and flags win.")
]
AdvertiseOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Where others are told to find it. Default: where it listens."
    ),
]
LeaderTtlOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="With Redis: so long after the active daemon's last word another takes over."
        " Default: 3.",
    ),
]
VolatileOption = Annotated[
    bool, typer.Option("--allow-volatile-store", help="Use a Redis that may lose what it holds.")
]
ResidentOption = Annotated[
    int | None,
    typer.Option(
        metavar="BYTES",
        help="Task bodies kept in memory. Default: 256 MiB, with Redis (all of them) 2 GiB.",
    ),
]
AcceptClockOption = Annotated[
    bool,
    typer.Option(
        "--accept-clock",
        help="The clock is right, however long nobody served: fire what is due.",
    ),
]
HttpOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve the HTTP API, /healthz and /metrics there. Default: off.",
    ),
]
NodeOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Its name in stats and logs. Default: the host's."),
]
ServeTokenOption = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN", help="Who shows it may do all. Not --token: a client shows that."
    ),
]
HistoryDirOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Write there what happens to every task. Default: no history."
    ),
]
TlsCertOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="The certificate for tls:// and https:// (PEM).")
]
TlsKeyOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Its key. Default: in the same file.")
]
TlsClientCaOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Who signs the certificates of clients.")
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Listen beyond this machine without tokens or without TLS all the same."
    ),
]
TokensFileOption = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Tokens with rights of their own: `tickwheel token`."),
]
ReadyFileOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Written once it serves: its addresses, as JSON.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def serve(
    ctx: typer.Context,
    store: StoreOption = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Default: tcp://127.0.0.1:7355. Port 0: any free one."),
    ] = None,
    http: HttpOption = None,
    node: NodeOption = None,
    serve_token: ServeTokenOption = None,
    config: ConfigOption = None,
    advertise: AdvertiseOption = None,
    leader_ttl: LeaderTtlOption = None,
    allow_volatile_store: VolatileOption = False,
    resident_bytes_max: ResidentOption = None,
    accept_clock: AcceptClockOption = False,
    history_dir: HistoryDirOption = None,
    tokens_file: TokensFileOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_client_ca: TlsClientCaOption = None,
    insecure: InsecureOption = False,
    ready_file: ReadyFileOption = None,
    log_format: Annotated[
        str | None, typer.Option(metavar="console|json", help="Default: console.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="debug|info|warning|error", help="Default: info.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any setting; may be repeated."),
    ] = None,
) -> int:
    """Run a daemon until SIGTERM or Ctrl-C. Exit code 0 after a clean stop.

    Every setting can also stand in the TOML file (name = value) or in the environment
    (TICKWHEEL_NAME). Flags win over the environment, the environment over the file.
    """
    _refuse_client_token(ctx)
    given = {
        "store": store,
        "listen": listen,
        "http": http,
        "node": node,
        "serve_token": serve_token,
        "advertise": advertise,
        "leader_ttl_s": leader_ttl,
        "allow_volatile_store": allow_volatile_store or None,
        "resident_bytes_max": resident_bytes_max,
        "accept_clock": accept_clock or None,
        "history_dir": history_dir,
        "tokens_file": tokens_file,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "insecure": insecure or None,
        "ready_file": ready_file,
        "log_format": log_format,
        "log_level": log_level,
    }
    settings = load_settings(config, {**_assignments(set_ or []), **only_given(given)})
    _import_parts(settings)
    from tickwheel.server.daemon import run

    return run(settings)


def _refuse_client_token(ctx: typer.Context) -> None:
    """Refuse a ``--token`` before ``serve``, which may have been meant as the daemon's;
    TICKWHEEL_TOKEN of a shell was not, and is not looked at."""
    source = ctx.find_root().get_parameter_source("token")
    if source is not None and source.name == "COMMANDLINE":
        raise BadRequest("--token is what a client shows; the daemon's own is --serve-token")


def _import_parts(settings: Settings) -> None:
    """Import what these settings need, so that a missing package is reported before the start."""
    if settings.http is not None:
        import tickwheel.server.http.app
        import tickwheel.server.metrics.exposition
    if settings.store.startswith("redis"):
        import tickwheel.persistence.redis.driver_redis

        if "driver=asyncio-redis" in settings.store:
            import tickwheel.persistence.redis.driver_asyncio_redis  # noqa: F401


def only_given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _assignments(given: list[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise BadRequest(f"--set {text!r}: write NAME=VALUE")
        found[name] = value
    return found


def load_settings(config: str | None, overrides: dict[str, Any]) -> Settings:
    from tickwheel.server import settings

    return settings.load(config, overrides)


def demo(
    ctx: typer.Context,
    seconds: Annotated[int, typer.Option(min=5, max=600, help="How long tasks come in.")] = 20,
    tasks: Annotated[
        int, typer.Option(min=100, max=1_000_000, help="How many, evenly over that time.")
    ] = 20_000,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live view.")] = False,
    as_json: JsonOption = False,
) -> int:
    """See it work: a daemon, 20,000 tasks, a kill -9 half way; nothing lost, nothing early.

    Needs no running daemon; everything is made in a temporary folder. Exit code 1 when a task
    was lost or early.
    """
    import tickwheel.server.daemon  # noqa: F401  # what is missing is said here, not by a child
    from tickwheel.demo.demonstration import run_demo

    as_json = as_json or shared_of(ctx).as_json
    return run_demo(seconds=seconds, tasks=tasks, plain=plain, json=as_json)


def check(
    ctx: typer.Context, store: StoreOption = None, config: ConfigOption = None,
    as_json: JsonOption = False,
) -> int:  # fmt: skip
    """Check a store that no daemon has open: every row read, counts against a full scan.

    Nothing is changed. Exit code 1 when something is wrong.
    """
    out = merge(ctx, None, None, as_json).out
    settings = load_settings(config, only_given({"store": store}))
    from tickwheel.persistence import audit

    found = audit.check(settings.store)
    counts = {name: getattr(found, name) for name in ("tasks", "progress", "dead", "sessions")}
    if out.as_json:
        out.record({"store": settings.store, **counts, "problems": list(found.problems)})
    else:
        _show_check(out, settings.store, counts, list(found.problems))
    return EXIT_FAILED if found.problems else 0


def _show_check(out: Output, store: str, counts: dict[str, int], problems: list[str]) -> None:
    out.grid(facts_grid(("rows", "found"), counts, f"Store {store}", right=True))
    for problem in problems:
        out.line(f"WRONG: {problem}")
    out.line(f"{len(problems)} problems" if problems else "all rows agree")


# --- init ----------------------------------------------------------------------------------------


def init(
    ctx: typer.Context,
    store: StoreOption = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Redis: also when there is data, which is removed for good."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    allow_volatile_store: VolatileOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> int:
    """Lay a store out without serving: a new SQLite file, or an empty shard in Redis.

    What is there already is refused, with exit code 1. With --force a shard in Redis is laid
    out anew: everything in it is removed, and no daemon that used it before can write to it any
    more. That is for a shard that came back empty, damaged, or half written. Never done while
    a daemon leads the shard.
    """
    given = {"store": store, "allow_volatile_store": allow_volatile_store or None}
    settings = load_settings(config, only_given(given))
    from tickwheel.persistence.urls import parse, with_setting

    call = merge(ctx, None, None, as_json)
    url, kind = settings.store, parse(settings.store).kind
    if kind == "memory":
        raise BadRequest("store memory: is empty at every start; there is nothing to lay out")
    if kind == "sqlite":
        return _lay_out_sqlite(call, url, parse(url).path, force=force)
    if settings.allow_volatile_store:
        url = with_setting(url, "allow_volatile_store", "1")
    return _lay_out_redis(call, url, force=force, yes=yes)


def _lay_out_sqlite(call: Call, url: str, path: str, *, force: bool) -> int:
    from tickwheel.clock import sources
    from tickwheel.persistence import open_url

    if os.path.exists(path):
        hint = "; --force is for Redis: move the file away yourself" if force else ""
        raise Conflict(f"{path} exists already{hint}")

    async def lay_out() -> None:
        store = open_url(url)
        await store.open("init", sources().wall_ms())
        await store.close(clean=True)

    asyncio.run(lay_out())
    _show_laid_out(call, url, "was laid out")
    return 0


def _lay_out_redis(call: Call, url: str, *, force: bool, yes: bool) -> int:
    from tickwheel.clock import sources
    from tickwheel.persistence.redis import opening, options_from

    options = options_from(url)
    found = asyncio.run(opening.look(options))
    if found.exists and not _may_remove(call, found, force=force, yes=yes):
        return EXIT_FAILED
    incarnation = asyncio.run(opening.lay_out(options, found, sources().wall_ms()))
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
    if not can_ask(call):
        call.out.remark("conflict: all of it would be removed for good; say --yes")
        return False
    if not ask("Remove all of it for good, and lay the shard out anew?"):
        call.out.remark("nothing was changed")
        return False
    return True


def _show_laid_out(call: Call, store: str, what: str, **more: object) -> None:
    if call.out.as_json:
        call.out.record({"store": store, "created": True, **more})
    else:
        shard = f"{more['shard']} in " if "shard" in more else ""
        call.out.line(f"{shard}{store} {what}")


# --- status --------------------------------------------------------------------------------------

_STATUS_COLUMNS = ("address", "node", "role", "state", "epoch", "since", "store")


async def status(call: Call) -> int:
    """Every daemon of --url, and the active one that a standby names: role, state, since when.

    Exit code 0 when an active one is ready (or still loading), 1 when none is, 3 when no
    address can be reached.
    """
    found = await statuses(call.url, token=call.token, name="tickwheel-cli")
    if call.out.as_json:
        for url, answer in found.items():
            call.out.record(_status_fields(url, answer))
    else:
        call.out.grid(_status_grid(found))
        for answer in found.values():
            if isinstance(answer, Status) and answer.durability:
                call.out.line(f"durability: {printable(answer.durability)}")
    return _status_exit_code(found)


def _status_exit_code(found: dict[str, Status | TickwheelError]) -> int:
    """The exit code for scripts: 0 when an active daemon serves."""
    if any(isinstance(answer, Status) and answer.serves for answer in found.values()):
        return 0
    silent = all(isinstance(answer, (Unreachable, ConnectionLost)) for answer in found.values())
    return EXIT_UNREACHABLE if silent else EXIT_FAILED


def _status_fields(url: str, answer: Status | TickwheelError) -> dict[str, Any]:
    """The answer of one address; ``url`` was asked; ``address`` is what the daemon tells others."""
    if isinstance(answer, Status):
        return {"url": url, "reachable": True, **answer.raw}
    return {"url": url, "reachable": False, "error": answer.code, "message": answer.message}


def _status_grid(found: dict[str, Status | TickwheelError]) -> Grid:
    """A table with a row for each address."""
    table = Grid(_STATUS_COLUMNS, right=frozenset(("epoch",)))
    for url, answer in found.items():
        address = url.removeprefix("tcp://").removeprefix("tls://")
        if not isinstance(answer, Status):
            reachable = not isinstance(answer, (Unreachable, ConnectionLost))
            role = answer.code if reachable else "unreachable"
            why = answer.message.removeprefix(address).lstrip(": ")
            table.rows.append((address, "-", role, printable(why), "-", "-", "-"))
            continue
        table.rows.append(
            (
                address,
                printable(answer.node),
                printable(answer.role),
                _state(answer),
                str(answer.epoch) if answer.epoch else "-",
                _since(answer),
                printable(answer.store) + ("" if answer.store_ok else " (NOT OK)"),
            )
        )
    return table


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


# --- backup --------------------------------------------------------------------------------------


async def backup(
    call: Call,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A file name in the daemon's backup folder; must not exist."
        ),
    ],
) -> None:
    """Copy the store while the daemon goes on. The copy is one moment's state."""
    async with call.client() as client:
        done = await client.backup(name)
    path, size = str(done["path"]), int(done["bytes"])
    if call.out.as_json:
        call.out.record({"path": path, "bytes": size})
    else:
        call.out.line(f"{path}  {size:,} bytes")
