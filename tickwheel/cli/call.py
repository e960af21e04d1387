"""How a command talks to the daemon and ends: its registration, its shared options, its questions.

``command`` registers a function that takes a ``Call``: the address of the daemon, its token,
the output. These three options are understood before the command's name (for all that follows)
and after it (which wins), so that nobody has to remember where they belong. A command that is
marked ``offline`` asks no daemon and has ``--json`` alone. ``nested`` makes commands below a
command. ``ask`` asks a person; a script decides by an option.

A block of options that several commands have is a ``TypedDict``, each key with its type and help as
a parameter has them; a command takes it as ``**options: Unpack[GroupOptions]`` and finds there what
was given. Where a command says of one of them something else, it is marked with ``described``.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperGroup
from typer.models import OptionInfo

from tickwheel import disk, environment
from tickwheel.cli.output import Listing, Output
from tickwheel.client import Client
from tickwheel.client.encodings import KEYS_VARIABLE
from tickwheel.errors import (
    BadRequest,
    ConnectionLost,
    NotFound,
    TaskGone,
    TickwheelError,
    Unreachable,
)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_NOT_FOUND = 4

FILE_MODE_ENV = "TICKWHEEL_FILE_MODE"

URL_HELP = "The daemon: tcp://HOST:PORT or tls://HOST:PORT, several with commas. Default: tcp://127.0.0.1:7355."
TOKEN_HELP = "The token that the daemon asks for."
KEYS_HELP = "Keys of encrypted bodies, a line NAME BASE64 each; no other user may read it."
JSON_HELP = "One JSON object a line on stdout; remarks go to stderr."
SHARED = "Shared by all commands"

Command = Callable[..., Any]
"""A command's function, a coroutine or not; its result is the exit code, None for 0."""
F = TypeVar("F", bound=Command)
T = TypeVar("T")

_Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help=URL_HELP, rich_help_panel=SHARED)
]
_Token = Annotated[
    str | None, typer.Option("--token", metavar="TOKEN", help=TOKEN_HELP, rich_help_panel=SHARED)
]
_Keys = Annotated[
    str | None, typer.Option("--keys-file", metavar="FILE", help=KEYS_HELP, rich_help_panel=SHARED)
]
_Json = Annotated[bool, typer.Option("--json", help=JSON_HELP, rich_help_panel=SHARED)]


CONNECT_S = 3.0
"""How long a command tries to find a daemon, in seconds."""


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
    has_written_token: bool = False
    """Whether the token stood on the command line, and not in the environment."""

    def client(self, **options: Any) -> Client:
        """A client that is not connected yet, for use in ``async with``. A person waits less long
        for a daemon that is not there than a program does."""
        options = {"connect_timeout": CONNECT_S, **options}
        return Client(self.url, token=self.token, name="tickwheel-cli", **options)

    async def ask(self, question: Callable[[Client], Awaitable[T]]) -> T:
        """The daemon's answer to one question."""
        async with self.client() as client:
            return await question(client)

    async def listed(
        self,
        limit: int | None,
        find: Callable[[Client, int | None], AsyncIterator[T]],
        listing: Listing[T],
    ) -> None:
        """Show what ``find(client, how many)`` finds, as the listing has it."""
        async with self.client() as client:
            await listing.ask(limit, lambda most: find(client, most))


def merge(
    ctx: typer.Context,
    url: str | None = None,
    token: str | None = None,
    keys_file: str | None = None,
    as_json: bool = False,
) -> Call:
    """The options of a command: one after it wins over the same one before it."""
    if keys_file is not None:  # for every client of this process
        os.environ[KEYS_VARIABLE] = keys_file
    shared = ctx.obj if isinstance(ctx.obj, Shared) else Shared()
    source = ctx.find_root().get_parameter_source("token")
    return Call(
        url=url if url is not None else shared.url,
        token=token if token is not None else shared.token,
        out=Output(as_json=as_json or shared.as_json),
        has_written_token=source is not None and source.name == "COMMANDLINE",
    )


# --- commands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Default:
    """Beside an option of a block: its value when it is not given, instead of None or false."""

    value: Any


def limit_file_mode() -> None:
    """Give the files of a command that has no settings the ``file_mode`` of the environment.
    Raises BadRequest for one that is not a mode."""
    mode = environment.value(FILE_MODE_ENV) or disk.FILE_MODE
    if mode not in disk.FILE_MODES:
        raise BadRequest(f"{FILE_MODE_ENV} must be {', '.join(disk.FILE_MODES)}, not {mode!r:.20}")
    disk.withhold(mode)


def offline(json_help: str | None = JSON_HELP) -> Callable[[F], F]:
    """Mark a command that asks no daemon: of the shared options it has ``--json`` at most."""
    return _marked("json_help", json_help)


def described(**helps: str) -> Callable[[F], F]:
    """Mark a command with its own help texts of options that are in its block."""
    return _marked("helps", helps)


def _marked(name: str, value: Any) -> Callable[[F], F]:
    def mark(function: F) -> F:
        setattr(function, name, value)
        return function

    return mark


def command(
    app: typer.Typer, name: str | None = None, *, panel: str | None = None
) -> Callable[[F], F]:
    """Register ``function(call, …) -> exit code or None``, a coroutine or not."""

    def decorate(function: F) -> F:
        hints = get_type_hints(function, include_extras=True)
        own = list(inspect.signature(function).parameters.values())[1:]
        block: list[inspect.Parameter] = []
        if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD:
            block = _parameters(hints[own.pop().name], getattr(function, "helps", {}))

        @functools.wraps(function)
        def run(ctx: typer.Context, **values: Any) -> int | None:
            shared = {one: values.pop(one) for one in _SHARED if one in values}
            options = given({one.name: values.pop(one.name) for one in block})
            result = function(merge(ctx, **shared), **values, **options)
            code: int | None = asyncio.run(result) if inspect.iscoroutine(result) else result
            return code

        parameters = [
            inspect.Parameter("ctx", _KEYWORD, annotation=typer.Context),
            *(_named(p.replace(kind=_KEYWORD, annotation=hints[p.name])) for p in own),
            *map(_named, block),
            *_shared_parameters(function),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, rich_help_panel=panel)(run)
        return function

    return decorate


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_SHARED = ("url", "token", "keys_file", "as_json")


def _named(parameter: inspect.Parameter) -> inspect.Parameter:
    """With the option's name where typer would give it another: a flag has no opposite, and what
    Python keeps for itself no underscore."""
    value_type, info, *_ = get_args(parameter.annotation)
    is_other = value_type is bool or parameter.name.endswith("_")
    # Beside a type, typer keeps the first name as the default.
    if not isinstance(info, OptionInfo) or isinstance(info.default, str) or not is_other:
        return parameter
    info = copy.copy(info)
    info.param_decls = (f"--{parameter.name.rstrip('_').replace('_', '-')}",)
    return parameter.replace(annotation=Annotated[value_type, info])


def _shared_parameters(function: Command) -> list[inspect.Parameter]:
    kinds: dict[str, tuple[Any, Any]] = {
        "url": (_Url, None), "token": (_Token, None), "keys_file": (_Keys, None),
        "as_json": (_Json, False),
    }  # fmt: skip
    if hasattr(function, "json_help"):
        its_json = Annotated[bool, typer.Option("--json", help=function.json_help)]
        kinds = {"as_json": (its_json, False)} if function.json_help is not None else {}
    return [
        inspect.Parameter(name, _KEYWORD, annotation=kind, default=default)
        for name, (kind, default) in kinds.items()
    ]


def _parameters(unpacked: Any, helps: Mapping[str, str]) -> list[inspect.Parameter]:
    """A parameter for each key of ``Unpack[block]``; by default a flag is false, others None."""
    (block,) = get_args(unpacked)
    found = []
    for name, kind in get_type_hints(block, include_extras=True).items():
        value_type, info, *default = get_args(kind)
        if name in helps:
            info = copy.copy(info)
            info.help = helps[name]
        value = default[0].value if default else False if value_type is bool else None
        its_kind: Any = Annotated[value_type, info]
        found.append(inspect.Parameter(name, _KEYWORD, annotation=its_kind, default=value))
    return found


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that somebody gave."""
    return {name: it for name, it in values.items() if it is not None and it is not False}


def exit_code(error: TickwheelError) -> int:
    """The exit code of an error, by its kind, so that scripts can distinguish errors."""
    if isinstance(error, (Unreachable, ConnectionLost)):
        return EXIT_UNREACHABLE
    if isinstance(error, (NotFound, TaskGone)):
        return EXIT_NOT_FOUND
    return EXIT_USAGE if isinstance(error, BadRequest) else EXIT_FAILED


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


def confirmed(
    call: Call, refusal: str, question: str, nothing: str = "nothing was changed"
) -> bool:
    """Whether a person says yes. A script is told by ``refusal`` what would happen; ``nothing`` is
    the remark of a no."""
    if not can_ask(call):
        call.out.remark(f"conflict: {refusal}; say --yes")
        return False
    if not ask(question):
        call.out.remark(nothing)
        return False
    return True
