"""Commands: how they are registered, call the daemon, and ask questions.

``command`` registers a function that takes a ``Call``: the daemon's address, the token and the
output. The shared options are accepted before the command's name (for all commands) and after it
(which takes precedence), so that nobody has to remember their place. A command marked ``offline``
needs no daemon and has only ``--json``. ``nested`` makes a group of commands. ``ask`` asks a
person; a script decides by an option.

A block of options that several commands share is a ``TypedDict``, each key annotated like a
parameter. A command takes it as ``**options: Unpack[GroupOptions]`` and gets the options that were
given.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
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

URL_HELP = "The daemon: tcp://HOST:PORT or tls://HOST:PORT, several separated by commas. Default: tcp://127.0.0.1:7355."
TOKEN_HELP = "The token for the daemon."
KEYS_HELP = "Keys of encrypted bodies: lines NAME BASE64, readable only by you."
JSON_HELP = "One JSON object per line on stdout; remarks go to stderr."
SHARED = "Shared by all commands"

Command = Callable[..., Any]
"""A command's function, a coroutine or not. It returns the exit code; None means 0."""
F = TypeVar("F", bound=Command)
T = TypeVar("T")

_PANEL: dict[str, Any] = {"rich_help_panel": SHARED}
_SHARED: dict[str, Any] = {
    "url": Annotated[str | None, typer.Option("--url", metavar="URL", help=URL_HELP, **_PANEL)],
    "token": Annotated[
        str | None, typer.Option("--token", metavar="TOKEN", help=TOKEN_HELP, **_PANEL)
    ],
    "keys_file": Annotated[
        str | None, typer.Option("--keys-file", metavar="FILE", help=KEYS_HELP, **_PANEL)
    ],
    "as_json": Annotated[bool, typer.Option("--json", help=JSON_HELP, **_PANEL)],
}
"""The options that all commands share, by the parameters of ``merge``."""
CLIENT_NAME = "tickwheel-cli"
CONNECT_S = 3.0
"""Seconds that a command searches for a daemon."""


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
    has_token_option: bool = False
    """Whether the token was given on the command line instead of in the environment."""

    def client(self, **options: Any) -> Client:
        """Return a client that is not connected, for ``async with``. It waits less long for a
        missing daemon than the client of a program."""
        options = {"connect_timeout": CONNECT_S, **options}
        return Client(self.url, token=self.token, name=CLIENT_NAME, **options)

    async def ask(self, question: Callable[[Client], Awaitable[T]]) -> T:
        """Return the daemon's answer to one request."""
        async with self.client() as client:
            return await question(client)

    async def listed(
        self,
        limit: int | None,
        find: Callable[[Client, int | None], AsyncIterator[Any]],
        listing: Listing,
    ) -> None:
        """Show the items that ``find(client, count)`` yields."""
        async with self.client() as client:
            await listing.ask(limit, lambda count: find(client, count))


def merge(
    ctx: typer.Context,
    url: str | None = None,
    token: str | None = None,
    keys_file: str | None = None,
    as_json: bool = False,
) -> Call:
    """Merge the shared options: an option after the command's name takes precedence."""
    if keys_file is not None:  # for every client of this process
        os.environ[KEYS_VARIABLE] = keys_file
    shared = ctx.obj if isinstance(ctx.obj, Shared) else Shared()
    source = ctx.find_root().get_parameter_source("token")
    return Call(
        url=url if url is not None else shared.url,
        token=token if token is not None else shared.token,
        out=Output(as_json=as_json or shared.as_json),
        has_token_option=source is not None and source.name == "COMMANDLINE",
    )


# --- commands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Default:
    """The default value of an option in a block, instead of None or false."""

    value: Any


def limit_file_mode() -> None:
    """Apply the environment's ``file_mode`` if a command does not read settings. Raise
    BadRequest for an invalid mode."""
    mode = environment.value(FILE_MODE_ENV) or disk.FILE_MODE
    if mode not in disk.FILE_MODES:
        raise BadRequest(
            f"{FILE_MODE_ENV} must be one of {', '.join(disk.FILE_MODES)}, not {mode!r:.20}"
        )
    disk.withhold(mode)


def offline(json_help: str | None = JSON_HELP) -> Callable[[F], F]:
    """Mark a command that needs no daemon: its only shared option is ``--json``, if any."""

    def mark(function: F) -> F:
        function.json_help = json_help  # type: ignore[attr-defined]  # ``command`` reads it
        return function

    return mark


def command(
    app: typer.Typer, name: str | None = None, *, panel: str | None = None
) -> Callable[[F], F]:
    """Register ``function(call, …)``, a coroutine or not, which returns an exit code or None."""

    def decorate(function: F) -> F:
        hints = get_type_hints(function, include_extras=True)
        own = list(inspect.signature(function).parameters.values())[1:]
        block: list[inspect.Parameter] = []
        if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD:
            block = _parameters(hints[own.pop().name])

        @functools.wraps(function)
        def run(ctx: typer.Context, **values: Any) -> int | None:
            shared = {name: values.pop(name) for name in _SHARED if name in values}
            options = given({option.name: values.pop(option.name) for option in block})
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


def _named(parameter: inspect.Parameter) -> inspect.Parameter:
    """Set the option's name where typer would choose another: a flag gets no opposite, and a Python
    keyword no underscore."""
    value_type, info, *_ = get_args(parameter.annotation)
    needs_name = value_type is bool or parameter.name.endswith("_")
    # In ``Annotated``, typer keeps an option's first name in ``default``.
    if not isinstance(info, OptionInfo) or isinstance(info.default, str) or not needs_name:
        return parameter
    info = copy.copy(info)
    info.param_decls = (f"--{parameter.name.rstrip('_').replace('_', '-')}",)
    return parameter.replace(annotation=Annotated[value_type, info])


def _shared_parameters(function: Command) -> list[inspect.Parameter]:
    options = _SHARED
    if hasattr(function, "json_help"):
        json_flag = Annotated[bool, typer.Option("--json", help=function.json_help)]
        options = {"as_json": json_flag} if function.json_help is not None else {}
    return [
        inspect.Parameter(n, _KEYWORD, annotation=kind, default=False if n == "as_json" else None)
        for n, kind in options.items()
    ]


def _parameters(unpacked: Any) -> list[inspect.Parameter]:
    """Return a parameter for each key of ``Unpack[block]``; the default is that of ``Default``,
    or else false for a flag and None for other options."""
    (block,) = get_args(unpacked)
    parameters = []
    for name, kind in get_type_hints(block, include_extras=True).items():
        value_type, info, *default = get_args(kind)
        value = default[0].value if default else False if value_type is bool else None
        annotation: Any = Annotated[value_type, info]
        parameters.append(inspect.Parameter(name, _KEYWORD, annotation=annotation, default=value))
    return parameters


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that were given."""
    return {name: v for name, v in values.items() if v is not None and v is not False}


def exit_code(error: TickwheelError) -> int:
    """Return the exit code of an error by its kind, so that scripts can distinguish errors."""
    if isinstance(error, (Unreachable, ConnectionLost)):
        return EXIT_UNREACHABLE
    if isinstance(error, (NotFound, TaskGone)):
        return EXIT_NOT_FOUND
    return EXIT_USAGE if isinstance(error, BadRequest) else EXIT_FAILED


# --- commands below a command --------------------------------------------------------------------

DEFAULT_COMMAND = "list"
_HELP = ("--help", "-h")


class ListByDefault(TyperGroup):
    """A group of commands that runs ``list`` when the first word is not one of its commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and (not args or args[0] not in {*self.commands, *_HELP}):
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


def nested(
    app: typer.Typer,
    name: str,
    help_: str,
    *,
    panel: str | None = None,
    list_by_default: bool = False,
) -> typer.Typer:
    """Return the group ``tickwheel NAME``, to which commands can be added."""
    kind = ListByDefault if list_by_default else TyperGroup
    group = typer.Typer(help=help_, cls=kind)
    app.add_typer(group, name=name, no_args_is_help=not list_by_default, rich_help_panel=panel)
    return group


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at a Ctrl-C, even if the event loop is blocked. Its own handler would
    only record the signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


# --- questions to a person -----------------------------------------------------------------------


def can_ask(call: Call) -> bool:
    """Return whether a person at a terminal can answer."""
    return not call.out.as_json and sys.stdin.isatty() and sys.stderr.isatty()


def ask_person(question: str) -> bool:
    """Ask for yes or no, default no. Blocks, so call it only without an open connection."""
    with interruptible():
        return typer.confirm(question, err=True)


def confirmed(
    call: Call, refusal: str, question: str, declined_remark: str = "nothing was changed"
) -> bool:
    """Return whether a person says yes. For a script, ``refusal`` says what would happen;
    ``declined_remark`` follows a no."""
    if not can_ask(call):
        call.out.remark(f"conflict: {refusal}; add --yes")
        return False
    if not ask_person(question):
        call.out.remark(declined_remark)
        return False
    return True
