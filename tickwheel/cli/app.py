"""The command ``tickwheel``: its sub-commands and what can be said before them."""

from __future__ import annotations

from typing import Annotated

import typer

from tickwheel.cli import (
    bench,
    dead,
    enqueue,
    groups,
    history,
    history_generate,
    init,
    operate,
    policy,
    report,
    restore,
    serve,
    status,
    subscribe,
    tasks,
    top,
    topics,
    work,
)
from tickwheel.cli.call import JSON_HELP, TOKEN_HELP, URL_HELP, Shared, command
from tickwheel.cli.nested import nested
from tickwheel.version import __version__

app = typer.Typer(
    name="tickwheel",
    help="A durable timing-wheel scheduler: hand in tasks, get each when it is due.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 daemon unreachable, 4 not found.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tickwheel {__version__}")
        raise typer.Exit


@app.callback()
def shared(
    ctx: typer.Context,
    url: Annotated[
        str | None, typer.Option(envvar="TICKWHEEL_URL", metavar="URL", help=URL_HELP)
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="TICKWHEEL_TOKEN", metavar="TOKEN", help=TOKEN_HELP)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and end.")
    ] = False,
) -> None:
    """Kept for the command that follows."""
    ctx.obj = Shared(url=url, token=token, as_json=as_json)


# --- the commands, in the order in which the help shows them -----------------------------------

app.command()(serve.serve)
app.command()(serve.demo)
app.command()(serve.check)
app.command()(init.init)
command(app)(enqueue.enqueue)
command(app)(subscribe.subscribe)
command(app)(tasks.cancel)
command(app)(tasks.reschedule)
command(app, "run-now")(tasks.run_now)
command(app)(tasks.show)
command(app, "list")(tasks.list_)
command(app)(status.status)
command(app)(operate.stats)
command(app)(operate.backup)
command(app)(topics.topics)
command(app)(topics.pause)
command(app)(topics.resume)
command(app)(topics.rate)
app.command()(restore.restore)
app.command()(report.report)
command(app)(top.top)
command(app)(work.work)
bench.register(app)

_groups = nested(
    app, "groups", "Groups of a topic: list them (by default), create them, delete them.",
    list_by_default=True,
)  # fmt: skip
command(_groups, "list")(groups.list_)
command(_groups)(groups.create)
command(_groups)(groups.delete)

_policy = nested(app, "policy", "Retry policies of topics and groups: show, set, clear.")
command(_policy)(policy.show)
command(_policy, "set")(policy.set_)
command(_policy)(policy.clear)

_dead = nested(app, "dead", "Dead letters: look at them, requeue them, delete them.")
command(_dead, "list")(dead.list_)
command(_dead)(dead.show)
command(_dead)(dead.requeue)
command(_dead)(dead.delete)
command(_dead)(dead.purge)

_history = nested(
    app, "history", "What happened to tasks: search it (by default), or make some up for trials.",
    list_by_default=True,
)  # fmt: skip
_history.command("list")(history.list_)
history_generate.register(_history)
