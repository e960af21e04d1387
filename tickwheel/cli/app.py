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
from tickwheel.cli.call import JSON_HELP, TOKEN_HELP, URL_HELP, Shared
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


for _part in (
    serve,
    init,
    enqueue,
    subscribe,
    tasks,
    status,
    operate,
    topics,
    groups,
    policy,
    dead,
    history,
    restore,
    report,
    top,
    work,
    bench,
):
    _part.register(app)
