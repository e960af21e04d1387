"""What every command has in common: how it is registered, whom it talks to, whether it may ask.

A block of options that several commands have is a ``TypedDict``, each key with its type and help as
a parameter has them; a command takes it as ``**options: Unpack[GroupOptions]`` and finds there what
was given.

``command`` registers a coroutine that takes a ``Call``: the address of the daemon, its token,
the output. These three options are understood before the command's name (for all that follows)
and after it (which wins), so that nobody has to remember where they belong. ``nested`` makes
commands below a command. ``ask`` asks a person; a script decides by an option.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from tickwheel.cli.output import Output
from tickwheel.client import Client

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_NOT_FOUND = 4

URL_HELP = "The daemon: tcp://HOST:PORT or tls://HOST:PORT, several with commas. Default: tcp://127.0.0.1:7355."
TOKEN_HELP = "The token that the daemon asks for."
JSON_HELP = "One JSON object a line on stdout; remarks go to stderr."
SHARED = "Shared by all commands"

Command = Callable[..., Coroutine[Any, Any, int | None]]

_Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help=URL_HELP, rich_help_panel=SHARED)
]
_Token = Annotated[
    str | None, typer.Option("--token", metavar="TOKEN", help=TOKEN_HELP, rich_help_panel=SHARED)
]
_Json = Annotated[bool, typer.Option("--json", help=JSON_HELP, rich_help_panel=SHARED)]


@dataclass(frozen=True)
class Shared:
    """The options before the command's name, or from the environment."""

    url: str | None = None
    token: str | None = None
    as_json: bool = False


@dataclass(frozen=True)
class Call:
    """One command's address, token and output."""

    url: str | None
    token: str | None
    out: Output

    def client(self, **options: Any) -> Client:
        """A client that is not connected yet, for use in ``async with``."""
        return Client(self.url, token=self.token, name="tickwheel-cli", **options)


def shared_of(ctx: typer.Context) -> Shared:
    """The options that the callback of the whole program has kept."""
    return ctx.obj if isinstance(ctx.obj, Shared) else Shared()


def merge(ctx: typer.Context, url: str | None, token: str | None, as_json: bool) -> Call:
    """The options of a command: one after it wins over the same one before it."""
    shared = shared_of(ctx)
    return Call(
        url=url if url is not None else shared.url,
        token=token if token is not None else shared.token,
        out=Output(as_json=as_json or shared.as_json),
    )


def command(
    app: typer.Typer, name: str | None = None, *, panel: str | None = None
) -> Callable[[Command], Command]:
    """Register ``async def function(call, …) -> exit code or None`` with the shared options."""

    def decorate(function: Command) -> Command:
        hints = get_type_hints(function, include_extras=True)
        own = list(inspect.signature(function).parameters.values())[1:]
        block: list[inspect.Parameter] = []
        if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD:
            block = _parameters(hints[own.pop().name])
        names = {one.name for one in block}

        @functools.wraps(function)
        def run(ctx: typer.Context, **values: Any) -> int | None:
            call = merge(ctx, values.pop("url"), values.pop("token"), values.pop("as_json"))
            options = given({name: values.pop(name) for name in names})
            return asyncio.run(function(call, **values, **options))

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter("ctx", keyword, annotation=typer.Context),
            *(p.replace(kind=keyword, annotation=hints[p.name]) for p in own),
            *block,
            inspect.Parameter("url", keyword, annotation=_Url, default=None),
            inspect.Parameter("token", keyword, annotation=_Token, default=None),
            inspect.Parameter("as_json", keyword, annotation=_Json, default=False),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, rich_help_panel=panel)(run)
        return function

    return decorate


def _parameters(unpacked: Any) -> list[inspect.Parameter]:
    """A parameter for each key of ``Unpack[block]``; by default a flag is false, others None."""
    (block,) = get_args(unpacked)
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kind,
            default=False if get_args(kind)[0] is bool else None,
        )
        for name, kind in get_type_hints(block, include_extras=True).items()
    ]


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that somebody gave."""
    return {name: it for name, it in values.items() if it is not None and it is not False}


# --- commands below a command --------------------------------------------------------------------

DEFAULT = "list"
_HELP = ("--help", "-h")


class ListByDefault(TyperGroup):
    """A group whose ``list`` is meant when the first word is none of its commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and (not args or args[0] not in {*self.commands, *_HELP}):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


def nested(
    app: typer.Typer,
    name: str,
    help_: str,
    *,
    panel: str | None = None,
    list_by_default: bool = False,
) -> typer.Typer:
    """The group ``tickwheel NAME``, ready for its commands."""
    kind = ListByDefault if list_by_default else TyperGroup
    found = typer.Typer(help=help_, cls=kind)
    app.add_typer(found, name=name, no_args_is_help=not list_by_default, rich_help_panel=panel)
    return found


# --- questions to a person -----------------------------------------------------------------------


def can_ask(call: Call) -> bool:
    """Whether a person at a terminal can answer."""
    return not call.out.as_json and sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> bool:
    """Ask for yes or no; no is the default. Blocks, so ask while no connection is open."""
    # The event loop's own handler would only note a Ctrl-C and let the question stand.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return typer.confirm(question, err=True)
    finally:
        signal.signal(signal.SIGINT, before)
