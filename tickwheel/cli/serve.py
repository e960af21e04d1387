"""``serve``, ``check``, ``demo``: the commands that are a daemon, or look at one's files.

The only place of the command line that knows the daemon's packages, and imports them when the
command runs: operating a remote daemon needs only the extra ``cli``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tickwheel.cli.call import EXIT_FAILED, merge, shared_of
from tickwheel.cli.output import Grid, Output, remark
from tickwheel.errors import BadRequest

if TYPE_CHECKING:
    from tickwheel.server.settings import Settings

NO_SERVER = "the daemon needs more packages: pip install 'tickwheel[server]' (missing: {})"
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
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def serve(
    ctx: typer.Context,
    store: StoreOption = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Default: tcp://127.0.0.1:7355. Port 0: any free one."),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Serve /healthz, /readyz and /metrics there. Default: off."
        ),
    ] = None,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Clients must show it.")
    ] = None,
    config: ConfigOption = None,
    advertise: AdvertiseOption = None,
    leader_ttl: LeaderTtlOption = None,
    allow_volatile_store: VolatileOption = False,
    resident_bytes_max: ResidentOption = None,
    history_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Write there what happens to every task. Default: no history."
        ),
    ] = None,
    ready_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Written once it serves: its addresses, as JSON."),
    ] = None,
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
    given = {
        "store": store,
        "listen": listen,
        "http": http,
        "token": token if token is not None else shared_of(ctx).token,
        "advertise": advertise,
        "leader_ttl_s": leader_ttl,
        "allow_volatile_store": allow_volatile_store or None,
        "resident_bytes_max": resident_bytes_max,
        "history_dir": history_dir,
        "ready_file": ready_file,
        "log_format": log_format,
        "log_level": log_level,
    }
    settings = load_settings(config, {**_assignments(set_ or []), **only_given(given)})
    from tickwheel.server.main import run

    return run(settings)


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
    try:
        from tickwheel.server import settings
    except ModuleNotFoundError as error:
        raise typer.Exit(_missing(error)) from None
    return settings.load(config, overrides)


def _missing(error: ModuleNotFoundError) -> int:
    remark(NO_SERVER.format(error.name))
    return EXIT_FAILED


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
    try:
        from tickwheel.cli.demo import run_demo
    except ModuleNotFoundError as error:
        return _missing(error)
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
        _show(out, settings.store, counts, list(found.problems))
    return EXIT_FAILED if found.problems else 0


def _show(out: Output, store: str, counts: dict[str, int], problems: list[str]) -> None:
    grid = Grid(("rows", "found"), title=f"Store {store}", right=frozenset(("found",)))
    grid.rows.extend((name, f"{count:,}") for name, count in counts.items())
    out.grid(grid)
    for problem in problems:
        out.line(f"WRONG: {problem}")
    out.line(f"{len(problems)} problems" if problems else "all rows agree")
